"""Any moment of an event log, and the way from one moment to another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from indexer.replay.chunks import ChunkApplier
from indexer.replay.frames import (
    FRAME_SUFFIX,
    Frame,
    KeyFrameError,
    OtherSettingsError,
    begins_late,
    checksum,
    load_frame,
    read_head,
)
from indexer.replay.replay import Replay
from indexer.replay.until import Until
from indexer.settings import IndexerSettings
from kv_events.codec import DecodedBatch, decode_batch
from kv_events.errors import RecordRejectedError
from kv_events.log.event_log import EventLogError
from kv_events.log.format import EventLogCorruptedError
from kv_events.log.reader import RecordChunk
from kv_events.log.time_index import TimeIndex
from kv_events.records import Channel, LogRecord

_NAME_BYTES = 4096
"""The names of a batch are within its first bytes."""


class BatchAt(NamedTuple):
    """A batch of a worker, and where it is in the log."""

    record_index: int
    record: LogRecord
    batch: DecodedBatch


class Timeline:
    """Opens any moment of an event log, also while the log grows. For one thread at a time.

    A moment is an `Until`: an index, a time, or Kafka positions. The views are those of the nearest key frame before
    it, with the records since applied. Without key frames, all records are applied, beginning with the oldest one.
    Damaged records and key frames are passed over and named in `damage` and `faults`, key frames that were made with
    other settings in `warnings`.
    """

    def __init__(self, folder: Path, settings: IndexerSettings | None = None) -> None:
        """settings: bounds and time-to-live of the views; default: from `KVSIGHT_*` variables.

        Raises EventLogError if there is no such folder, or OSError.
        """
        if not folder.is_dir():
            raise EventLogError(f"{folder}: no such folder")
        self._folder = folder
        self._settings = settings or IndexerSettings()
        self._damage: dict[tuple[Path, int], EventLogCorruptedError] = {}
        self._frame_faults: dict[Path, str] = {}
        self._other_settings: dict[Path, str] = {}
        self._lacks_beginning = False  # whether views were opened without what precedes the log
        self._times = TimeIndex(folder, self._note_damage)
        self._views: Replay | None = None
        self._index = self._times.first_index
        self._is_exact = True  # whether the views are those at `_index`, rather than at a time or at positions
        self._ahead: Iterator[tuple[int, LogRecord]] | None = None  # the records from `_index` on

    @property
    def first_index(self) -> int:
        """Index of the oldest record."""
        return self._times.first_index

    @property
    def next_index(self) -> int:
        """Index after the newest record."""
        return self._times.next_index

    @property
    def span_s(self) -> tuple[float, float] | None:
        """Earliest and latest time of a record, in seconds since 1970. None if the log is empty."""
        return None if self._times.is_empty else (self._times.first_ms / 1000, self._times.last_ms / 1000)

    @property
    def index(self) -> int:
        """Index after the newest record of the present moment. Before the first call, the oldest index."""
        return self._index

    @property
    def damage(self) -> list[EventLogCorruptedError]:
        """Damage of the log that was found so far, each with segment, byte and record."""
        return list(self._damage.values())

    @property
    def faults(self) -> list[str]:
        """Key frames and files of the time index that could not be used so far. The views are right without them.

        An exception is a log that begins late, all of whose key frames were made with other settings: then its views
        lack what precedes the log, and one of these key frames is named.
        """
        needed = list(self._other_settings.values())[-1:] if self._lacks_beginning else []
        return [*self._frame_faults.values(), *self._times.faults, *needed]

    @property
    def warnings(self) -> list[str]:
        """One of the key frames that were passed over so far because they were made with other settings, or that views
        were opened without what precedes the log, because no key frame has it.
        """
        if self._lacks_beginning:
            return [] if self._other_settings else [begins_late(self._folder, self.first_index)]
        return list(self._other_settings.values())[:1]

    def refresh(self) -> None:
        """Take the records along that were appended since. Raises OSError."""
        self._times.refresh()
        self._ahead = None

    def save_times(self) -> None:
        """Write the files of the time index. Raises OSError."""
        self._times.save()

    def at(self, moment: Until | None = None) -> Replay:
        """Return the views at a moment; default: the end of the log. They are new objects: later calls do not change
        them, except `next`.

        A moment before the log gives empty views, one behind it those at its end. Raises OSError.
        """
        moment = moment or Until()
        views = self.replayed(moment)
        if moment.time_s is not None:
            self.pass_time(views, moment.time_s)
        return views

    def pass_time(self, views: Replay, time_s: float) -> None:
        """Advance the clock of views to a time, but not beyond the last event of the log."""
        if views.applier.records and self._times.last_event_ms is not None:
            views.pass_time(min(time_s, self._times.last_event_ms / 1000))

    def replayed(self, moment: Until) -> Replay:
        """Return the views as `at` does, but with the clock at the newest record, also of a moment in time."""
        stop = self.end_of(moment)
        views, start = self.nearest(moment)
        self._index = start
        if moment.positions is None:
            self._apply_chunks(views, start, stop, moment.time_s)
        else:
            rest = replace(moment, offset=None)
            for index, record in _before(self.records(start, stop), moment.positions):
                if rest.takes(record):
                    views.apply(record)
                    self._index = index + 1
        self._is_exact = moment.time_s is None and moment.positions is None
        if self._is_exact:
            self._index = max(start, stop)
        self._views, self._ahead = views, None
        return views

    def _apply_chunks(self, views: Replay, start: int, stop: int, time_s: float | None) -> None:
        """Apply the records [start, stop) that are not later than a time."""
        applier = ChunkApplier(views)
        for chunk in self._times.chunks(start):
            first, last = max(0, start - chunk.first_index), min(len(chunk.rows), stop - chunk.first_index)
            if last <= 0:
                return
            wanted = chunk.until(first, last, time_s)
            applier.apply(chunk, first, last, wanted)
            if wanted.any():
                self._index = chunk.first_index + first + int(np.flatnonzero(wanted)[-1]) + 1

    def next(self) -> Replay | None:
        """Apply the next record of events. Returns the views, or None at the end of the log.

        The result of the last call changes if it was returned by `at` of an index, or by this method. Raises OSError.
        """
        if self._ahead is None:
            self._ahead = self.records(self._index)
        for index, record in self._ahead:
            if record.channel != Channel.EVENTS:
                continue
            if self._views is None or not self._is_exact:
                return self.at(Until(offset=index + 1))
            self._views.apply(record)
            self._index = index + 1
            return self._views
        self._ahead = None
        return None

    def previous(self) -> Replay | None:
        """Return the views before the newest record of events of the present moment. None at the beginning of the log.

        Raises OSError.
        """
        before = self.event_before(self._index)
        return None if before is None else self.at(Until(offset=before[0]))

    def event_before(self, stop: int) -> tuple[int, LogRecord] | None:
        """Return the newest record of events before an index, and its index. None if there is none. Raises OSError."""
        while (start := self._times.block_before(stop)) is not None:
            events = [each for each in self.records(start, stop) if each[1].channel == Channel.EVENTS]
            if events:
                return events[-1]
            stop = start
        return None

    def event_from(self, start: int) -> tuple[int, LogRecord] | None:
        """Return the oldest record of events at or behind an index, and its index. None if there is none.

        Raises OSError.
        """
        events = (each for each in self.records(start) if each[1].channel == Channel.EVENTS)
        return next(events, None)

    def segment_after(self, index: int) -> int | None:
        """Return the index at which the first file after a record begins. None if there is none."""
        return self._times.segment_after(index)

    def first_after(self, time_s: float) -> int:
        """Return an index such that no record before it is later than a time."""
        return self._times.before(time_s * 1000)

    def records_of(self, channel: Channel, start: int, stop: int) -> Iterator[tuple[int, LogRecord]]:
        """Yield (index, record) of one channel, from index `start` up to but excluding `stop`. Raises OSError."""
        for chunk in self.chunks(start):
            for row in np.flatnonzero(chunk.channels == channel).tolist():
                if start <= chunk.first_index + row < stop:
                    yield chunk.first_index + row, chunk.record(row)
            if chunk.next_index >= stop:
                return

    def chunks(self, start: int) -> Iterator[RecordChunk]:
        """Yield the records from index `start` on in chunks, the first of which may begin earlier.

        Damage is passed over and noted. Raises OSError.
        """
        return self._times.chunks(start)

    def records(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, LogRecord]]:
        """Yield (index, record) of all channels, from index `start` up to but excluding `stop`.

        Damage is passed over and noted. Raises OSError.
        """
        for chunk in self._times.chunks(start):
            for index, record in chunk.records():
                if stop is not None and index >= stop:
                    return
                if index >= start:
                    yield index, record

    def records_between(self, start: Until, stop: Until) -> Iterator[tuple[int, LogRecord]]:
        """Yield (index, record) of all channels that belong to one moment and not to an earlier one. Raises OSError."""
        first = 0
        if start.offset is not None:
            first = start.offset
        elif start.time_s is not None:
            first = self._times.before(start.time_s * 1000)
        for index, record in self.records(first, self.end_of(stop)):
            if _takes(stop, index, record) and not _takes(start, index, record):
                yield index, record

    def changes(self, worker: str, start: Until | None = None, stop: Until | None = None) -> Iterator[BatchAt]:
        """Yield the batches of a worker with events, in the order of the log, that belong to one moment and not to an
        earlier one. Defaults: all of the log.

        Batches that a view would not apply, such as duplicates, are included. Raises OSError.
        """
        name = worker.encode()
        for index, record in self.records_between(start or Until(offset=0), stop or Until()):
            if record.channel != Channel.EVENTS or name not in record.payload[:_NAME_BYTES]:
                continue
            try:
                batch = decode_batch(record.payload)
            except RecordRejectedError:
                continue
            if batch.stream.worker == worker and batch.steps:
                yield BatchAt(index, record, batch)

    def end_of(self, moment: Until) -> int:
        """Return an index after the last record that belongs to a moment. Records before it may not belong to it."""
        stop = self._times.next_index
        if moment.offset is not None:
            stop = min(stop, moment.offset)
        if moment.time_s is not None and not self._times.is_empty:
            stop = min(stop, self._times.after(moment.time_s * 1000))
        return max(stop, self._times.first_index)

    def nearest(self, moment: Until) -> tuple[Replay, int]:
        """Return the views of the last key frame at or before a moment, and the index of the next record to apply.

        Without such a frame: empty views and the oldest index.
        """
        stop = self.end_of(moment)
        for path in sorted(self._folder.glob(f"*{FRAME_SUFFIX}"), reverse=True):
            if path in self._frame_faults:
                continue
            try:
                frame = read_head(path, self._settings)
                if self._is_before(frame, moment, stop):
                    self._check_record(frame)
                    views = load_frame(frame, self._settings)
                    self._lacks_beginning = self._lacks_beginning or views.lacks_beginning
                    return views, frame.head.next_index
            except KeyFrameError as error:
                self._frame_faults[path] = str(error)
            except OtherSettingsError as error:
                self._other_settings[path] = str(error)
        first = self._times.first_index
        views = Replay(self._settings)
        views.lacks_beginning = first > 0 or self._folder / f"{first:020d}{FRAME_SUFFIX}" in self._other_settings
        self._lacks_beginning = self._lacks_beginning or views.lacks_beginning
        return views, first

    def num_frames(self, start: int, stop: int) -> int:
        """Return the number of key frames behind an index, up to and including another one."""
        names = (path.name.removesuffix(FRAME_SUFFIX) for path in self._folder.glob(f"*{FRAME_SUFFIX}"))
        return sum(start < int(name) <= stop for name in names if name.isdecimal())

    def offsets(self) -> dict[int, tuple[int, int]]:
        """Return for each partition of the events the offset of its first record, and the one after its last record.

        Reads the whole log. Raises OSError.
        """
        found: dict[int, tuple[int, int]] = {}
        for chunk in self.chunks(self.first_index):
            for partition, first, last in chunk.offsets(Channel.EVENTS):
                found[partition] = found.get(partition, (first, 0))[0], last + 1
        return found

    def _is_before(self, frame: Frame, moment: Until, stop: int) -> bool:
        head = frame.head
        return (
            self._times.first_index <= head.next_index <= stop
            and (moment.time_s is None or head.newest_ms <= moment.time_s * 1000)
            and (moment.positions is None or _is_within(head.positions, moment.positions))
        )

    def _check_record(self, frame: Frame) -> None:
        """Check that the log still has the record before a key frame. One that is deleted or damaged proves nothing."""
        last = frame.head.next_index - 1
        for _, record in self.records(last, last + 1):
            if checksum(record) != frame.head.last_record:
                raise KeyFrameError(f"{frame.path}: the key frame belongs to another log")

    def _note_damage(self, error: EventLogCorruptedError) -> None:
        self._damage.setdefault((error.segment, error.position), error)


def _takes(moment: Until, index: int, record: LogRecord) -> bool:
    return moment.takes(record if moment.offset is None else record._replace(offset=index))


def _is_within(positions: Mapping[int, int], limits: Mapping[int, int]) -> bool:
    return all(offset <= limits.get(partition, 0) for partition, offset in positions.items())


def _before(
    records: Iterator[tuple[int, LogRecord]], positions: Mapping[int, int] | None
) -> Iterator[tuple[int, LogRecord]]:
    """Yield records until each partition has reached its limit. positions: partition -> offset; None: no limits."""
    behind = {partition for partition, offset in (positions or {}).items() if offset}
    for index, record in records:
        if positions is not None and record.channel == Channel.EVENTS:
            if record.offset >= positions.get(record.partition, 0):
                behind.discard(record.partition)
            if not behind:
                return
        yield index, record
