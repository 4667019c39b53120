"""Writes decisions to a Kafka topic, which is created if it does not exist."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from aiokafka.errors import KafkaError

from indexer.decisions.base import DecisionsUnavailableError
from kv_events.kafka.connection import KafkaConnection, KafkaUnreachableError, stop_producer
from kv_events.kafka.settings import KafkaSettings
from kv_events.kafka.topics import inspect_topics
from kv_events.limits import MAX_RECORD_BYTES
from kv_events.records import LogRecord

logger = logging.getLogger(__name__)

_WRITE_S = 10.0


class KafkaDecisions:
    """See `DecisionSink`. A decision and its outcome are in one partition, because they have the same key."""

    def __init__(self, settings: KafkaSettings) -> None:
        """Raises InvalidValueError for settings without a broker, or for a file that cannot be used."""
        self._settings = settings
        self._connection = KafkaConnection(settings)
        self._producer: Any = None

    async def write(self, records: Sequence[LogRecord]) -> None:
        """See `DecisionSink`. Connects with the first call, so that a service without decisions needs no right."""
        try:
            async with asyncio.timeout(_WRITE_S):
                if self._producer is None:
                    await self._connect()
                sent = [await self._send(record) for record in records]
                await asyncio.gather(*sent)
        except KafkaUnreachableError as error:
            raise DecisionsUnavailableError(str(error)) from error
        except (KafkaError, OSError) as error:  # TimeoutError is an OSError
            await self.stop()
            raise DecisionsUnavailableError(self._connection.failure(error, "write")) from error

    async def stop(self) -> None:
        """See `DecisionSink`."""
        producer, self._producer = self._producer, None
        if producer is not None:
            await stop_producer(producer)

    async def _send(self, record: LogRecord) -> asyncio.Future[Any]:
        topic = self._settings.decisions_topic
        future: asyncio.Future[Any] = await self._producer.send(topic, value=record.payload, key=record.key)
        return future

    async def _connect(self) -> None:
        topic = self._settings.decisions_topic
        topics = await inspect_topics(self._connection, self._settings, create=True, names=[topic])
        if topics.created:
            logger.info("created topic %s", topic)
        producer = self._connection.producer(enable_idempotence=True, acks="all", max_batch_size=MAX_RECORD_BYTES)
        try:
            await producer.start()
        except BaseException:
            await producer.stop()
            raise
        self._producer = producer
