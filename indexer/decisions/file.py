"""Writes decisions to an event log in a folder."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from indexer.decisions.log import DecisionsUnavailableError
from kv_events.log.event_log import EventLogError, EventLogWriter
from kv_events.log.retention import LogRetention
from kv_events.records import LogRecord

_MAX_BYTES = 2 * 2**30
_SEGMENT_BYTES = 64 * 2**20


class FileDecisions:
    """Creates the folder with the first decision.

    Whole files are deleted, oldest first, to keep the log within its bound.
    """

    def __init__(self, folder: Path, *, max_bytes: int = _MAX_BYTES, segment_bytes: int = _SEGMENT_BYTES) -> None:
        """max_bytes: bound on the log, at least two segments. segment_bytes: size of a file."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._segment_bytes = segment_bytes
        self._kept_segment = -1  # index of the newest segment when the bound was enforced last
        self._writer: EventLogWriter | None = None  # used only in the thread
        self._thread = ThreadPoolExecutor(1, "decisions")

    async def write(self, records: Sequence[LogRecord]) -> None:
        """See `Write`."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._write, records)
        except (OSError, EventLogError) as error:
            raise DecisionsUnavailableError(f"event log {self._folder}: {error}") from error

    async def stop(self) -> None:
        """Close the log."""
        closing = asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)
        await asyncio.shield(closing)

    def _write(self, records: Sequence[LogRecord]) -> None:
        if self._writer is None:
            self._writer = EventLogWriter(self._folder, segment_bytes=self._segment_bytes)
            self._retention = LogRetention(self._folder, self._writer, self._max_bytes, None)
        for record in records:
            self._writer.append(record._replace(offset=self._writer.next_index))
        self._writer.flush(sync=False)
        if self._writer.segment_index != self._kept_segment:
            self._retention.enforce()
            self._kept_segment = self._writer.segment_index

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
