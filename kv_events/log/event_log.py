"""An event log in a folder: append-only segments with one writer process and any number of concurrent readers.

Start at `EventLogWriter` and `EventLogReader`. `kv_events.log.format` reads and writes the bytes;
`docs/event_log.md` documents their layout.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

from kv_events.errors import InvalidValueError
from kv_events.log.format import (
    FORMAT_VERSION,
    HEADER_BYTES,
    EventLogCorruptedError,
    EventLogError,
    Resume,
    Segment,
    encode_record,
    list_segments,
    read_version,
    scan,
    segment_header,
    segment_path,
)
from kv_events.log.memory import LogTruncatedError
from kv_events.records import LogRecord

__all__ = [
    "EventLogCorruptedError",
    "EventLogError",
    "EventLogLockedError",
    "EventLogReader",
    "EventLogWriter",
]

logger = logging.getLogger(__name__)

LOCK_NAME: Final = "writer.lock"
"""File that the writer of a log holds with `flock`."""
_BUFFER_BYTES = 256 * 2**10
_MARK_EVERY = 1024


class EventLogLockedError(EventLogError):
    """Another writer has the log open."""


class EventLogWriter:
    """Appends to a log; for one thread at a time. Opening it creates the folder and truncates a torn tail.

    Raises EventLogLockedError, EventLogCorruptedError (the last segment is damaged, and not only at its end),
    InvalidValueError or OSError.
    """

    def __init__(self, folder: Path, *, segment_bytes: int = 64 * 2**20, leaves_damage: bool = False) -> None:
        """segment_bytes: size at which a new segment is started. A record is never split.

        leaves_damage: start a new segment after a damaged one, which stays as it is, instead of raising an error.
        """
        if segment_bytes < 1:
            raise InvalidValueError("segment_bytes", segment_bytes, "a positive integer")
        self._folder = folder
        self._leaves_damage = leaves_damage
        self.segment_bytes = segment_bytes
        self._fd = -1  # the last segment
        self._next_index = 0
        self._segment_index = 0
        self._pending = bytearray()  # complete records that readers do not see yet
        self._written = 0  # bytes of the segment in the file, all of them valid
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as undo:
            self._lock = _lock(folder)
            undo.callback(os.close, self._lock)
            self._open_last()
            undo.pop_all()

    @property
    def next_index(self) -> int:
        """Index of the next record to be appended."""
        return self._next_index

    @property
    def segment_index(self) -> int:
        """Index of the first record of the newest segment."""
        return self._segment_index

    def append(self, record: LogRecord) -> int:
        """Add one record and return its index in the log. Readers see it after `flush()`, or earlier.

        Raises InvalidValueError, or OSError (disk full). The record is then not appended and the log stays intact.
        """
        self._check_open()
        encoded = encode_record(record)
        size = self._written + len(self._pending)
        if size > HEADER_BYTES and size + len(encoded) > self.segment_bytes:
            self._roll()
        elif len(self._pending) >= _BUFFER_BYTES:
            self._write_out()
        self._pending += encoded
        self._next_index += 1
        return self._next_index - 1

    def flush(self, sync: bool = True) -> None:
        """Make every appended record visible to readers. With sync, return after they would survive a power failure.

        Raises OSError. Records that could not be written are kept for the next call.
        """
        self._check_open()
        self._write_out()
        if sync:
            os.fsync(self._fd)

    def start_segment(self) -> None:
        """Complete the newest segment and start another one, unless it is empty. Raises OSError."""
        self._check_open()
        if self._next_index > self._segment_index:
            self._roll()

    def close(self) -> None:
        """Flush and release the log. Closing twice is harmless."""
        if self._fd < 0:
            return
        try:
            self.flush()
        finally:
            os.close(self._fd)
            os.close(self._lock)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open_last(self) -> None:
        segments = list_segments(self._folder)
        last = segments[-1] if segments else None
        try:
            version = None if last is None else read_version(last)
        except EventLogCorruptedError as error:  # the records behind the header may be sound all the same
            self._begin_after(error, Resume(error.index, HEADER_BYTES))
            return
        if last is None or version is None:
            self._begin(0 if last is None else last.first_index)
            return
        self._written, self._next_index = HEADER_BYTES, last.first_index
        self._segment_index = last.first_index
        try:
            for located in scan(last, HEADER_BYTES, last.first_index):
                self._written, self._next_index = located.end, located.record_index + 1
        except EventLogCorruptedError as error:
            self._begin_after(error, error.resume)
            return
        num_torn = last.path.stat().st_size - self._written
        if num_torn:
            logger.warning("%s: cutting a torn tail of %d bytes, record %d", last.path, num_torn, self._next_index)
            os.truncate(last.path, self._written)
        if version == FORMAT_VERSION:
            self._fd = os.open(last.path, os.O_WRONLY)
        else:  # a segment has one version
            _sync(last.path)
            self._begin(self._next_index)

    def _begin_after(self, error: EventLogCorruptedError, resume: Resume | None) -> None:
        """Start a segment after a damaged one, or raise its first damage. resume: where to look for further records."""
        if not self._leaves_damage:
            raise error
        logger.warning("%s; the log goes on in a new segment", error)
        damaged = list_segments(self._folder)[-1]
        next_index = error.index + 1
        while resume is not None and resume.position is not None:
            next_index = resume.record_index + 1
            try:
                for located in scan(damaged, resume.position, resume.record_index):
                    next_index = located.record_index + 1
                resume = None
            except EventLogCorruptedError as another:
                next_index, resume = max(next_index, another.index + 1), another.resume
        _sync(damaged.path)
        self._begin(next_index)

    def _roll(self) -> None:
        """A segment that has a successor is complete and on disk."""
        self.flush()
        full = self._fd
        self._begin(self._next_index)
        os.close(full)

    def _begin(self, first_index: int) -> None:
        path = segment_path(self._folder, first_index)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _write_at(fd, segment_header(first_index), 0)
            os.fsync(fd)
            _sync(self._folder)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)  # a smaller record may still fit into the segment before it
            raise
        self._fd, self._written, self._next_index = fd, HEADER_BYTES, first_index
        self._segment_index = first_index

    def _write_out(self) -> None:
        try:
            _write_at(self._fd, self._pending, self._written)
        except OSError:
            os.ftruncate(self._fd, self._written)  # the next call must not append to half a record
            raise
        self._written += len(self._pending)
        self._pending.clear()

    def _check_open(self) -> None:
        if self._fd < 0:
            raise EventLogError(f"{self._folder}: this writer is closed")


class _Mark(NamedTuple):
    """Position of a record. Compares by index."""

    record_index: int
    segment: int
    """First index of the segment."""
    position: int


class EventLogReader:
    """Reads a log, even while it is being written; for one thread at a time.

    The reader remembers where it stopped, so continuing from there costs only the records appended since.
    """

    def __init__(self, folder: Path) -> None:
        """Raises EventLogError if the folder does not exist. An empty folder is an empty log."""
        if not folder.is_dir():
            raise EventLogError(f"{folder}: no such folder")
        self._folder = folder
        self._marks: list[_Mark] = []  # every `_MARK_EVERY`th record that was read, in order
        self._end: _Mark | None = None  # after the last record that was read

    @property
    def first_index(self) -> int:
        """Index of the oldest record kept. It is not 0 if old segments were deleted."""
        segments = list_segments(self._folder)
        return segments[0].first_index if segments else 0

    @property
    def next_index(self) -> int:
        """Index of the next record to be appended. Reads everything appended since the last call."""
        segments = list_segments(self._folder)
        if not segments:
            return 0
        last = segments[-1].first_index
        next_index = max(last, self._end.record_index if self._end else 0)
        for index, _ in self._from_nearest(segments, next_index, passes=sys.maxsize):
            next_index = index + 1
        return next_index

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, LogRecord]]:
        """Yield (index, record) from `start` up to but excluding `stop`, or up to the last complete record.

        Raises LogTruncatedError if `start` is no longer kept, EventLogCorruptedError at a damaged record.
        """
        segments = list_segments(self._folder)
        if segments and start < segments[0].first_index:
            raise LogTruncatedError(start, segments[0].first_index)
        for index, record in self._from_nearest(segments, start):
            if stop is not None and index >= stop:
                return
            if index >= start:
                yield index, record

    def _from_nearest(
        self, segments: list[Segment], start: int, passes: int | None = None
    ) -> Iterator[tuple[int, LogRecord]]:
        """Yield records from the nearest known position at or before `start`.

        Passes over damage before record `passes`, by default before `start`.
        """
        if not segments:
            return
        mark = self._nearest(segments, start)
        for segment in segments:
            if segment.first_index < mark.segment or read_version(segment) is None:
                continue
            here = segment.first_index == mark.segment
            position, index = (mark.position, mark.record_index) if here else (HEADER_BYTES, segment.first_index)
            yield from self._from(segment, position, index, start if passes is None else passes)

    def _from(self, segment: Segment, position: int, index: int, start: int) -> Iterator[tuple[int, LogRecord]]:
        """Yield the records of a segment from a byte position, which is that of record `index`.

        Passes over damage before record `start`.
        """
        resume: Resume | None = Resume(index, position)
        while resume is not None and resume.position is not None:
            try:
                for located in scan(segment, resume.position, resume.record_index):
                    self._note(_Mark(located.record_index + 1, segment.first_index, located.end))
                    yield located.record_index, located.record
            except EventLogCorruptedError as error:
                resume = error.resume
                if resume is not None and resume.position is not None:
                    self._note(_Mark(resume.record_index, segment.first_index, resume.position), is_kept=True)
                if resume is None or resume.record_index > start:
                    raise
            else:
                return

    def _nearest(self, segments: list[Segment], start: int) -> _Mark:
        firsts = [segment.first_index for segment in segments]
        first = firsts[bisect.bisect_right(firsts, start) - 1]
        num_before = bisect.bisect_right(self._marks, start, key=lambda mark: mark.record_index)
        known = [_Mark(first, first, HEADER_BYTES), *self._marks[max(num_before - 1, 0) : num_before]]
        if self._end is not None and self._end.record_index <= start:
            known.append(self._end)
        return max(known)

    def _note(self, mark: _Mark, *, is_kept: bool = False) -> None:
        if self._end is None or mark.record_index > self._end.record_index:
            self._end = mark
            if is_kept or mark.record_index % _MARK_EVERY == 0:
                self._marks.append(mark)


def _lock(folder: Path) -> int:
    fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise EventLogLockedError(f"{folder}: another writer has this log open") from None
    except OSError:
        os.close(fd)
        raise
    return fd


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_at(fd: int, data: bytes | bytearray, position: int) -> None:
    done = 0
    with memoryview(data) as view:
        while done < len(view):
            done += os.pwrite(fd, view[done:], position + done)
