"""The torn tail of an event log: an append that was cut off, after which the log has no record."""

from __future__ import annotations

import fcntl
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kv_events.log.event_log import LOCK_NAME
from kv_events.log.format import HEADER_BYTES, EventLogCorruptedError, list_segments

if TYPE_CHECKING:
    from kv_events.log.reader import RecordChunk


class TornTail(NamedTuple):
    """Bytes behind the last record of a log."""

    segment: Path
    position: int
    """Byte offset in the segment at which they begin."""
    record: int
    """Of the record that they would have been."""
    num_bytes: int

    def __str__(self) -> str:
        number = f"{self.num_bytes} byte{'' if self.num_bytes == 1 else 's'}"
        return f"{self.segment}: a torn tail of {number} at byte {self.position}, record {self.record}"


def torn_tail(folder: Path, last: RecordChunk | None, damage: Sequence[EventLogCorruptedError]) -> TornTail | None:
    """Return the torn tail of a log; None if there is none, or a writer has the log open. Raises OSError.

    last: the last chunk of records. damage: what the scan found; its end is not named again.
    """
    segment = list_segments(folder)[-1]
    is_known = last is not None and last.segment.path == segment.path
    end, index = (last.end, last.next_index) if last is not None and is_known else (0, segment.first_index)
    end = max(end, HEADER_BYTES)
    is_damage = any(error.segment == segment.path and error.position in (0, end) for error in damage)
    num_left = segment.path.stat().st_size - end
    if num_left <= 0 or is_damage or _is_written(folder):
        return None
    return TornTail(segment.path, end, index, num_left)


def _is_written(folder: Path) -> bool:
    """Return whether a writer has the log open."""
    try:
        with (folder / LOCK_NAME).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
