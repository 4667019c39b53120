"""The file sink: an event log in a folder."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kv_events.errors import check_type
from kv_events.log.event_log import EventLogError, EventLogWriter
from kv_events.records import LogRecord
from kv_events.runtime.outages import Outage
from kv_events.schema import ResyncRequest
from publisher.sinks.base import OutRecord, SinkUnavailableError, no_requests

logger = logging.getLogger(__name__)


class FileSink:
    """Appends to an event log. `send` returns when records would survive a power failure. Has no control channel."""

    def __init__(self, folder: str | Path, *, segment_bytes: int = 64 * 2**20) -> None:
        """Raises InvalidValueError if `folder` is not a path."""
        check_type("folder", folder, str | Path)
        self._folder = Path(folder)
        self.outage = Outage(logger, f"event log {folder} takes no records", f"event log {folder} takes records")
        self._segment_bytes = segment_bytes
        self._writer: EventLogWriter | None = None  # used only in the thread
        self._thread: ThreadPoolExecutor | None = None  # one: a cancelled call finishes before the next

    async def start(self) -> None:
        """Open the log. A log that another writer has open counts as unavailable."""
        self._thread = self._thread or ThreadPoolExecutor(1, f"event-log:{self._folder}")
        await self._in_thread(self._thread, self._open)

    async def send(self, records: Sequence[OutRecord]) -> None:
        """Write and sync in a thread. A full disk counts as unavailable."""
        if self._thread is None:
            raise SinkUnavailableError(f"event log {self._folder} is not open")
        await self._in_thread(self._thread, lambda: self._write(records))

    async def stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            closing = asyncio.get_running_loop().run_in_executor(thread, self._close)
            thread.shutdown(wait=False)
            await asyncio.shield(closing)

    def requests(self) -> AsyncIterator[ResyncRequest | None]:
        return no_requests()

    async def _in_thread(self, thread: ThreadPoolExecutor, step: Callable[[], None]) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(thread, step)
        except (OSError, EventLogError) as error:
            raise SinkUnavailableError(f"event log {self._folder}: {error}") from error

    def _open(self) -> None:
        if self._writer is None:  # an abandoned open may have finished
            self._writer = EventLogWriter(self._folder, segment_bytes=self._segment_bytes)

    def _write(self, records: Sequence[OutRecord]) -> None:
        if self._writer is None:
            raise EventLogError("it is not open")
        for record in records:
            log_record = LogRecord(0, self._writer.next_index, record.timestamp_ms, record.key, record.payload)
            self._writer.append(log_record)
        self._writer.flush()

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
