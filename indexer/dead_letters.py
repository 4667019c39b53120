"""Records that could not be applied: counted by reason, kept for a look, never fatal."""

from __future__ import annotations

import logging
from collections import Counter, deque
from pathlib import Path
from typing import NamedTuple

from kv_events.errors import RecordRejectedError
from kv_events.event_log import EventLogWriter
from kv_events.records import LogRecord

log = logging.getLogger(__name__)

_KEPT_IN_MEMORY = 100
_MAX_FOLDER_BYTES = 64 * 2**20


class DeadLetter(NamedTuple):
    """Where a rejected record stood, and why it was rejected."""

    partition: int
    offset: int
    key: str
    reason: str
    detail: str


class DeadLetters:
    """Counts by reason, the newest letters in memory and, given a folder, the records themselves as an event log.

    The folder takes 64 MiB; after that records are only counted.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self.newest: deque[DeadLetter] = deque(maxlen=_KEPT_IN_MEMORY)
        self._writer = EventLogWriter(folder) if folder is not None else None
        self._room = _MAX_FOLDER_BYTES

    def put(self, record: LogRecord, error: RecordRejectedError) -> None:
        """Take a record that was rejected."""
        self.counts[error.reason] += 1
        key = record.key.decode(errors="replace")
        self.newest.append(DeadLetter(record.partition, record.offset, key, error.reason, error.detail))
        if self.counts[error.reason] == 1:
            log.warning("record %d/%d of %s rejected: %s", record.partition, record.offset, key, error)
        if self._writer is not None and self._room > 0:
            self._room -= len(record.payload)
            self._writer.append(record)
            self._writer.flush(sync=False)

    def close(self) -> None:
        """Close the folder's log."""
        if self._writer is not None:
            self._writer.close()
