"""Any moment of an event log, and the way from one moment to another."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from indexer.replay import frames
from indexer.replay.replay import Replay
from indexer.settings import IndexerSettings
from kv_events.codec import DecodedBatch, batch_or_none
from kv_events.log.format import EventLogCorruptedError, check_folder, list_segments
from kv_events.log.moments import LogExtent, LogMoment
from kv_events.log.reader import RecordChunk
from kv_events.log.time_index import TimeIndex
from kv_events.records import Channel, LogRecord
from kv_events.reservations import FOLDERS_BESIDE

_NAME_BYTES = 4096
"""The names of a batch are within its first bytes."""
_MOST_FRAMES: Final = 1
"""Key frames that moving views pass at most. A moment that is further away is opened from the nearest one."""
_MOST_SKIPPED: Final = 100_000
"""Records that are skipped at most, because they are later than the moment although they come before its end."""


class BatchAt(NamedTuple):
    """A batch of a worker, and where it is in the log."""

    record_index: int
    record: LogRecord
    batch: DecodedBatch


class Timeline(TimeIndex):
    """Opens any moment of an event log, also while the log grows. For one thread at a time.

    A moment is an index, a time, or offsets of partitions. The views are those of the nearest key frame before
    it, with the records since applied. Without key frames, all records are applied, beginning with the oldest one.
    Damaged records and key frames are passed over and named in `damage` and `faults`, key frames that were made with
    other settings in `warnings`.
    """

    def __init__(self, folder: Path, settings: IndexerSettings | None = None) -> None:
        """settings: bounds and time-to-live of the views; default: from `KVSIGHT_*` variables. Raises EventLogError if
        there is no such folder, or OSError.
        """
        check_folder(folder)
        self._settings = settings or IndexerSettings()
        self._damage: dict[tuple[Path, int], EventLogCorruptedError] = {}
        self._frame_faults: dict[Path, str] = {}
        self._other_settings: dict[Path, str] = {}
        self._lacks_beginning = False  # whether views were opened without what precedes the log
        self._views: Replay | None = None  # of the last call
        super().__init__(folder, self._note_damage)

    @property
    def extent(self) -> LogExtent:
        """Which records the log has, without their offsets: see `offsets`."""
        first, end = self.first_index, self.next_index
        if self.is_empty:
            return LogExtent(first_index=first, next_index=end)
        return LogExtent("the log", end - first, first, end, self.first_ms, self.last_ms)

    @property
    def index(self) -> int:
        """Index after the newest record of the present moment. Before the first call, the oldest index."""
        return self.first_index if self._views is None else self._views.index

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
        return [*self._frame_faults.values(), *self.file_faults, *needed]

    @property
    def warnings(self) -> list[str]:
        """One of the key frames that were passed over so far because they were made with other settings, or that views
        were opened without what precedes the log, because no key frame has it.
        """
        if self._lacks_beginning:
            return [] if self._other_settings else [frames.begins_late(self._folder, self.first_index)]
        return list(self._other_settings.values())[:1]

    def at(self, moment: LogMoment | None = None, views: Replay | None = None) -> Replay:
        """Return the views at a moment; default: the end of the log.

        A moment before the log gives empty views, one behind it those at its end. Raises OSError.

        views: the result of an earlier call. If they can move to the moment, they are changed and returned. Other
        results are new objects.
        """
        moment = moment or LogMoment()
        if views is None or not self.can_move(views, moment) or not self._move(views, moment):
            views, start = self.nearest(moment)
            views.index = views.next_index = start
            self._apply(views, moment)
        self._views = views
        return views

    def can_move(self, views: Replay, moment: LogMoment) -> bool:
        """Return whether it is quicker to move views to a moment than to open it. views: of `at`."""
        if views.moment.offsets is not None or moment.offsets is not None or len(views.skipped) > _MOST_SKIPPED:
            return False
        return (
            (moment.index is None or views.index <= moment.index)
            and (moment.time_s is None or views.newest_s <= moment.time_s)
            and self._num_frames(views.index, self.end_of(moment)) <= _MOST_FRAMES
        )

    def _move(self, views: Replay, moment: LogMoment) -> bool:
        """Move views to a moment for which `can_move` holds.

        Returns False if the views are of no use now, because the log has records in such an order that they would not
        be those of the moment.
        """
        views.take_time_back()
        had_skipped, pauses = bool(views.skipped), views.clock[2:]
        is_in_order = self._apply(views, moment)
        # the end of a pause is found by the first record after it, which may be another one in the order of the log
        return is_in_order and not (had_skipped and views.clock[2:] != pauses)

    def _apply(self, views: Replay, moment: LogMoment) -> bool:
        """Apply what belongs to a moment and is not applied yet. Returns False if a partition is out of order."""
        stop = self.end_of(moment)
        late, views.skipped = np.array(views.skipped, np.int64), []
        start = int(late[0]) if len(late) else views.next_index
        behind = {partition for partition, offset in (moment.offsets or {}).items() if offset}
        for chunk in self.chunks(start):
            first, last = max(0, start - chunk.first_index), min(len(chunk.rows), stop - chunk.first_index)
            if last <= 0 or (moment.offsets is not None and not behind):
                break
            indices = chunk.first_index + np.arange(first, last)
            is_late = np.isin(indices, late)
            is_open = (chunk.channels[first:last] == Channel.EVENTS) & (is_late | (indices >= views.next_index))
            belongs = is_open & chunk.before(moment)[first:last]
            if moment.offsets is None:
                views.skipped += indices[is_open & ~belongs].tolist()
            rows = np.flatnonzero(belongs & is_late)
            if not _is_in_order(views, (chunk.record(first + row) for row in rows.tolist())):
                return False
            views.apply_chunk(chunk, first, belongs)
            if belongs.any():
                views.index = max(views.index, int(indices[belongs][-1]) + 1)
            if moment.offsets is not None:
                behind -= _reached(chunk, moment.offsets)
        views.skipped += late[late >= stop].tolist()
        views.next_index = max(views.next_index, stop)
        views.moment = moment
        if moment.time_s is not None:
            if views.applier.records and self.last_event_ms is not None:  # time ends with the last event of the log
                views.pass_time(min(moment.time_s, self.last_event_ms / 1000))
        elif moment.offsets is None:
            views.index = max(views.index, stop)
        return True

    def next(self) -> Replay | None:
        """Return the views after the next record of events, or None at the end of the log.

        The views of the last call are changed, if they can move. Raises OSError.
        """
        following = self.event_from(self.index)
        return None if following is None else self.at(LogMoment(index=following[0] + 1), self._views)

    def previous(self) -> Replay | None:
        """Return the views before the newest record of events of the present moment. None at the beginning of the log.
        Raises OSError.
        """
        before = self.event_before(self.index)
        return None if before is None else self.at(LogMoment(index=before[0]))

    def event_before(self, stop: int) -> tuple[int, LogRecord] | None:
        """Return the newest record of events before an index, and its index. None if there is none. Raises OSError."""
        while (start := self.block_before(stop)) is not None:
            if events := list(self.records(start, stop, [Channel.EVENTS])):
                return events[-1]
            stop = start
        return None

    def event_from(self, start: int) -> tuple[int, LogRecord] | None:
        """Return the oldest record of events at or behind an index, and its index. None if there is none. Raises
        OSError.
        """
        return next(self.records(start, channels=[Channel.EVENTS]), None)

    def first_after(self, time_s: float) -> int:
        """Return an index such that no record before it is later than a time."""
        return self.before(time_s * 1000)

    def records(
        self, start: int = 0, stop: int = sys.maxsize, channels: Sequence[Channel] | None = None
    ) -> Iterator[tuple[int, LogRecord]]:
        """Yield (index, record) from index `start` up to but excluding `stop`. channels: None: all.

        Damage is passed over and noted. Raises OSError.
        """
        for chunk in self.chunks(start):
            wanted = np.ones(len(chunk.rows), np.bool_) if channels is None else np.isin(chunk.channels, channels)
            for row in np.flatnonzero(wanted).tolist():
                if start <= chunk.first_index + row < stop:
                    yield chunk.first_index + row, chunk.record(row)
            if chunk.next_index >= stop:
                return

    def changes(self, worker: str, start: LogMoment | None = None, stop: LogMoment | None = None) -> Iterator[BatchAt]:
        """Yield the batches of a worker with events, in the order of the log, that belong to one moment and not to an
        earlier one. Defaults: all of the log.

        Batches that a view would not apply, such as duplicates, are included. Raises OSError.
        """
        name, start, stop = worker.encode(), start or LogMoment(index=0), stop or LogMoment()
        first, end = start.index or 0, self.end_of(stop)
        if start.time_s is not None:
            first = self.first_after(start.time_s)
        for chunk in self.chunks(first):
            wanted = (chunk.channels == Channel.EVENTS) & chunk.before(stop) & ~chunk.before(start)
            for row in np.flatnonzero(wanted).tolist():
                record = chunk.record(row)
                batch = batch_or_none(record.payload) if name in record.payload[:_NAME_BYTES] else None
                if batch is not None and batch.stream.worker == worker and batch.steps:
                    yield BatchAt(chunk.first_index + row, record, batch)
            if chunk.next_index >= end:
                return

    def end_of(self, moment: LogMoment) -> int:
        """Return an index after the last record that belongs to a moment. Records before it may not belong to it."""
        stop = self.next_index
        if moment.index is not None:
            stop = min(stop, moment.index)
        if moment.time_s is not None and not self.is_empty:
            stop = min(stop, self.after(moment.time_s * 1000))
        return max(stop, self.first_index)

    def nearest(self, moment: LogMoment) -> tuple[Replay, int]:
        """Return the views of the last key frame at or before a moment, and the index of the next record to apply.

        Without such a frame: empty views and the oldest index.
        """
        stop = self.end_of(moment)
        for path in sorted(self._folder.glob(f"*{frames.FRAME_SUFFIX}"), reverse=True):
            if path in self._frame_faults:
                continue
            try:
                head = frames.read_head(path, self._settings)
                if self._is_before(head, moment, stop):
                    self._check_record(path, head)
                    views = frames.load_frame(path, head, self._settings)
                    self._lacks_beginning = self._lacks_beginning or views.lacks_beginning
                    return views, head.next_index
            except frames.KeyFrameError as error:
                self._frame_faults[path] = str(error)
            except frames.OtherSettingsError as error:
                self._other_settings[path] = str(error)
        first = self.first_index
        views = Replay(self._settings)
        views.lacks_beginning = first > 0 or self._folder / f"{first:020d}{frames.FRAME_SUFFIX}" in self._other_settings
        self._lacks_beginning = self._lacks_beginning or views.lacks_beginning
        return views, first

    def _num_frames(self, start: int, stop: int) -> int:
        """Return the number of key frames behind an index, up to and including another one."""
        names = (path.name.removesuffix(frames.FRAME_SUFFIX) for path in self._folder.glob(f"*{frames.FRAME_SUFFIX}"))
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

    def _is_before(self, head: frames.FrameHead, moment: LogMoment, stop: int) -> bool:
        return (
            self.first_index <= head.next_index <= stop
            and (moment.time_s is None or head.newest_ms <= moment.time_s * 1000)
            and (moment.offsets is None or _is_within(head.positions, moment.offsets))
        )

    def _check_record(self, path: Path, head: frames.FrameHead) -> None:
        """Check that the log still has the record before a key frame. One that is deleted or damaged proves nothing."""
        last = head.next_index - 1
        for _, record in self.records(last, last + 1):
            if frames.checksum(record) != head.last_record:
                raise frames.KeyFrameError(f"{path}: the key frame belongs to another log")

    def _note_damage(self, error: EventLogCorruptedError) -> None:
        self._damage.setdefault((error.segment, error.position), error)


def _reached(chunk: RecordChunk, offsets: Mapping[int, int]) -> set[int]:
    """Return the partitions of which a chunk has the last record before an offset, or a later one."""
    return {partition for partition, _, last in chunk.offsets(Channel.EVENTS) if last + 1 >= offsets.get(partition, 0)}


def _is_in_order(views: Replay, late: Iterable[LogRecord]) -> bool:
    """Return whether no later record of their partitions was applied before these."""
    return all(record.offset >= views.positions.get(record.partition, 0) for record in late)


def _is_within(positions: Mapping[int, int], limits: Mapping[int, int]) -> bool:
    return all(offset <= limits.get(partition, 0) for partition, offset in positions.items())


class PastRecords:
    """Goes on at a later moment where the one before ended. For one thread at a time."""

    def __init__(self, folder: Path, channels: Sequence[Channel], span_s: float) -> None:
        """folder: of the event log. span_s: time before a moment in which records count."""
        self._folders = [folder / name for name in FOLDERS_BESIDE]  # of a service that follows an event log
        self._channels = channels
        self._span_s = span_s
        self._beside: dict[Path, Timeline] = {}
        self._read: list[int] = []  # index up to which each log has been read
        self._now = 0.0

    def advance(
        self, timeline: Timeline, index: int, now: float, begin: Callable[[], None]
    ) -> Iterator[tuple[LogRecord, bool]]:
        """Return the records that were added since the last call, each with whether it is of a log beside.

        Some may be later than the moment. index: at or after its end. now: its time. begin: called at once if earlier
        records do not count any more; then all of them are returned again. Raises OSError.
        """
        logs = [(timeline, index), *((each, each.end_of(LogMoment(time_s=now))) for each in self._open_beside())]
        starts = [log.first_after(now - self._span_s) for log, _ in logs]
        is_back, self._now = now < self._now, now
        if (
            is_back
            or len(self._read) != len(logs)
            or not all(start <= read <= stop for start, read, (_, stop) in zip(starts, self._read, logs, strict=True))
        ):
            begin()
            self._read = starts
        read, self._read = self._read, []  # begin anew if a log cannot be read
        return self._records(logs, read)

    def _records(self, logs: Sequence[tuple[Timeline, int]], read: Sequence[int]) -> Iterator[tuple[LogRecord, bool]]:
        for number, (log, stop) in enumerate(logs):
            for _, record in log.records(read[number], stop, self._channels):
                yield record, number > 0
        self._read = [stop for _, stop in logs]

    def _open_beside(self) -> list[Timeline]:
        for folder in self._folders:
            if folder in self._beside:
                self._beside[folder].refresh()
            elif folder.is_dir() and list_segments(folder):
                self._beside[folder] = Timeline(folder)
        return list(self._beside.values())
