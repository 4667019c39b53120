"""Writes records to a Kafka topic, which is created if it does not exist."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
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

    async def stop(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            await stop_client(producer)

    async def _send(self, records: Sequence[LogRecord]) -> None:
        """Send batches that are made here: aiokafka's `send` needs more than twice as much of the processor."""
        partitions = sorted(await self._producer.partitions_for(self._topic))
        by_partition = defaultdict[int, list[LogRecord]](list)
        for each in records:
            by_partition[partitions[crc32(each.key) % len(partitions)]].append(each)
        send = self._producer.send_batch
        sent = [
            await send(batch, self._topic, partition=partition)
            for partition, members in by_partition.items()
            for batch in self._batches(members)
        ]
        await asyncio.gather(*sent)

    def _batches(self, records: Sequence[LogRecord]) -> Iterator[Any]:
        batch = self._producer.create_batch()
        for each in records:
            while batch.append(key=each.key, value=each.payload, timestamp=None) is None:  # it is full
                yield batch
                batch = self._producer.create_batch()
        yield batch

    async def _connect(self) -> None:
        topics = await inspect_topics(self._connection, self._settings, create=True, names=[self._topic])
        if topics.created:
            logger.info("created topic %s", self._topic)
        producer = self._connection.producer(enable_idempotence=True, acks="all", max_batch_size=MAX_RECORD_BYTES)
        await start_client(producer)
        self._producer = producer
