"""An event log in a folder: append-only segments with one writer process and any number of concurrent readers.

Start at `EventLogWriter` and `EventLogReader`; `LogRetention` deletes old parts. `kv_events.log.format` has the bytes;
`docs/event_log.md` documents their layout.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from kv_events.errors import InvalidValueError, KvsightError, check_positive
from kv_events.log import format as layout
from kv_events.log.format import EventLogCorruptedError, EventLogError, Segment, companions, list_segments, size_of
from kv_events.log.memory import LogTruncatedError
from kv_events.records import LogRecord

if TYPE_CHECKING:
    from kv_events.log.reader import RecordChunk

__all__ = ["EventLogCorruptedError", "EventLogError", "EventLogLockedError", "EventLogReader", "EventLogWriter"]

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 64 * 2**20
_BUFFER_BYTES = 256 * 2**10


class EventLogLockedError(EventLogError):
    """Another writer has the log open."""


class EventLogWriter:
    """Appends to a log; for one thread at a time. Opening it creates the folder and truncates a torn tail.

    Raises EventLogLockedError, EventLogCorruptedError (the last segment is damaged, and not only at its end),
    InvalidValueError or OSError.
    """

    def __init__(self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES, leaves_damage: bool = False) -> None:
        """segment_bytes: size at which a new segment is started. A record is never split.

        leaves_damage: start a new segment after a damaged one, which stays as it is, instead of raising an error.
        """
        check_positive(segment_bytes=segment_bytes)
        self._folder = folder
        self._leaves_damage = leaves_damage
        self.segment_bytes = segment_bytes
        self._fd = -1  # the last segment
        self.next_index = 0
        """Index of the next record to be appended."""
        self.segment_index = 0
        """Index of the first record of the newest segment."""
        self._pending = bytearray()  # complete records that readers do not see yet
        self._written = 0  # bytes of the segment in the file, all of them valid
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as undo:
            self._lock = _lock(folder)
            undo.callback(os.close, self._lock)
            self._open_last()
            undo.pop_all()

    def append(self, record: LogRecord) -> int:
        """Add one record and return its index in the log. Readers see it after `flush()`, or earlier. Raises
        InvalidValueError, or OSError (disk full). The record is then not appended and the log stays intact.
        """
        self._check_open()
        encoded = layout.encode_record(record)
        size = self._written + len(self._pending)
        if size > layout.HEADER_BYTES and size + len(encoded) > self.segment_bytes:
            self._roll()
        elif len(self._pending) >= _BUFFER_BYTES:
            self._write_out()
        self._pending += encoded
        self.next_index += 1
        return self.next_index - 1

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
        if self.next_index > self.segment_index:
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

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_last(self) -> None:
        segments = layout.list_segments(self._folder)
        if not segments:
            self._begin(0)
            return
        from kv_events.log.reader import scan_segment  # loads a kernel

        last, damage = segments[-1], list[EventLogCorruptedError]()
        self._written, self.next_index, self.segment_index = layout.HEADER_BYTES, last.first_index, last.first_index
        for chunk in scan_segment(last, damage.append):
            self._written, self.next_index = chunk.end, chunk.next_index
        if damage:
            if not self._leaves_damage:
                raise damage[0]
            logger.warning("%s; the log goes on in a new segment", damage[0])
            _sync(last.path)
            self._begin(max(self.next_index, damage[-1].index + 1))
            return
        version = layout.read_version(last)
        if version is None:
            self._begin(last.first_index)
            return
        num_torn = last.path.stat().st_size - self._written
        if num_torn:
            logger.warning("%s: cutting a torn tail of %d bytes, record %d", last.path, num_torn, self.next_index)
            os.truncate(last.path, self._written)
        if version == layout.FORMAT_VERSION:
            self._fd = os.open(last.path, os.O_WRONLY)
        else:  # a segment has one version
            _sync(last.path)
            self._begin(self.next_index)

    def _roll(self) -> None:
        """A segment that has a successor is complete and on disk."""
        self.flush()
        full = self._fd
        self._begin(self.next_index)
        os.close(full)

    def _begin(self, first_index: int) -> None:
        path = layout.segment_path(self._folder, first_index)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _write_at(fd, layout.segment_header(first_index), 0)
            os.fsync(fd)
            _sync(self._folder)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)  # a smaller record may still fit into the segment before it
            raise
        self._fd, self._written, self.next_index = fd, layout.HEADER_BYTES, first_index
        self.segment_index = first_index

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


class WriterThread:
    """Writes an event log in a thread, because a disk may be slow. A cancelled step ends before the next one begins."""

    def __init__(self, folder: Path, segment_bytes: int, failed: type[KvsightError]) -> None:
        """failed: raised for an error of the disk or of the log."""
        self._folder, self._segment_bytes, self._failed = folder, segment_bytes, failed
        self._writer: EventLogWriter | None = None  # used only in the thread
        self._thread = ThreadPoolExecutor(1, f"event-log:{folder}")

    async def run(self, step: Callable[[EventLogWriter], None]) -> None:
        """Do something with the writer, which is opened first."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._run, step)
        except (OSError, EventLogError) as error:
            raise self._failed(f"event log {self._folder}: {error}") from error

    async def stop(self) -> None:
        """Close the log, and end the thread."""
        closing = asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)
        await asyncio.shield(closing)

    def _run(self, step: Callable[[EventLogWriter], None]) -> None:
        self._writer = self._writer or EventLogWriter(self._folder, segment_bytes=self._segment_bytes)
        step(self._writer)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class EventLogReader:
    """Reads a log, even while it is being written; for one thread at a time.

    The reader remembers where it stopped, so continuing from there costs only the records appended since.
    """

    def __init__(self, folder: Path) -> None:
        """Raises EventLogError if the folder does not exist. An empty folder is an empty log."""
        layout.check_folder(folder)
        self._folder = folder
        self._last: RecordChunk | None = None  # with the last record that was read
        self._next_index = 0  # after that record

    @property
    def first_index(self) -> int:
        """Index of the oldest record kept. It is not 0 if old segments were deleted."""
        segments = layout.list_segments(self._folder)
        return segments[0].first_index if segments else 0

    @property
    def next_index(self) -> int:
        """Index of the next record to be appended. Reads everything appended since the last call."""
        segments = layout.list_segments(self._folder)
        if not segments:
            return 0
        next_index = max(segments[-1].first_index, self._next_index)
        for chunk in self._chunks(segments, next_index, last_damage=sys.maxsize):
            self._last, self._next_index = chunk, chunk.next_index
            next_index = chunk.next_index
        return next_index

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, LogRecord]]:
        """Yield (index, record) from `start` up to but excluding `stop`, or up to the last complete record. Raises
        LogTruncatedError if `start` is no longer kept, EventLogCorruptedError at a damaged record.
        """
        segments = layout.list_segments(self._folder)
        if segments and start < segments[0].first_index:
            raise LogTruncatedError(start, segments[0].first_index)
        for chunk in self._chunks(segments, start, last_damage=start):
            for index, record in chunk.records():
                if stop is not None and index >= stop:
                    return
                self._last, self._next_index = chunk, index + 1
                if index >= start:
                    yield index, record

    def _chunks(self, segments: list[Segment], start: int, last_damage: int) -> Iterator[RecordChunk]:
        """Yield records from a known position at or before `start`.

        Damage is passed over if the next sound record is `last_damage` or an earlier one.
        """
        from kv_events.log.reader import scan_segment  # loads a kernel

        def on_damage(error: EventLogCorruptedError) -> None:
            if error.resume is None or error.resume.record_index > last_damage:
                raise error

        last, next_index = self._last, self._next_index
        for segment in segments:
            if segment.next_first_index is not None and segment.next_first_index <= start:
                continue
            if last is not None and last.segment.path == segment.path and next_index <= start:
                if next_index < last.next_index:
                    yield last._replace(first_index=next_index, rows=last.rows[next_index - last.first_index :])
                yield from scan_segment(segment, on_damage, last.end, last.next_index)
            else:
                yield from scan_segment(segment, on_damage)


def _lock(folder: Path) -> int:
    fd = os.open(folder / layout.LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
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


_PARTS = 8
"""A bound on the age is kept in at least this many segments, so that not too much is deleted at once."""


class DeletedSegment(NamedTuple):
    """A segment that is deleted."""

    path: Path
    first_index: int
    last_index: int
    num_bytes: int


class LogRetention:
    """Deletes old segments of a log that this process writes. The newest segment stays."""

    def __init__(self, folder: Path, writer: EventLogWriter, max_bytes: int | None, max_age_s: float | None) -> None:
        """max_bytes: bound on the size of the log. max_age_s: seconds since the last record of a segment was written.
        None: no bound. Raises InvalidValueError.
        """
        if max_bytes is not None and max_bytes < 2 * writer.segment_bytes:
            raise InvalidValueError("max_bytes", max_bytes, f"at least two segments of {writer.segment_bytes} bytes")
        if max_age_s is not None and max_age_s <= 0:
            raise InvalidValueError("max_age", max_age_s, "a positive number of seconds")
        self._folder = folder
        self._writer = writer
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._newest = -1  # first index of the newest segment
        self._newest_since = 0.0

    def enforce(self, now: float | None = None) -> list[DeletedSegment]:
        """Delete the segments that exceed a bound. now: seconds since 1970. Raises OSError."""
        now = time.time() if now is None else now
        self._close_old_segment(now)
        *old, newest = list_segments(self._folder)
        # the newest one may grow to its full size
        total = self._writer.segment_bytes + sum(segment.path.stat().st_size for segment in old)
        total += sum(size_of(path) for _, path in companions(self._folder))
        deleted: list[DeletedSegment] = []
        for segment in old:
            facts = segment.path.stat()
            is_expired = self._max_age_s is not None and now - facts.st_mtime > self._max_age_s
            if not is_expired and (self._max_bytes is None or total <= self._max_bytes):
                break
            segment.path.unlink()
            total -= facts.st_size + self._delete_companions(segment.next_first_index or newest.first_index)
            last = (segment.next_first_index or newest.first_index) - 1
            deleted.append(DeletedSegment(segment.path, segment.first_index, last, facts.st_size))
        return deleted

    def _delete_companions(self, first_index: int) -> int:
        """Delete what was kept beside deleted segments. Returns the bytes."""
        num_bytes = 0
        for index, path in companions(self._folder):
            if index < first_index:
                num_bytes += size_of(path)
                path.unlink(missing_ok=True)
        return num_bytes

    def _close_old_segment(self, now: float) -> None:
        """Start a new segment when the newest one spans a part of the longest age."""
        first = self._writer.segment_index
        if first != self._newest:
            self._newest, self._newest_since = first, now
        elif self._max_age_s is not None and now - self._newest_since > self._max_age_s / _PARTS:
            self._writer.start_segment()
