"""Replay: the views of a router, rebuilt from a log up to an offset or a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from indexer.applier import Applier, Batches, DeadLetters, Mask, PlainRun
from indexer.freshness import Freshness
from indexer.namespaces import Namespaces
from indexer.settings import IndexerSettings
from indexer.slices import run_at_once
from kv_events.kernels.log_records import OFFSET, PARTITION
from kv_events.log.moments import LogMoment
from kv_events.log.reader import BatchColumns, RecordChunk
from kv_events.records import Channel, LogRecord

_NEVER = np.iinfo(np.int64).min

FORGET_EVERY_MS: Final = 10_000
"""Silent workers are dropped at multiples of it, wherever a replay began."""


class ApplyObserver:
    """Receives every record that is applied, in order. This one does nothing with them."""

    def mark_not_plain(self, columns: BatchColumns) -> None:
        """Clear `columns.arrays.plain` of records that are to be applied one by one, before any of them is applied."""

    def take_plain(self, run: PlainRun) -> None:
        """Note plain batches that were applied."""

    def take_one(self, index: int, record: LogRecord, apply: Callable[[], None]) -> None:
        """Apply a record by a call of `apply`, during which `Applier.on_applied` receives the batch."""
        apply()


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

    def apply_chunk(
        self, chunk: RecordChunk, start: int = 0, wanted: Mask | None = None, observer: ApplyObserver | None = None
    ) -> None:
        """Apply records of a chunk from row `start` on. The result is that of `apply` for each of them.

        wanted: bool[n] which of them; default: all.
        """
        observer = observer or ApplyObserver()
        wanted = np.ones(len(chunk.rows) - start, np.bool_) if wanted is None else wanted
        batches = self.applier.decode(chunk, start, wanted)
        wanted, plain = batches.arrivals.wanted, batches.columns.arrays.plain
        times_ms = np.where(wanted, chunk.timestamps_ms[start : start + len(wanted)], _NEVER)
        now_ms = np.maximum.accumulate(np.concatenate(([round(self.now * 1000)], times_ms)))
        plain[np.diff(now_ms) >= 1000 * min(self.freshness.longest_pauses_s)] = 0  # `apply` notes the pause
        if self.forgets:
            plain[np.diff(now_ms // FORGET_EVERY_MS) > 0] = 0
        observer.mark_not_plain(batches.columns)
        row = 0
        while row < len(wanted):
            run, row, is_open = self.applier.apply_plain(batches, row)
            if len(run.rows):
                self._advance(now_ms[run.rows[-1] + 1].item() / 1000)
                observer.take_plain(run)
            if row < len(wanted):
                record = chunk.record(start + row)
                apply = partial(self._finish, batches, row, record) if is_open else partial(self.apply, record)
                observer.take_one(batches.first_index + row, record, apply)
                self.applier.note_applied(batches, row)
                row += 1
        applied = batches.columns.rows[wanted]
        for partition in np.unique(applied[:, PARTITION]).tolist():
            newest = int(applied[applied[:, PARTITION] == partition, OFFSET].max())
            self.positions[partition] = max(self.positions.get(partition, 0), newest + 1)

    def _finish(self, batches: Batches, row: int, record: LogRecord) -> None:
        """Do what remains to be done after the events of a batch have been applied."""
        self._advance(record.timestamp_ms / 1000)
        self.applier.finish_plain(batches, row, record.payload)

    def _advance(self, now: float) -> None:
        """Advance the clock without a pause, however long it was."""
        self.now = max(self.now, now)
        self.freshness.log_read_at = max(self.freshness.log_read_at, now)

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
        self._advance(now)

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
                run_at_once(self.namespaces.forget(view.stream))


def _period(seconds: float) -> int:
    return round(seconds * 1000) // FORGET_EVERY_MS
