"""Reads whole event logs fast: many records at a time, as columns, past damage. Start at `scan_log`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from math import floor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kv_events.kernels.log_records import (
    BEGIN,
    CHANNEL,
    END,
    KEY_BYTES,
    NUM_FIELDS,
    OFFSET,
    PARTITION,
    PAYLOAD,
    TIMESTAMP_MS,
    checksum_tables,
    find_records,
)
from kv_events.log.format import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    EventLogCorruptedError,
    Resume,
    Segment,
    check_end,
    list_segments,
    read_version,
)
from kv_events.log.moments import LogExtent, LogMoment
from kv_events.records import Channel, LogRecord

_CHUNK_BYTES = 2 << 20  # larger reads are slower; more than the largest record
_MOST_ROWS = 16_384
_TABLES = checksum_tables()
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
        return self.rows[:, TIMESTAMP_MS]

    @property
    def channels(self) -> npt.NDArray[np.int64]:
        """[n] channels."""
        return self.rows[:, CHANNEL]

    @property
    def begins(self) -> npt.NDArray[np.int64]:
        """[n] byte offsets in the segment at which the records begin."""
        return self.rows[:, BEGIN] + self.position

    @property
    def end(self) -> int:
        """Byte offset in the segment after the last record."""
        return int(self.rows[-1, END]) + self.position

    @property
    def next_index(self) -> int:
        """Index after the last record."""
        return self.first_index + len(self.rows)

    def offsets(self, channel: int) -> Iterator[tuple[int, int, int]]:
        """Yield (partition, offset of its first record, offset of its last one) of a channel."""
        rows = self.rows[self.channels == channel]
        for partition in np.unique(rows[:, PARTITION]).tolist():
            (found,) = np.nonzero(rows[:, PARTITION] == partition)
            yield partition, int(rows[found[0], OFFSET]), int(rows[found[-1], OFFSET])

    def before(self, moment: LogMoment) -> npt.NDArray[np.bool_]:
        """Return bool[n]: which records belong to a moment of the log."""
        taken = np.ones(len(self.rows), np.bool_)
        if moment.time_s is not None:
            taken &= self.timestamps_ms <= floor(min(max(moment.time_s * 1000, -_MOST_MS), _MOST_MS))
        if moment.index is not None:
            taken[max(0, moment.index - self.first_index) :] = False
        if moment.offsets is not None:
            partitions, places = np.unique(self.rows[:, PARTITION], return_inverse=True)
            limits = [min(moment.offsets.get(partition, 0), _MOST_OFFSET) for partition in partitions.tolist()]
            taken &= self.rows[:, OFFSET] < np.array(limits, np.int64)[places]
        return taken

    def note_in(self, extent: LogExtent) -> None:
        """Count the records."""
        times = self.timestamps_ms
        first_ms, last_ms = int(times.min()), int(times.max())
        extent.extend(self.first_index, len(self.rows), first_ms, last_ms, self.offsets(Channel.EVENTS))

    def record(self, number: int) -> LogRecord:
        """Return one record. number: its row."""
        row = self.rows[number].tolist()
        payload = row[PAYLOAD]
        key = self.data[payload - row[KEY_BYTES] : payload]
        return LogRecord(
            row[PARTITION], row[OFFSET], row[TIMESTAMP_MS], key, self.data[payload : row[END]], row[CHANNEL]
        )

    def records(self) -> Iterator[tuple[int, LogRecord]]:
        """Yield (index, record) of all rows."""
        data = self.data
        for index, row in enumerate(self.rows.tolist(), self.first_index):
            _, end, partition, offset, timestamp_ms, key_bytes, channel, payload = row
            key = data[payload - key_bytes : payload]
            yield index, LogRecord(partition, offset, timestamp_ms, key, data[payload:end], channel)


def scan_log(folder: Path, on_damage: OnDamage, start: int = 0) -> Iterator[RecordChunk]:
    """Yield all sound records of a log from index `start`, in order. Damage is reported and passed over.

    A torn tail of the last segment ends the log. Raises OSError.
    """
    for segment in list_segments(folder):
        if segment.next_first_index is None or segment.next_first_index > start:
            yield from scan_segment(segment, on_damage)


def scan_segment(
    segment: Segment, on_damage: OnDamage, position: int = HEADER_BYTES, index: int | None = None
) -> Iterator[RecordChunk]:
    """Yield the sound records of a segment from a byte position, which is that of record `index` (default: the first).

    Damage is reported and passed over. Raises OSError.
    """
    try:
        if read_version(segment) is None:
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
    rows = np.empty((_MOST_ROWS, NUM_FIELDS), np.int64)
    with segment.path.open("rb", buffering=0) as file:
        while True:
            data = os.pread(file.fileno(), _CHUNK_BYTES, position)
            found = find_records(np.frombuffer(data, np.uint8), MAX_BODY_BYTES, _TABLES, rows)
            if not found:
                break
            chunk = RecordChunk(segment, index, position, data, rows[:found].copy())
            yield chunk
            position, index = chunk.end, chunk.next_index
        check_end(file.fileno(), segment, position, index)
