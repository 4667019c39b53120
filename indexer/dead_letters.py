"""Records that could not be applied. They are counted by reason and kept for inspection, and are never fatal."""

from __future__ import annotations

import logging
from collections import Counter, deque
from pathlib import Path
from typing import NamedTuple

from kv_events.errors import KvsightError, RecordRejectedError
from kv_events.event_log import EventLogWriter
from kv_events.limits import MAX_RECORD_BYTES
from kv_events.records import LogRecord

logger = logging.getLogger(__name__)

_KEPT_IN_MEMORY = 100
_SHOWN = 200
_MAX_FOLDER_BYTES = 64 * 2**20


class DeadLetter(NamedTuple):
    """Position of a rejected record, and why it was rejected."""

    partition: int
    offset: int
    key: str
    reason: str
    detail: str


class DeadLetters:
    """Counts rejected records by reason and keeps the newest letters in memory.

    If there is a folder, the records themselves are written to it as an event log of at most 64 MiB. Further records
    are only counted.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self.newest: deque[DeadLetter] = deque(maxlen=_KEPT_IN_MEMORY)
        self.not_kept = 0
        """Number of records that were not written to the folder because it is full or cannot be written."""
        self._writer = EventLogWriter(folder) if folder is not None else None
        self._room = _MAX_FOLDER_BYTES - (sum(f.stat().st_size for f in folder.iterdir()) if folder is not None else 0)

    def put(self, record: LogRecord, error: RecordRejectedError) -> None:
        """Count and keep a rejected record."""
        self.counts[error.reason] += 1
        key = record.key[:_SHOWN].decode(errors="replace")
        detail = error.detail[:_SHOWN]
        self.newest.append(DeadLetter(record.partition, record.offset, key, error.reason, detail))
        if self.counts[error.reason] == 1:
            logger.warning(
                "record %d/%d rejected: %s: %s (%s)", record.partition, record.offset, error.reason, detail, key
            )
        if self._writer is not None:
            self._keep(self._writer, record)

    def _keep(self, writer: EventLogWriter, record: LogRecord) -> None:
        """Write a record to the folder, cut to what an event log accepts. A failure is only logged."""
        kept = record._replace(key=record.key[:_SHOWN], payload=record.payload[:MAX_RECORD_BYTES])
        if self._room < len(kept.payload):
            self.not_kept += 1
            return
        try:
            writer.append(kept)
            writer.flush(sync=False)
        except (KvsightError, OSError) as error:
            self.not_kept += 1
            logger.warning("dead letter not kept: %s", error)
        else:
            self._room -= len(kept.payload)

    def close(self) -> None:
        """Close the folder's log."""
        if self._writer is not None:
            self._writer.close()
