"""Records that could not be applied. They are counted by reason and kept for inspection, and are never fatal."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from kv_events.errors import KvsightError, RecordRejectedError
from kv_events.limits import MAX_RECORD_BYTES
from kv_events.log.event_log import EventLogWriter
from kv_events.records import Channel, LogRecord

logger = logging.getLogger(__name__)

_SHOWN = 200
_MAX_FOLDER_BYTES = 64 * 2**20


class DeadLetters:
    """Counts rejected records by reason, and logs the first one of each reason.

    If there is a folder, the records are written to it as an event log of at most 64 MiB. Further records are only
    counted.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self.on_put: list[Callable[[LogRecord], None]] = []
        """Called with each rejected record, in the channel of dead letters."""
        self._is_full = False
        self._writer = EventLogWriter(folder) if folder is not None else None
        self._bytes_left = _MAX_FOLDER_BYTES - (
            sum(f.stat().st_size for f in folder.iterdir()) if folder is not None else 0
        )

    def put(self, record: LogRecord, error: RecordRejectedError) -> None:
        """Count and keep a rejected record."""
        self.counts[error.reason] += 1
        if self.counts[error.reason] == 1:
            key = record.key[:_SHOWN].decode(errors="replace")
            detail = error.detail[:_SHOWN]
            logger.warning(
                "record %d/%d rejected: %s: %s (%s)", record.partition, record.offset, error.reason, detail, key
            )
        if self._writer is not None:
            self._write(self._writer, record)
        for notify in self.on_put:
            notify(record._replace(channel=Channel.DEAD_LETTERS))

    def _write(self, writer: EventLogWriter, record: LogRecord) -> None:
        """Write a record to the folder, cut to what an event log accepts. A failure is only logged."""
        kept = record._replace(
            key=record.key[:_SHOWN], payload=record.payload[:MAX_RECORD_BYTES], channel=Channel.DEAD_LETTERS
        )
        if self._bytes_left < len(kept.payload):
            if not self._is_full:
                logger.warning("the dead-letter folder is full; further records are only counted")
            self._is_full = True
            return
        try:
            writer.append(kept)
            writer.flush(sync=False)
        except (KvsightError, OSError) as error:
            logger.warning("a dead letter was not written: %s", error)
        else:
            self._bytes_left -= len(kept.payload)

    def close(self) -> None:
        """Close the folder's log."""
        if self._writer is not None:
            self._writer.close()
