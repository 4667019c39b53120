"""Exchange of reservations among the replicas of a service: through a topic, which each of them writes and follows."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from indexer.assembly import create_queue
from indexer.recording.recorder import RecordingThread
from indexer.settings import IndexerSettings
from indexer.slices import Interval, Slices
from indexer.sources.base import LogReplacedError
from indexer.sources.reader import Opened, SourceReader
from indexer.writing.queue import RESERVATIONS, WriteQueue
from kv_events.decisions import Choices, Decision
from kv_events.errors import RecordRejectedError
from kv_events.reservations import (
    RELEASED,
    Progressed,
    ReservationRecord,
    Reserved,
    decode_reservation,
    encode_reservation,
    is_by,
    record_prefixes,
    reservation_id,
    singles,
    time_of,
)
from kv_events.runtime.supervised import cancel, keep_running
from selection.book import LONGEST_S, MAX_RESERVATIONS, Book, BookFullError

if TYPE_CHECKING:
    from indexer.sources.kafka import KafkaSource

logger = logging.getLogger(__name__)

_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_.-]")  # names are in paths and, without escapes, in JSON
_PROBE_S = 1.0
_MARGIN_S = 5.0
"""Most by which clocks of replicas differ."""
_EXPIRE_EVERY_S = 0.5
_RESERVED = RESERVATIONS.kinds[0]
_NOT_READ = "reservations of other replicas are not read yet"


class ChoiceListener(Protocol):
    """Counts choices."""

    def take(self, record: Decision) -> None:
        """Count a choice."""

    def take_all(self, choices: Choices) -> None:
        """Count choices that were made at once."""


class ReservationExchange:
    """Writes this replica's records, and applies those of the others to the book. Belongs to one event loop."""

    def __init__(
        self, book: Book, queue: WriteQueue, source: KafkaSource | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """queue: what writes the records. source: the topic. None: there are no other replicas. clock: returns seconds
        since 1970.
        """
        self.book = book
        self.queue = queue
        self.replica = f"{_NOT_PLAIN.sub('-', socket.gethostname()[:64])}-{uuid.uuid4().hex[:12]}"
        """Name of this process in its records."""
        self.applied = 0
        """Records of other replicas that were applied."""
        self.listener: ChoiceListener | None = None
        """Hears of choices of this replica, and of those of others that were applied."""
        self.rejected: Counter[str] = Counter()
        """Reason -> records of the topic that were not applied."""
        self._own = record_prefixes(self.replica)
        self._source = source
        self._clock = clock
        self._obstacle = "" if source is None else _NOT_READ
        self._positions: dict[int, int] = {}  # partition -> offset of the next record
        self._unknown: set[str] = set()  # reservations that went on in the backlog, and whose beginning is not in it
        self._slices = Slices()

    def put(self, *records: ReservationRecord) -> str | None:
        """Queue records of this replica, which the book has already. Returns why they were dropped, or None.

        Never waits. The fields must have been checked, see `kv_events.reservations.check_reservation`.
        """
        has_log = self.queue.has_log
        why_dropped = self.queue.put(
            *((_kind(each), reservation_id(each), encode_reservation(each) if has_log else b"") for each in records)
        )
        for record in records:
            self._notify(record)
        return why_dropped

    def put_joined(self, kinds: Mapping[str, int], records: bytes) -> None:
        """Queue records that a kernel has encoded, one after the other. kinds: see `WriteQueue.put_joined`."""
        self.queue.put_joined(kinds, self.replica, records)

    def put_choices(self, choices: Choices) -> None:
        """Queue the records of choices that a kernel has booked and encoded."""
        self.put_joined({_RESERVED: len(choices.ends)}, choices.records)
        if self.listener is not None:
            self.listener.take_all(choices)

    def _notify(self, record: ReservationRecord) -> None:
        if self.listener is not None and isinstance(record, Reserved):
            self.listener.take(record.decision)

    def why_not_ready(self) -> str:
        """Return why the book may lack reservations of other replicas, or "" if it has them."""
        return self._obstacle

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Write and follow the topic during a block."""
        async with self.queue.running():
            name = "expiry of reservations"
            tasks = [asyncio.create_task(keep_running(self._expire, name, logger), name=name)]
            if self._source is not None:
                following = keep_running(self._follow, "reservations", logger, self._note_failure)
                tasks.append(asyncio.create_task(following, name="reservations"))
            try:
                yield
            finally:
                await cancel(*tasks)

    async def _expire(self) -> None:
        """End what expires while no record comes, so that selections without a booking see it."""
        while True:
            await asyncio.sleep(_EXPIRE_EVERY_S)
            self.expire(self._clock())

    def expire(self, now: float) -> None:
        """End what has expired, unless the backlog is read: later records may prolong a reservation."""
        if not self._obstacle:
            self.book.expire(now)

    def _note_failure(self, error: Exception) -> None:
        if self._obstacle:
            self._obstacle = f"reservations of other replicas cannot be read: {error}"

    async def _follow(self) -> None:
        assert self._source is not None
        reader, probe = SourceReader(self._source, what="reservations"), Interval(_PROBE_S)
        try:
            if self._obstacle:
                await self._catch_up(self._source, reader)
            else:
                await self._open(reader, self._positions)
            while True:
                await self._read(reader, self._apply)
                if probe.is_due(time.monotonic()):
                    await reader.ends()  # finds the topic, or partitions that are added later
        except LogReplacedError:
            self._positions = {}
            raise
        finally:
            await reader.stop()

    async def _catch_up(self, source: KafkaSource, reader: SourceReader) -> None:
        """Apply what is needed of the topic's past. A reservation can be older than its time-to-live."""
        back_s = self.book.ttl_s
        while True:
            self._unknown.clear()
            await source.start({})
            begins = await source.offsets_at(self._clock() - back_s - _MARGIN_S)
            await source.stop()
            opened = await self._open(reader, begins)
            while any(self._positions.get(part, 0) < end for part, end in opened.ends.items()):
                await self._read(reader, self._restore)
                self._obstacle = str(reader.outage) or _NOT_READ
            if not self._unknown or back_s >= LONGEST_S:
                break
            back_s = min(4 * back_s, LONGEST_S)
        self.book.settle(self._clock())
        self._obstacle = ""

    async def _open(self, reader: SourceReader, positions: Mapping[int, int]) -> Opened:
        while (opened := await reader.start(positions)) is None:
            pass  # it has paused
        self._positions = dict(opened.begins)
        return opened

    async def _read(self, reader: SourceReader, apply: Callable[[ReservationRecord, float], bool]) -> None:
        """Fetch some records of the topic, and apply them."""
        for each in await reader.fetch():
            is_own = is_by(each.payload, self._own)  # to decode those as well would take most of the time
            for payload in () if is_own else singles(each.payload):
                self._take(payload, apply)
                await self._slices.yield_if_due()
            self._positions[each.partition] = each.offset + 1
            await self._slices.yield_if_due()

    def _take(self, payload: bytes, apply: Callable[[ReservationRecord, float], bool]) -> None:
        try:
            self.applied += apply(decode_reservation(payload), self._clock())
        except RecordRejectedError as error:
            self.rejected[error.reason] += 1
        except BookFullError:
            self.rejected["book_full"] += 1

    def _apply(self, record: ReservationRecord, now: float) -> bool:
        is_applied = self.book.apply(record, now)
        if is_applied and time_of(record) < now + LONGEST_S:  # a broken clock elsewhere
            self._notify(record)
        return is_applied

    def _restore(self, record: ReservationRecord, now: float) -> bool:
        name = reservation_id(record)
        if name not in self.book and isinstance(record, Progressed) and record.step != RELEASED:
            if record.timestamp + self.book.ttl_s > now and len(self._unknown) < MAX_RESERVATIONS:
                self._unknown.add(name)
        else:
            self._unknown.discard(name)
        return self.book.restore(record, now)


def _kind(record: ReservationRecord) -> str:
    return _RESERVED if isinstance(record, Reserved) else record.step


def create_exchange(
    settings: IndexerSettings, book: Book, recording: RecordingThread | None = None
) -> ReservationExchange:
    """Create the exchange of a service. Without Kafka, its records go where its decisions go."""
    source = None
    if settings.kafka is not None:
        from indexer.sources.kafka import KafkaSource

        source = KafkaSource(settings, topic=settings.reservations_topic)
    return ReservationExchange(book, create_queue(settings, RESERVATIONS, recording), source)
