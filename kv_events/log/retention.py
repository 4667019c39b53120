"""Bounds the size and the age of an event log by deleting whole segments, oldest first."""

import time
from pathlib import Path
from typing import NamedTuple

from kv_events.errors import InvalidValueError
from kv_events.log.event_log import EventLogWriter
from kv_events.log.format import companions, list_segments, size_of

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
        None: no bound.

        Raises InvalidValueError.
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
