"""Writes records to a Kafka topic, which is created if it does not exist."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any
from zlib import crc32

from indexer.writing.queue import WriteUnavailableError
from kv_events.kafka.connection import KafkaConnection
from kv_events.kafka.private_parts import start_client, stop_client
from kv_events.kafka.settings import KafkaSettings
from kv_events.kafka.topics import inspect_topics
from kv_events.limits import MAX_RECORD_BYTES
from kv_events.records import LogRecord

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
        num_partitions = len(await self._producer.partitions_for(self._topic))
        batches: defaultdict[int, list[Any]] = defaultdict(list)
        for record in records:
            of_partition = batches[crc32(record.key) % num_partitions]
            fields = {"timestamp": None, "key": record.key, "value": record.payload}
            if not of_partition or of_partition[-1].append(**fields) is None:  # there is none, or it is full
                of_partition.append(self._producer.create_batch())
                of_partition[-1].append(**fields)
        send = self._producer.send_batch
        sent = [await send(each, self._topic, partition=part) for part, several in batches.items() for each in several]
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
