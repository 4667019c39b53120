"""Writes records to a Kafka topic, which is created if it does not exist."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any
from zlib import crc32

from indexer.writing.queue import WriteUnavailableError
from kv_events.kafka.connection import KafkaConnection
from kv_events.kafka.private_parts import start_client, stop_client
from kv_events.kafka.settings import KafkaSettings
from kv_events.kafka.topics import inspect_topics
from kv_events.limits import MAX_RECORD_BYTES
from kv_events.records import LogRecord
from kv_events.reservations import MAX_JOINED, encoded_id, join, num_records, singles

logger = logging.getLogger(__name__)

_WRITE_S = 10.0
_JOINED_BYTES = 2**18
"""Bound on the size of records that are joined, of which there are at most `MAX_JOINED`."""


class TopicWriter:
    """Records with the same key are in one partition, and keep their order."""

    def __init__(self, settings: KafkaSettings, topic: str, *, are_joined: bool = False) -> None:
        """are_joined: see `Contents`. Raises InvalidValueError for settings without a broker, or for a file that cannot
        be used.
        """
        self._topic = topic
        self._are_joined = are_joined
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
        for record in chain.from_iterable(map(_split, records)) if num_partitions > 1 else records:
            parts[crc32(record.key) % num_partitions].append(record)
        for partition, own in parts.items():
            batch = self._producer.create_batch()
            for key, payload in self._joined(own):
                fields = {"timestamp": None, "key": key, "value": payload}
                if batch.append(**fields) is None:  # it is full
                    sent.append(await self._producer.send_batch(batch, self._topic, partition=partition))
                    batch = self._producer.create_batch()
                    batch.append(**fields)
            sent.append(await self._producer.send_batch(batch, self._topic, partition=partition))
        await asyncio.gather(*sent)

    def _joined(self, records: Iterable[LogRecord]) -> Iterator[tuple[bytes, bytes]]:
        """Yield key and payload of each record of the topic."""
        waiting, key, num_waiting, num_bytes = list[bytes](), b"", 0, 0
        for record in records:
            count, size = num_records(record.payload), len(record.payload)
            is_full = num_waiting + count > MAX_JOINED or num_bytes + size > _JOINED_BYTES
            if waiting and (is_full or not self._are_joined):
                yield key, _one(waiting)
                waiting, num_waiting, num_bytes = [], 0, 0
            key = key if waiting else record.key
            num_waiting, num_bytes = num_waiting + count, num_bytes + size
            waiting.append(record.payload)
        if waiting:
            yield key, _one(waiting)

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


def _one(payloads: Sequence[bytes]) -> bytes:
    return payloads[0] if len(payloads) == 1 else join(payloads)


def _split(record: LogRecord) -> Iterable[LogRecord]:
    """Return the records in one of the log, each with its own key."""
    payloads = singles(record.payload)
    if payloads == [record.payload]:
        return [record]
    return [record._replace(key=encoded_id(each).encode(), payload=each) for each in payloads]
