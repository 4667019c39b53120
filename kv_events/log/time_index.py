"""The time index of an event log: where records of some index or time are found, without reading what precedes them.

`docs/event_log.md` documents the files `*.kvtimes`. They can be deleted at any time.
"""

import logging
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kv_events.log.format import HEADER_BYTES, Segment, list_segments, replace_file
from kv_events.log.reader import OnDamage, RecordChunk, scan_segment
from kv_events.records import Channel

logger = logging.getLogger(__name__)

TIMES_SUFFIX: Final = ".kvtimes"

_MAGIC = b"KVSTIM01"
_BLOCK_RECORDS = 256
_INDEX, _POSITION, _FIRST_MS, _LAST_MS, _LAST_EVENT_MS = range(5)
_NUM_FIELDS = 5
_NEVER = np.iinfo(np.int64).min

Blocks = npt.NDArray[np.int64]
"""[n, 5]: index and byte position of a block's first record; first and last time; last time of an event."""


class _Covered(NamedTuple):
    """The part of a segment that is in the index."""

    next_index: int
    end: int
    """Byte offset in the segment."""
    blocks: Blocks


class TimeIndex:
    """Where the records of a log are, in blocks of at most 256 records. For one thread at a time.

    Times may be out of order in a log, for example if it was recorded from several partitions.
    """

    def __init__(self, folder: Path, on_damage: OnDamage) -> None:
        """Reads the files of the index, and the records that they do not cover. on_damage: receives damaged records.
        Raises OSError.
        """
        self._folder = folder
        self._on_damage = on_damage
        self._segments: list[Segment] = []
        self._covered: dict[int, _Covered] = {}  # by the first index of the segment
        self._saved: dict[int, int] = {}  # first index of the segment -> next index in its file
        self.file_faults: list[str] = []
        """Files of the index that could not be used. The segments were read instead."""
        self.refresh()

    def refresh(self) -> None:
        """Read what was appended to the log. Raises OSError."""
        self._segments = list_segments(self._folder)
        kept = {segment.first_index for segment in self._segments}
        self._covered = {first: covered for first, covered in self._covered.items() if first in kept}
        for segment in self._segments:
            covered = self._covered.get(segment.first_index) or self._load(segment)
            if covered.next_index != segment.next_first_index:
                covered = self._scan(segment, covered)
            self._covered[segment.first_index] = covered
        self._all = np.concatenate([self._covered[s.first_index].blocks for s in self._segments] or [_no_blocks()])
        self.is_empty = not len(self._all)
        """Whether the log has no sound record."""
        self.first_index = self._segments[0].first_index if self._segments else 0
        self.next_index = self._covered[self._segments[-1].first_index].next_index if self._segments else 0
        """Index after the newest record."""
        self.first_ms = int(self._all[:, _FIRST_MS].min(initial=-_NEVER - 1))
        """The earliest time of a record, in milliseconds since 1970."""
        self.last_ms = int(self._all[:, _LAST_MS].max(initial=_NEVER))
        last_event_ms = int(self._all[:, _LAST_EVENT_MS].max(initial=_NEVER))
        self.last_event_ms = None if last_event_ms == _NEVER else last_event_ms
        """The latest time of a record of events. None if there is none."""

    def save(self) -> None:
        """Write the files of the index, one for each segment. Raises OSError."""
        for first, covered in self._covered.items():
            if self._saved.get(first) != covered.next_index and len(covered.blocks):
                facts = np.array([first, covered.next_index, covered.end], "<i8")
                body = facts.tobytes() + covered.blocks.astype("<i8").tobytes()
                replace_file(self._path(first), (_MAGIC, zlib.crc32(body).to_bytes(4, "little"), body))
                self._saved[first] = covered.next_index

    def after(self, time_ms: float) -> int:
        """Return an index such that all records from there on are later than a time."""
        (early,) = np.nonzero(self._all[:, _FIRST_MS] <= time_ms)
        if not len(early):
            return self.first_index
        return self._block_end(int(early[-1]))

    def before(self, time_ms: float) -> int:
        """Return an index such that all records before it are not later than a time."""
        (late,) = np.nonzero(self._all[:, _LAST_MS] > time_ms)
        return int(self._all[late[0], _INDEX]) if len(late) else self.next_index

    def segment_after(self, index: int) -> int | None:
        """Return the index at which the first segment after a record begins. None if there is none."""
        return next((segment.first_index for segment in self._segments if segment.first_index > index), None)

    def block_before(self, index: int) -> int | None:
        """Return the index of the first record of the last block that begins before a record. None if there is none."""
        number = int(np.searchsorted(self._all[:, _INDEX], index))
        return int(self._all[number - 1, _INDEX]) if number else None

    def chunks(self, start: int) -> Iterator[RecordChunk]:
        """Yield the records of the log from index `start`. Some records before it may be among the first chunk.

        Damage is reported and passed over. Raises OSError.
        """
        number = int(np.searchsorted(self._all[:, _INDEX], start, side="right")) - 1
        begin = self._all[number] if number >= 0 else None
        for segment in self._segments:
            if segment.next_first_index is not None and segment.next_first_index <= start:
                continue
            if begin is not None and segment.first_index <= begin[_INDEX] and start >= begin[_INDEX]:
                yield from scan_segment(segment, self._on_damage, int(begin[_POSITION]), int(begin[_INDEX]))
                begin = None
            else:
                yield from scan_segment(segment, self._on_damage)

    def _block_end(self, number: int) -> int:
        return int(self._all[number + 1, _INDEX]) if number + 1 < len(self._all) else self.next_index

    def _path(self, first_index: int) -> Path:
        return self._folder / f"{first_index:020d}{TIMES_SUFFIX}"

    def _load(self, segment: Segment) -> _Covered:
        path = self._path(segment.first_index)
        if not path.exists():
            return _nothing(segment)
        covered = _load(path, segment)
        if covered is None:
            self.file_faults.append(_fault(path))
            return _nothing(segment)
        self._saved[segment.first_index] = covered.next_index
        return covered

    def _scan(self, segment: Segment, covered: _Covered) -> _Covered:
        """Extend what is covered by the rest of the segment."""
        blocks, end, next_index = [covered.blocks], covered.end, covered.next_index
        for chunk in scan_segment(segment, self._on_damage, covered.end, covered.next_index):
            blocks.append(_blocks(chunk))
            end, next_index = chunk.end, chunk.next_index
        return _Covered(next_index, end, np.concatenate(blocks))


def faults_of_times(folder: Path) -> list[str]:
    """Return the files of a log's time index that cannot be used. Raises OSError."""
    paths = [(folder / f"{segment.path.stem}{TIMES_SUFFIX}", segment) for segment in list_segments(folder)]
    return [_fault(path) for path, segment in paths if path.exists() and _load(path, segment) is None]


def _fault(path: Path) -> str:
    return f"{path}: not a sound index of its segment; the segment is read instead"


def _load(path: Path, segment: Segment) -> _Covered | None:
    data = path.read_bytes()
    body = data[12:]
    facts = np.frombuffer(body[:24].ljust(24, b"\0"), "<i8")
    is_sound = data[:8] == _MAGIC and data[8:12] == zlib.crc32(body).to_bytes(4, "little")
    if not is_sound or facts[0] != segment.first_index or facts[2] > segment.path.stat().st_size:
        return None
    return _Covered(int(facts[1]), int(facts[2]), np.frombuffer(body[24:], "<i8").reshape(-1, _NUM_FIELDS))


def _nothing(segment: Segment) -> _Covered:
    return _Covered(segment.first_index, HEADER_BYTES, _no_blocks())


def _no_blocks() -> Blocks:
    return np.empty((0, _NUM_FIELDS), np.int64)


def _blocks(chunk: RecordChunk) -> Blocks:
    starts = np.arange(0, len(chunk.rows), _BLOCK_RECORDS)
    times = chunk.timestamps_ms
    event_times = np.where(chunk.channels == Channel.EVENTS, times, _NEVER)
    return np.stack(
        (
            chunk.first_index + starts,
            chunk.begins[starts],
            np.minimum.reduceat(times, starts),
            np.maximum.reduceat(times, starts),
            np.maximum.reduceat(event_times, starts),
        ),
        axis=1,
    )
