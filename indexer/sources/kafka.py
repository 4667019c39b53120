"""Reads partitions of a Kafka topic, all or some, by explicit offsets."""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from typing import Any

from aiokafka import TopicPartition
from aiokafka.errors import CorruptRecordException

from indexer.sources.base import LogReplacedError, SourceUnavailableError
from kv_events.codec import encode_resync
from kv_events.kafka.connection import KafkaConnection
from kv_events.kafka.private_parts import check_fetching, describe_topics, start_client, stop_client, topic_id
from kv_events.kafka.settings import KafkaSettings
from kv_events.kafka.topics import inspect_topics, retention_mismatches
from kv_events.records import Headers, LogRecord
from kv_events.runtime.tracing import open_spans, trace_headers
from kv_events.schema import ResyncRequest

logger = logging.getLogger(__name__)

_FETCH_WAIT_MS = 100
_PROBE_TIMEOUT_S = 3.0
_MAX_RECORDS = 2000
_UNREADABLE = (CorruptRecordException, UnicodeDecodeError)
"""What aiokafka raises for a record that it cannot read, such as one with a header whose name is not UTF-8."""
_MOST_UNREADABLE = 100
"""Records of one partition that are skipped before the others have their turn."""
_ID_TRIES, _ID_PAUSE_S = 4, 0.1
_PARTITION_BYTES = 4 * 2**20


class KafkaSource:
    """See `Source`. Partitions that are added later are read from their beginning."""

    def __init__(
        self, settings: KafkaSettings, snapshot_interval_s: float | None = None, topic: str | None = None
    ) -> None:
        """snapshot_interval_s: seconds between the indexer's snapshots, to compare with the topic's retention.
        topic: another one than that of the events. It may be missing.

        Raises InvalidValueError for settings without a broker, or for a file that cannot be used.
        """
        self._settings = settings
        self._snapshot_interval_s = snapshot_interval_s
        self._connection = KafkaConnection(settings)
        self._events_topic = topic or settings.events_topic
        self._may_be_missing = topic is not None
        self._control_topic = settings.control_topic
        self._awaited: set[str] = set()  # topics that do not exist
        self._producer: Any = None
        self._consumer: Any = None
        self._only: frozenset[int] | None = None  # partitions to read; None: all
        self._begin_at: Mapping[int, int] = {}  # positions of those that `read_only` named
        self._is_there = False  # whether the topic exists
        self._topic_id: bytes | None = None  # of the topic that is read; None if there is none, or if it is unknown
        self._next_offsets: dict[int, int] = {}  # partition -> offset after the newest record that was fetched
        self._was_found = False  # whether the topic existed before
        self._is_replaced = False  # whether positions of before mean nothing
        self._assigned: set[TopicPartition] = set()
        self._found: set[TopicPartition] = set()  # the topic's partitions, as of the newest look
        self._times_ms: dict[int, int] = {}  # partition -> time of its newest record
        self._clients = AsyncExitStack()
        self._sends_traces = open_spans() is not None

    async def start(self, positions: Mapping[int, int]) -> Mapping[int, int]:
        self._assigned, self._found, self._next_offsets = set(), set(), {}
        try:
            with self._guarded("read"):
                await self._connection.check()
                await self._open_clients()
                await self._compare_retention()
                found_id = await topic_id(self._consumer, self._events_topic)
                self._is_replaced |= None not in (found_id, self._topic_id) and found_id != self._topic_id
                begins = await self._assign_new({} if self._is_replaced else positions)
            self._check_topic_is_left()
        except BaseException:  # also a cancellation
            await self._clients.aclose()
            raise
        self._topic_id = found_id or self._topic_id
        self._is_replaced = False
        return begins

    def _check_topic_is_left(self) -> None:
        if self._was_found and not self._is_there:
            raise SourceUnavailableError(f"topic {self._events_topic} does not exist any longer; its writers create it")

    async def read_only(self, partitions: Collection[int], positions: Mapping[int, int]) -> Mapping[int, int]:
        """Read these partitions from now on, and no others. positions: see `start`; those that are read already go on.

        Returns the next offset of each one that exists. Before `start`, only notes them. Not while records are fetched.
        Raises SourceUnavailableError.
        """
        self._only, self._begin_at = frozenset(partitions), positions
        if self._consumer is None:
            return {}  # `start` begins to read them
        with self._guarded("read"):
            await self._assign_new(positions)
            return {tp.partition: await self._consumer.position(tp) for tp in self._assigned}

    async def fetch(self) -> Sequence[LogRecord]:
        if not self._found:
            await asyncio.sleep(_FETCH_WAIT_MS / 1000)
            return []
        with self._guarded("read"):
            try:
                if self._found != self._assigned:
                    await self._assign_new(self._begin_at)
                check_fetching(self._consumer)  # the consumer's loop starts again
                return self._accepted(await self._consumer.getmany(timeout_ms=_FETCH_WAIT_MS, max_records=_MAX_RECORDS))
            except _UNREADABLE:
                return [record for tp in sorted(self._assigned) for record in await self._fetch_carefully(tp)]

    async def _fetch_carefully(self, tp: TopicPartition) -> list[LogRecord]:
        """Fetch the next record of a partition. Records that aiokafka cannot read come without key and payload."""
        unreadable: list[LogRecord] = []
        while len(unreadable) < _MOST_UNREADABLE:
            try:
                fetched = await self._consumer.getmany(tp, timeout_ms=_FETCH_WAIT_MS, max_records=1)
            except _UNREADABLE:
                offset = await self._consumer.position(tp)
                self._consumer.seek(tp, offset + 1)
                self._next_offsets[tp.partition] = offset + 1
                unreadable.append(LogRecord(tp.partition, offset, self._times_ms.get(tp.partition, 0), b"", b""))
            else:
                return unreadable + self._accepted(fetched)
        return unreadable

    def _accepted(self, fetched: Mapping[TopicPartition, Sequence[Any]]) -> list[LogRecord]:
        for tp, records in fetched.items():
            if records[0].offset < self._next_offsets.get(tp.partition, 0):  # aiokafka went back to the beginning
                self._is_replaced = True
                raise self._replaced()
            self._next_offsets[tp.partition] = records[-1].offset + 1
        return [
            LogRecord(r.partition, r.offset, self._time_ms(r), r.key or b"", r.value or b"", headers=self._headers(r))
            for records in fetched.values()
            for r in records
        ]

    def _replaced(self) -> LogReplacedError:
        return LogReplacedError(f"topic {self._events_topic} was deleted or created again")

    def _time_ms(self, record: Any) -> int:
        """Return the time of a record, or that of the record before it if a publisher could send none."""
        if record.timestamp >= 0:
            self._times_ms[record.partition] = record.timestamp
        return self._times_ms.get(record.partition, 0)

    def _headers(self, record: Any) -> Headers:
        return trace_headers(record.headers) if record.headers and self._sends_traces else ()

    async def ends(self) -> Mapping[int, int]:
        with self._guarded("read"):
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                await self._look_for_partitions()
                if self._topic_id is None:
                    self._topic_id = await topic_id(self._consumer, self._events_topic)
                elif await self._current_id() != self._topic_id:
                    self._is_replaced = True
                    raise self._replaced()
                ends = await self._consumer.end_offsets(list(self._found))
        return {tp.partition: offset for tp, offset in ends.items()}

    async def _current_id(self) -> bytes | None:
        """Return the id of the topic that exists now. A broker that has just started may not know it at once."""
        for _ in range(_ID_TRIES):
            if (found_id := await topic_id(self._consumer, self._events_topic)) is not None:
                return found_id
            await asyncio.sleep(_ID_PAUSE_S)
        return None

    async def offsets_at(self, time_s: float) -> Mapping[int, int]:
        """Return partition -> offset of its first record from a time on, or its end. The source is started.

        time_s: seconds since 1970. Raises SourceUnavailableError.
        """
        with self._guarded("read"):
            ends = await self.ends()
            found = await self._consumer.offsets_for_times(dict.fromkeys(self._found, int(time_s * 1000)))
        return {tp.partition: ends[tp.partition] if at is None else at.offset for tp, at in found.items()}

    async def request(self, request: ResyncRequest) -> None:
        with self._guarded("write"):
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                if self._producer is None:
                    await self._open_producer()
                if not await describe_topics(self._producer, [self._control_topic]):
                    self._tell_whether_waiting(self._control_topic, is_waiting=True)
                    return
                self._tell_whether_waiting(self._control_topic, is_waiting=False)
                await self._producer.send_and_wait(
                    self._control_topic, encode_resync(request), key=request.stream.encode()
                )

    async def stop(self) -> None:
        self._producer = None
        await self._clients.aclose()

    def _guarded(self, operation: str) -> AbstractContextManager[None]:
        return self._connection.guarded(operation, SourceUnavailableError)

    async def _open_clients(self) -> None:
        """Create and start the clients. Each belongs to the event loop that runs when it is created."""
        self._consumer = self._connection.consumer(
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            fetch_max_wait_ms=_FETCH_WAIT_MS,
            max_partition_fetch_bytes=_PARTITION_BYTES,
        )
        await start_client(self._consumer)
        self._clients.push_async_callback(stop_client, self._consumer)

    async def _open_producer(self) -> None:
        """Connect the writer of requests. A reader that sends none needs no right to write."""
        producer = self._connection.producer(acks="all", enable_idempotence=True)
        await start_client(producer)
        self._clients.push_async_callback(stop_client, producer)
        self._producer = producer

    async def _compare_retention(self) -> None:
        """Log once what the topic's settings would lose."""
        interval_s, self._snapshot_interval_s = self._snapshot_interval_s, None
        if interval_s is not None:
            topics = await inspect_topics(self._connection, self._settings, create=False)
            if self._events_topic in topics.found:
                for mismatch in retention_mismatches(topics.found[self._events_topic], interval_s):
                    logger.warning("topic %s: %s", self._events_topic, mismatch)

    async def _assign_new(self, positions: Mapping[int, int]) -> Mapping[int, int]:
        """Begin to read new partitions, and return the offset at which each begins. Not while records are fetched.

        Partitions that are no longer wanted are left.
        """
        await self._look_for_partitions()
        found, new = self._found, self._found - self._assigned
        if found == self._assigned:
            return {}
        kept = {tp: await self._consumer.position(tp) for tp in self._assigned & found}
        for tp in self._assigned - found:
            self._next_offsets.pop(tp.partition, None)
        self._assigned = found
        self._consumer.assign(sorted(found))
        oldest = await self._consumer.beginning_offsets(list(new))
        ends = await self._consumer.end_offsets(list(new))
        for tp in new:
            wanted = positions.get(tp.partition, 0)
            kept[tp] = wanted if oldest[tp] <= wanted <= ends[tp] else oldest[tp]
        for tp, offset in kept.items():
            self._consumer.seek(tp, offset)
        return {tp.partition: kept[tp] for tp in new}

    async def _look_for_partitions(self) -> None:
        """Update `_found`. Partitions of a topic that was deleted stay."""
        described = await describe_topics(self._consumer, [self._events_topic])
        if not self._may_be_missing:
            self._tell_whether_waiting(self._events_topic, is_waiting=self._events_topic not in described)
        num_partitions = len(described.get(self._events_topic, ()))
        found = self._assigned | {TopicPartition(self._events_topic, i) for i in range(num_partitions)}
        self._found = found if self._only is None else {tp for tp in found if tp.partition in self._only}
        self._is_there = num_partitions > 0
        self._was_found = self._was_found or self._is_there

    def _tell_whether_waiting(self, topic: str, *, is_waiting: bool) -> None:
        """Log once that a topic is missing, and once that it exists."""
        if is_waiting and topic not in self._awaited:
            logger.warning(
                "waiting for topic %s: create it with `kvsight doctor --create-topics` or start a publisher", topic
            )
            self._awaited.add(topic)
        elif not is_waiting and topic in self._awaited:
            logger.warning("topic %s exists now", topic)
            self._awaited.remove(topic)
