"""The sink of the distributed mode: a Kafka topic for records and another one for resync requests.

The producer is idempotent. It retries until each record has arrived once and in order, however long the broker is
unavailable. `send` therefore waits instead of failing, while events accumulate in the publisher's bounded queue.
"""

import asyncio
import contextlib
import importlib.util
import logging
import math
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from aiokafka import TopicPartition, errors
from aiokafka.partitioner import DefaultPartitioner

from kv_events.codec import decode_resync
from kv_events.errors import InvalidValueError, RecordRejectedError, check_type, shorten
from kv_events.kafka.connection import KafkaConnection, KafkaUnreachableError
from kv_events.kafka.private_parts import check_fetching, describe_topics, start_client, stop_client
from kv_events.kafka.topics import inspect_topics, mismatches
from kv_events.limits import MAX_RECORD_BYTES
from kv_events.runtime.outages import Outage, RateLimitedLogger
from kv_events.runtime.supervised import Backoff
from kv_events.schema import ResyncRequest
from kv_events.streams import worker_key
from publisher.settings import PublisherSettings
from publisher.sinks.base import OutRecord, SinkRejectedError, SinkUnavailableError

logger = logging.getLogger(__name__)

_FOR_GOOD = (errors.InvalidTopicError, errors.MessageSizeTooLargeError, errors.RecordTooLargeError)
_RETRY_S = 1.0
_LOOK_S = 1.0
"""Time without requests after which the control topic is looked for."""
_LONGEST_PAUSE_S = 60.0
_NO_TIME = -1
_TIME_MARGIN_MS = 60_000
"""Well above the pauses between attempts to send the same record."""
_PATIENCE_S = 5.0
"""Time without acknowledgements after which the topics are looked for."""


class KafkaSink:
    """Sends to `events_topic` and reads `control_topic` from its end. Creates missing topics."""

    def __init__(self, settings: PublisherSettings) -> None:
        """Raises InvalidValueError."""
        check_type("settings", settings, PublisherSettings)
        if settings.compression != "none" and importlib.util.find_spec("cramjam") is None:
            expected = "none, or the package cramjam installed (pip install 'kvsight[compression]')"
            raise InvalidValueError("compression", settings.compression, expected)
        self._settings = settings
        self._connection = KafkaConnection(settings)
        self.outage = Outage(
            logger,
            f"Kafka at {self._connection.bootstrap} takes no records",
            f"Kafka at {self._connection.bootstrap} takes records",
        )
        self._restoring = Backoff(_LOOK_S, _LONGEST_PAUSE_S)  # of the control topic
        self._is_compared = False  # whether differences between topics and settings have been logged
        self._limited_logger = RateLimitedLogger(logger, f"control topic {settings.control_topic}")
        self._producer: Any = None
        self._consumer: Any = None
        # the broker refuses times that are an hour ahead (its setting); over the monotonic clock, so that a clock that
        # is set right is trusted again
        self._refused_lead_ms = math.inf
        self._records: Sequence[OutRecord] = ()  # records of the current or interrupted call
        self._acknowledged: list[asyncio.Future[Any]] = []  # for each record passed to the producer

    async def start(self) -> None:
        """Create missing topics and connect the producer and the consumer. Raises SinkUnavailableError."""
        try:
            with self._connection.guarded("read", SinkUnavailableError):
                await self._start_producer()
                await self._start_consumer()
        except SinkUnavailableError:
            await self.stop()
            raise

    async def send(self, records: Sequence[OutRecord]) -> None:
        """Send records concurrently and wait for all acknowledgements.

        A call with the same sequence object continues an interrupted call. Raises SinkRejectedError or
        SinkUnavailableError.
        """
        if records is not self._records:
            self._records, self._acknowledged = records, []
        try:
            await self._deliver(records)
        except _FOR_GOOD as error:
            raise SinkRejectedError(self._connection.failure(error, "write")) from error
        except KafkaUnreachableError as error:
            raise SinkUnavailableError(str(error)) from error
        except errors.InvalidTimestampError as error:
            self._refused_lead_ms = max(map(_lead_ms, records)) - _TIME_MARGIN_MS
            await self._stop_producer()
            detail = "it refuses the time of records, so they are sent without; is the clock of this machine right?"
            raise SinkUnavailableError(f"Kafka at {self._connection.bootstrap}: {detail}") from error
        except (errors.KafkaError, OSError) as error:
            await self._stop_producer()  # its idempotent session may be lost; the retry starts a new one
            raise SinkUnavailableError(self._connection.failure(error, "write")) from error
        self._records, self._acknowledged = (), []

    async def stop(self) -> None:
        """Flush for at most one second, then disconnect."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await stop_client(consumer)
        await self._stop_producer()

    async def requests(self) -> AsyncIterator[ResyncRequest | None]:
        """Yield the requests of the control topic, and None for any other message."""
        while self._consumer is not None:
            try:
                async with asyncio.timeout(_LOOK_S):
                    message = await self._consumer.getone()
            except errors.ConsumerStoppedError:
                return
            except TimeoutError:
                await self._restore_control_topic()
                await self._restore_consumer()
                continue
            except (errors.CorruptRecordException, UnicodeDecodeError):
                await self._consumer.seek_to_end()  # requests that are skipped with it are repeated
                yield None
                continue
            except errors.KafkaError as error:
                self._limited_logger.warning("%s; listening again", self._connection.failure(error, "read"))
                await asyncio.sleep(_RETRY_S)
                continue
            try:
                request = decode_resync(message.value or b"")  # None: a record without a value
            except RecordRejectedError as error:
                self._limited_logger.warning("a message is skipped: %s", shorten(error.detail, 200))
                request = None
            yield request

    async def _deliver(self, records: Sequence[OutRecord]) -> None:
        """Send records. While they are not acknowledged, topics that were deleted are created again."""
        if self._producer is None:
            await self._start_producer()
        sending = asyncio.ensure_future(self._send_all(records))
        try:
            while not (await asyncio.wait({sending}, timeout=_PATIENCE_S))[0]:
                with contextlib.suppress(errors.KafkaError, KafkaUnreachableError, OSError):
                    await self._restore_topics()
            await sending
        finally:
            sending.cancel()

    async def _send_all(self, records: Sequence[OutRecord]) -> None:
        for record in records[len(self._acknowledged) :]:
            sending = self._producer.send(
                self._settings.events_topic,
                value=record.payload,
                key=record.key,
                timestamp_ms=record.timestamp_ms if _lead_ms(record) < self._refused_lead_ms else _NO_TIME,
                headers=list(record.headers),
            )
            self._acknowledged.append(await sending)
        await asyncio.gather(*self._acknowledged)

    async def _start_producer(self) -> None:
        await self._create_missing_topics()
        compression = self._settings.compression
        producer = self._connection.producer(
            enable_idempotence=True,
            acks="all",
            compression_type=None if compression == "none" else compression,
            max_batch_size=MAX_RECORD_BYTES,
            partitioner=_partition_of_worker,
        )
        await start_client(producer)
        self._producer = producer
        self._acknowledged = []

    async def _create_missing_topics(self) -> None:
        topics = await inspect_topics(self._connection, self._settings, create=True)
        if topics.created:
            logger.info("created topics: %s", ", ".join(topics.created))
        if not self._is_compared:
            for topic in topics.found.values():
                for mismatch in mismatches(topic, self._settings):
                    logger.warning("topic %s: %s", topic.name, mismatch)
        self._is_compared = True

    async def _restore_topics(self) -> None:
        names = {self._settings.events_topic, self._settings.control_topic}
        if names - set(await describe_topics(self._producer, names)):
            await self._create_missing_topics()

    async def _restore_control_topic(self) -> None:
        """Create it if it was deleted. A consumer knows that from its last attempt to read."""
        topic = self._settings.control_topic
        if self._consumer is None or self._consumer.partitions_for_topic(topic):
            return
        try:
            await self._create_missing_topics()
        except KafkaUnreachableError as error:
            self._limited_logger.warning("it does not exist any longer: %s", error)
            await self._restoring.pause()
        else:
            self._restoring.reset()

    async def _restore_consumer(self) -> None:
        """Replace the consumer if it reads no longer."""
        given_up = self._consumer
        if given_up is None or self._producer is None:
            return
        try:
            check_fetching(given_up)
        except RuntimeError as error:
            self._limited_logger.warning("%s; listening again", error)
            try:
                await self._start_consumer()
            except (errors.KafkaError, KafkaUnreachableError, OSError):
                return  # repeated at the next look
            await stop_client(given_up)

    async def _stop_producer(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            await stop_client(producer)

    async def _start_consumer(self) -> None:
        topic = self._settings.control_topic
        partitions = await self._producer.partitions_for(topic)
        consumer = self._connection.consumer(group_id=None, enable_auto_commit=False, auto_offset_reset="latest")
        await start_client(consumer)
        try:
            consumer.assign([TopicPartition(topic, partition) for partition in sorted(partitions)])
            await consumer.seek_to_end()
        except BaseException:
            await stop_client(consumer)
            raise
        self._consumer = consumer


_partition_of_key = DefaultPartitioner()


def _partition_of_worker(key: bytes | None, partitions: Sequence[int], available: Sequence[int]) -> int:
    """Put all streams of a worker into one partition, that of its rank 0, so that one reader can have them all."""
    found: int = _partition_of_key(None if key is None else worker_key(key), partitions, available)
    return found


def _lead_ms(record: OutRecord) -> float:
    return record.timestamp_ms - time.monotonic() * 1000
