"""Sink of a recording: an event log in a folder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from kv_events.event_log import EventLogError, EventLogWriter
from kv_events.records import LogRecord
from kv_events.schema import ResyncRequest
from publisher.sinks.base import OutRecord, SinkUnavailableError


class FileSink:
    """Appends to an event log; `send` returns once the records would outlast a power cut. Has no way back."""

    def __init__(self, folder: Path, *, segment_bytes: int = 64 * 2**20) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._writer: EventLogWriter | None = None

    async def start(self) -> None:
        """Open the log; a log that another writer holds counts as unavailable."""
        try:
            self._writer = await asyncio.to_thread(EventLogWriter, self._folder, segment_bytes=self._segment_bytes)
        except (OSError, EventLogError) as error:
            raise SinkUnavailableError(f"event log {self._folder}: {error}") from error

    async def send(self, records: Sequence[OutRecord]) -> None:
        """Write and sync in a thread. A full disk counts as unavailable."""
        if self._writer is None:
            raise SinkUnavailableError(f"event log {self._folder} is not open")
        try:
            await asyncio.to_thread(_write, self._writer, records)
        except OSError as error:
            raise SinkUnavailableError(f"event log {self._folder}: {error}") from error

    async def stop(self) -> None:
        """Close the log."""
        writer, self._writer = self._writer, None
        if writer is not None:
            await asyncio.to_thread(writer.close)

    async def requests(self) -> AsyncIterator[ResyncRequest]:
        """Waits for ever."""
        await asyncio.Event().wait()
        yield ResyncRequest("", 0)  # never reached; makes this a generator


def _write(writer: EventLogWriter, records: Sequence[OutRecord]) -> None:
    for record in records:
        log_record = LogRecord(0, writer.next_index, record.timestamp_ms, record.key, record.payload)
        writer.append(log_record)
    writer.flush()
