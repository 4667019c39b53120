"""Reads event logs: many records at once, as columns, past damage and a torn tail. Start at `scan_log`."""

import fcntl
import os
from collections.abc import Callable, Iterator
from math import floor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kv_events.kernels import batches
from kv_events.kernels import log_records as column
from kv_events.kernels.bundles import I64Matrix
from kv_events.log import format as layout
from kv_events.log.format import EventLogCorruptedError, Resume, Segment
from kv_events.log.moments import LogExtent, LogMoment
from kv_events.records import Channel, LogRecord

_CHUNK_BYTES = 2 << 20  # larger reads are slower; more than the largest record
_MOST_ROWS = 16_384
_MOST_RECORD_BYTES = layout.FRAME_BYTES + layout.MAX_BODY_BYTES
_TABLES = column.checksum_tables()
_MOST_MS, _MOST_OFFSET = 2**62, np.iinfo(np.int64).max

OnDamage = Callable[[EventLogCorruptedError], None]


class RecordChunk(NamedTuple):
    """Some consecutive records of one segment."""

    segment: Segment
    first_index: int
    """Index of the first record."""
    position: int
    """Byte offset of `data` in the segment."""
    data: bytes
    rows: npt.NDArray[np.int64]
    """[n, NUM_FIELDS] columns as in `kv_events.kernels.log_records`; positions are relative to `data`."""

    @property
    def timestamps_ms(self) -> npt.NDArray[np.int64]:
        """[n] milliseconds since 1970."""
        return self.rows[:, column.TIMESTAMP_MS]

    @property
    def channels(self) -> npt.NDArray[np.int64]:
        """[n] channels."""
        return self.rows[:, column.CHANNEL]

    @property
    def begins(self) -> npt.NDArray[np.int64]:
        """[n] byte offsets in the segment at which the records begin."""
        return self.rows[:, column.BEGIN] + self.position

    @property
    def end(self) -> int:
        """Byte offset in the segment after the last record."""
        return int(self.rows[-1, column.END]) + self.position

    @property
    def next_index(self) -> int:
        return self.first_index + len(self.rows)

    def offsets(self, channel: int) -> Iterator[tuple[int, int, int]]:
        """Yield (partition, offset of its first record, offset of its last one) of a channel."""
        rows = self.rows[self.channels == channel]
        for partition in np.unique(rows[:, column.PARTITION]).tolist():
            (found,) = np.nonzero(rows[:, column.PARTITION] == partition)
            yield partition, int(rows[found[0], column.OFFSET]), int(rows[found[-1], column.OFFSET])

    def before(self, moment: LogMoment) -> npt.NDArray[np.bool_]:
        """Return bool[n]: which records belong to a moment of the log."""
        taken = np.ones(len(self.rows), np.bool_)
        if moment.time_s is not None:
            taken &= self.timestamps_ms <= floor(min(max(moment.time_s * 1000, -_MOST_MS), _MOST_MS))
        if moment.index is not None:
            taken[max(0, moment.index - self.first_index) :] = False
        if moment.offsets is not None:
            partitions, places = np.unique(self.rows[:, column.PARTITION], return_inverse=True)
            limits = [min(moment.offsets.get(partition, 0), _MOST_OFFSET) for partition in partitions.tolist()]
            taken &= self.rows[:, column.OFFSET] < np.array(limits, np.int64)[places]
        return taken

    def note_in(self, extent: LogExtent) -> None:
        times = self.timestamps_ms
        first_ms, last_ms = int(times.min()), int(times.max())
        extent.extend(self.first_index, len(self.rows), first_ms, last_ms, self.offsets(Channel.EVENTS))

    def record(self, number: int) -> LogRecord:
        """Return one record. number: its row."""
        return self._record(self.rows[number].tolist())

    def records(self) -> Iterator[tuple[int, LogRecord]]:
        """Yield (index, record) of all rows."""
        for index, row in enumerate(self.rows.tolist(), self.first_index):
            yield index, self._record(row)

    def _record(self, row: list[int]) -> LogRecord:
        _, end, partition, offset, timestamp_ms, key_bytes, channel, payload = row
        key = self.data[payload - key_bytes : payload]
        return LogRecord(partition, offset, timestamp_ms, key, self.data[payload:end], channel)


def scan_log(folder: Path, on_damage: OnDamage, start: int = 0) -> Iterator[RecordChunk]:
    """Yield all sound records of a log from index `start`, in order. Damage is reported and passed over.

    A torn tail of the last segment ends the log. Raises OSError.
    """
    for segment in layout.list_segments(folder):
        if segment.next_first_index is None or segment.next_first_index > start:
            yield from scan_segment(segment, on_damage)


def scan_segment(
    segment: Segment, on_damage: OnDamage, position: int = layout.HEADER_BYTES, index: int | None = None
) -> Iterator[RecordChunk]:
    """Yield the sound records of a segment from a byte position, which is that of record `index` (default: the first).

    Damage is reported and passed over. Raises OSError.
    """
    try:
        if layout.read_version(segment) is None:
            return
    except EventLogCorruptedError as error:  # the records may be sound all the same
        on_damage(error)
    resume: Resume | None = Resume(segment.first_index if index is None else index, position)
    while resume is not None and resume.position is not None:
        try:
            yield from _sound_chunks(segment, resume.position, resume.record_index)
            resume = None
        except EventLogCorruptedError as error:
            on_damage(error)
            resume = error.resume


def _sound_chunks(segment: Segment, position: int, index: int) -> Iterator[RecordChunk]:
    rows = np.empty((_MOST_ROWS, column.NUM_FIELDS), np.int64)
    with segment.path.open("rb", buffering=0) as file:
        while True:
            data = os.pread(file.fileno(), _CHUNK_BYTES, position)
            found = column.find_records(np.frombuffer(data, np.uint8), layout.MAX_BODY_BYTES, _TABLES, rows)
            if not found:
                break
            chunk = RecordChunk(segment, index, position, data, rows[:found].copy())
            yield chunk
            position, index = chunk.end, chunk.next_index
        _check_end(file.fileno(), segment, position, index)


def _check_end(fd: int, segment: Segment, position: int, index: int) -> None:
    """Raise EventLogCorruptedError unless the segment ends at a byte position, before record `index`.

    A torn tail counts as an end, except in a segment that has a successor. It is an append that is in progress or was
    cut off: fewer bytes than a record announces, a last record with a wrong checksum, or only zeros (the file was
    extended, but its data did not reach the disk).
    """
    fault = _fault(fd, position)
    if fault is not None and (fault.corrupted or segment.next_first_index is not None):
        raise layout.corrupted(segment, position, index, fault.detail, _resume(fd, segment, position, index, fault))
    if segment.next_first_index not in (None, index):
        raise layout.corrupted(segment, position, index, f"records up to {segment.next_first_index} are missing")


class _Fault(NamedTuple):
    detail: str
    corrupted: bool
    """Whether the damage cannot be a torn tail."""
    num_bytes: int | None = None
    """Length of the damaged record, if its head is sound."""


def _fault(fd: int, position: int) -> _Fault | None:
    """Return why no record follows at a byte position, or None if the file ends there."""
    num_left = os.fstat(fd).st_size - position
    if num_left <= 0:
        return None
    rest = os.pread(fd, num_left, position)
    if layout.is_sound(rest, 0):
        return None  # an append has finished since the read
    if rest.count(0) == len(rest) or len(rest) < layout.FRAME_BYTES:
        return _Fault(f"a torn tail of {len(rest)} bytes", corrupted=False)
    body = layout.body_of(rest, 0)
    if body is None:
        return _Fault("the checksum of a record's head is wrong", corrupted=True)
    if body.stop > len(rest):
        return _Fault(f"{len(rest)} bytes of a record of {body.stop}", corrupted=False)
    return _Fault("a record's checksum is wrong", corrupted=body.stop < len(rest), num_bytes=body.stop)


def _resume(fd: int, segment: Segment, position: int, index: int, fault: _Fault) -> Resume | None:
    """Find the first sound record behind a fault in the same segment."""
    begin = position + (fault.num_bytes or 1)
    data = memoryview(os.pread(fd, 2 * _MOST_RECORD_BYTES, begin))
    if fault.num_bytes is not None and layout.is_sound(data, 0):
        return Resume(index + 1, begin)
    found = next((begin + at for at in range(min(len(data), _MOST_RECORD_BYTES)) if layout.is_sound(data, at)), None)
    if found is None:
        return None
    if segment.next_first_index is None:  # at least one record is lost
        return Resume(index + 1, found)
    try:
        num_left = sum(len(chunk.rows) for chunk in _sound_chunks(segment._replace(next_first_index=None), found, 0))
    except EventLogCorruptedError:
        return Resume(index + 1, found)
    return Resume(max(index + 1, segment.next_first_index - num_left), found)


class TornTail(NamedTuple):
    """Bytes behind the last record of a log: an append that was cut off."""

    segment: Path
    position: int
    """Byte offset in the segment at which they begin."""
    record: int
    """Of the record that they would have been."""
    num_bytes: int

    def __str__(self) -> str:
        number = f"{self.num_bytes} byte{'' if self.num_bytes == 1 else 's'}"
        return f"{self.segment}: a torn tail of {number} at byte {self.position}, record {self.record}"


def torn_tail(folder: Path) -> TornTail | None:
    """Return the torn tail of a log; None if there is none, or a writer has the log open. Raises OSError.

    Reads the last segment. An end that is damaged is no torn tail.
    """
    segment, damage = layout.list_segments(folder)[-1], list[EventLogCorruptedError]()
    end, index = layout.HEADER_BYTES, segment.first_index
    for chunk in scan_segment(segment, damage.append):
        end, index = chunk.end, chunk.next_index
    num_left = segment.path.stat().st_size - end
    if num_left <= 0 or any(error.position in (0, end) for error in damage) or _is_written(folder):
        return None
    return TornTail(segment.path, end, index, num_left)


def _is_written(folder: Path) -> bool:
    """Return whether a writer has the log open."""
    try:
        with (folder / layout.LOCK_NAME).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


class BatchColumns(NamedTuple):
    """The batches of consecutive records.

    A batch is *plain* if `kv_events.codec.decode_batch` accepts it with the same result, and if it has only stores and
    removals, no degraded reason, and nothing that only newer versions know. Its names are not checked: they are sound
    if a batch with the same ones was accepted. Of other records, only the names have columns, if they can be read.
    """

    data: bytes
    rows: I64Matrix
    """[n, NUM_FIELDS] the records, as in `kv_events.kernels.log_records`; positions are relative to `data`."""
    arrays: batches.BatchArrays
    """The batches, as in `kv_events.kernels.batches`."""

    def names(self) -> list[bytes | None]:
        """Return the encoded model, tenant, worker, rank and block size of each batch. None if they are unreadable.

        Batches with equal bytes belong to one stream and have one block size.
        """
        data = self.data
        places = self.arrays.batches[:, (batches.NAMES, batches.NAMES_END)].tolist()
        return [data[start:end] if end else None for start, end in places]


def decode_chunk(chunk: RecordChunk, start: int, stop: int) -> BatchColumns:
    """Decode the records [start, stop) of a chunk."""
    rows = chunk.rows[start:stop]
    arrays = batches.BatchArrays(
        np.empty(len(rows), np.uint8),
        np.empty((len(rows), batches.NUM_BATCH_FIELDS), np.int64),
        np.empty((len(chunk.data) // batches.LEAST_EVENT_BYTES + 1, batches.NUM_EVENT_FIELDS), np.int64),
        np.empty(len(chunk.data) // 8 + 1, np.uint64),
    )
    num_events, num_words = batches.decode_batches(np.frombuffer(chunk.data, np.uint8), rows, arrays)
    used = arrays._replace(events=arrays.events[:num_events], words=arrays.words[:num_words])
    return BatchColumns(chunk.data, rows, used)
