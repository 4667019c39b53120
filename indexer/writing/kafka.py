"""Writes records to a Kafka topic, which is created if it does not exist."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any
from zlib import crc32

from indexer.writing.queue import WriteUnavailableError
from kv_events.kafka.connection import KafkaConnection
from kv_events.kafka.private_parts import start_client, stop_client
from kv_events.kafka.settings import KafkaSettings
from kv_events.kafka.topics import inspect_topics
from kv_events.limits import MAX_RECORD_BYTES
from kv_events.records import Channel, LogRecord
from kv_events.reservations import encoded_id, joined, singles

logger = logging.getLogger(__name__)

_WRITE_S = 10.0


class TopicWriter:
    """Records with the same key are in one partition, and keep their order."""

    def __init__(self, settings: KafkaSettings, topic: str) -> None:
        """Raises InvalidValueError for settings without a broker, or for a file that cannot be used."""
        self._topic = topic
        self._settings = settings
        self._connection = KafkaConnection(settings)
        self._producer: Any = None

    async def write(self, records: Sequence[LogRecord]) -> None:
        """See `Write`. Connects with the first call, so that a service that writes nothing needs no right."""
        try:
            with self._connection.guarded("write", WriteUnavailableError):
                async with asyncio.timeout(_WRITE_S):
                    if self._producer is None:
                        await self._connect()
                    await self._send(records)
        except WriteUnavailableError:
            await self.stop()
            raise

    async def _send(self, records: Sequence[LogRecord]) -> None:
        """Send whole batches: to send single records takes aiokafka several times as long."""
        num_partitions, sent = len(await self._producer.partitions_for(self._topic)), []
        parts: defaultdict[int, list[LogRecord]] = defaultdict(list)
        for record in records:
            for partition, part in _placed(record, num_partitions):
                parts[partition].append(part)
        for partition, own in parts.items():
            batch = self._producer.create_batch()
            for record in own:
                fields = {"timestamp": None, "key": record.key, "value": record.payload}
                if batch.append(**fields) is None:  # it is full
                    sent.append(await self._producer.send_batch(batch, self._topic, partition=partition))
                    batch = self._producer.create_batch()
                    batch.append(**fields)
            sent.append(await self._producer.send_batch(batch, self._topic, partition=partition))
        await asyncio.gather(*sent)

    async def stop(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            await stop_client(producer)

    async def _connect(self) -> None:
        topics = await inspect_topics(self._connection, self._settings, create=True, names=[self._topic])
        if topics.created:
            logger.info("created topic %s", self._topic)
        producer = self._connection.producer(enable_idempotence=True, acks="all", max_batch_size=MAX_RECORD_BYTES)
        await start_client(producer)
        self._producer = producer


def _placed(record: LogRecord, num_partitions: int) -> Iterable[tuple[int, LogRecord]]:
    """Return the partition of a record. Several reservations in one are parted, as each has its own key."""
    if num_partitions == 1 or record.channel != Channel.RESERVATIONS:
        return [(crc32(record.key) % num_partitions, record)]
    parts: defaultdict[int, list[bytes]] = defaultdict(list)
    for payload in singles(record.payload):
        parts[crc32(encoded_id(payload).encode()) % num_partitions].append(payload)
    return [
        (partition, record._replace(key=encoded_id(own[0]).encode(), payload=joined(len(own), b"".join(own))))
        for partition, own in parts.items()
    ]
