"""Replay: the views of a router, rebuilt from a log up to an offset or a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from indexer.applier import Applier, DeadLetters
from indexer.freshness import Freshness
from indexer.namespaces import Namespaces
from indexer.settings import IndexerSettings
from kv_events.log.moments import LogMoment
from kv_events.records import Channel, LogRecord

FORGET_EVERY_MS: Final = 10_000
"""Silent workers are dropped at multiples of it, wherever a replay began."""


@dataclass
class Replay:
    """Views that are built record by record, with the clock of the log."""

    settings: IndexerSettings = field(default_factory=lambda: IndexerSettings())

    def __post_init__(self) -> None:
        self.freshness = Freshness(self.settings.worker_ttl_s, 0.0)
        self.applier = Applier(Namespaces(self.settings), DeadLetters(), self.freshness)
        self.now = 0.0
        """Time of the newest record applied, or later; in seconds since 1970."""
        self.positions: dict[int, int] = {}
        """Partition of the events -> offset after the highest one applied."""
        self.forgets = True
        """Whether workers that are silent for too long are dropped, as a service does."""
        self.num_forgotten = 0
        """Views that were dropped."""
        self.lacks_beginning = False
        """Whether the views were begun without what precedes the log, so that what workers held then is unknown."""
        self._clock: tuple[float, float, float, float] | None = None  # of the newest record, if time has passed since
        # what follows is for `Timeline`, which opens and moves views
        self.moment = LogMoment()
        """Where the views are in a log."""
        self.index = 0
        """Index after the newest record of the moment."""
        self.next_index = 0
        """Index after the records that were read."""
        self.skipped: list[int] = []
        """Indices of records before `next_index` that do not belong to the moment."""

    @property
    def namespaces(self) -> Namespaces:
        """The views."""
        return self.applier.namespaces

    def apply(self, record: LogRecord) -> None:
        """Apply one record in the same way as the consumer. Only records of events advance the clock."""
        if record.channel != Channel.EVENTS:
            return
        before, self.now = self.now, max(self.now, record.timestamp_ms / 1000)
        self.freshness.note_log_read(self.now)
        if self.forgets and _period(self.now) > _period(before):
            self._forget_silent()
        self.positions[record.partition] = max(self.positions.get(record.partition, 0), record.offset + 1)
        for _ in self.applier.apply(record, record.timestamp_ms / 1000):
            pass

    def apply_all(self, records: Iterable[LogRecord], moment: LogMoment | None = None) -> Replay:
        """Apply the records before a moment. Returns itself.

        Reads all records, because a log of several partitions is not ordered by time. After a limit in time, the views
        have the age that they had at that time, but not later than the last record.
        """
        moment = moment or LogMoment()
        newest = 0.0
        for record in records:
            if record.channel == Channel.EVENTS:
                newest = max(newest, record.timestamp_ms / 1000)
            if moment.takes(record):
                self.apply(record)
        if moment.time_s is not None and self.applier.records:
            self.pass_time(min(moment.time_s, newest))
        return self

    def pass_time(self, now: float) -> None:
        """Advance the clock without records. The log could be read during this time, so silent workers expire."""
        self._clock = self._clock or self.clock
        self.now = max(self.now, now)
        self.freshness.log_read_at = max(self.freshness.log_read_at, now)  # without a pause, however long it was

    def take_time_back(self) -> None:
        """Set the clock back to the newest record applied."""
        if self._clock is not None:
            self.clock, self._clock = self._clock, None

    @property
    def newest_s(self) -> float:
        """Time of the newest record applied, also if time has passed since."""
        return self.now if self._clock is None else self._clock[0]

    @property
    def clock(self) -> tuple[float, float, float, float]:
        """The time now, and what `Freshness` knows about the time at which the log was read."""
        freshness = self.freshness
        return self.now, freshness.log_read_at, freshness.resumed_at, freshness.unbroken_since

    @clock.setter
    def clock(self, times: tuple[float, float, float, float]) -> None:
        freshness = self.freshness
        self.now, freshness.log_read_at, freshness.resumed_at, freshness.unbroken_since = times

    def _forget_silent(self) -> None:
        for view in self.namespaces.views:
            if self.freshness.silence_s(view) > self.settings.forget_after_s:
                self.num_forgotten += 1
                for _ in self.namespaces.forget(view.stream):
                    pass


def _period(seconds: float) -> int:
    return round(seconds * 1000) // FORGET_EVERY_MS
