"""Writes records to a Kafka topic, which is created if it does not exist."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

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
                    send = self._producer.send
                    sent = [await send(self._topic, value=each.payload, key=each.key) for each in records]
                    await asyncio.gather(*sent)
        except WriteUnavailableError:
            await self.stop()
            raise

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
