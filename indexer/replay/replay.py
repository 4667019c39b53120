"""Replay: the views of a router, rebuilt from a log up to an offset or a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from indexer.applier import Applier, DeadLetters
from indexer.freshness import Freshness
from indexer.namespaces import Namespaces
from indexer.replay.until import Until
from indexer.settings import IndexerSettings
from kv_events.log.event_log import EventLogReader
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
        """Time of the newest record applied, in seconds since 1970."""
        self.positions: dict[int, int] = {}
        """Partition of the events -> offset after the highest one applied."""
        self.forgets = True
        """Whether workers that are silent for too long are dropped, as a service does."""
        self.num_forgotten = 0
        """Views that were dropped."""
        self.lacks_beginning = False
        """Whether the views were begun without what precedes the log, so that what workers held then is unknown."""

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

    def apply_all(self, records: Iterable[LogRecord], until: Until | None = None) -> Replay:
        """Apply the records that `until` selects. Returns itself.

        Reads all records, because a log of several partitions is not ordered by time. After a limit in time, the views
        have the age that they had at that time, but not later than the last record.
        """
        newest = 0.0
        for record in records:
            if record.channel == Channel.EVENTS:
                newest = max(newest, record.timestamp_ms / 1000)
            if until is None or until.takes(record):
                self.apply(record)
        if until is not None and until.time_s is not None and self.applier.records:
            self.pass_time(min(until.time_s, newest))
        return self

    def pass_time(self, now: float) -> None:
        """Advance the clock without records. The log could be read during this time, so silent workers expire."""
        self.now = max(self.now, now)
        self.freshness.log_read_at = max(self.freshness.log_read_at, now)  # without a pause, however long it was

    def _forget_silent(self) -> None:
        for view in self.namespaces.views:
            if self.freshness.silence_s(view) > self.settings.forget_after_s:
                self.num_forgotten += 1
                for _ in self.namespaces.forget(view.stream):
                    pass


def _period(seconds: float) -> int:
    return round(seconds * 1000) // FORGET_EVERY_MS


def log_records(folder: Path, stop: int | None = None) -> Iterator[LogRecord]:
    """Yield the records of an event log before index `stop`. Their offsets are their indices in the log.

    Raises EventLogError.
    """
    reader = EventLogReader(folder)
    for index, record in reader.read(reader.first_index, stop):
        yield record._replace(offset=index)
