"""The file sink: an event log in a folder."""

import logging
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

from kv_events.errors import check_type
from kv_events.log.event_log import SEGMENT_BYTES, EventLogWriter, WriterThread
from kv_events.records import LogRecord
from kv_events.runtime.outages import Outage
from kv_events.schema import ResyncRequest
from publisher.sinks.base import OutRecord, SinkUnavailableError, no_requests

logger = logging.getLogger(__name__)


class FileSink:
    """Appends to an event log. `send` returns when records would survive a power failure. Has no control channel."""

    def __init__(self, folder: str | Path) -> None:
        """Raises InvalidValueError if `folder` is not a path."""
        check_type("folder", folder, str | Path)
        self._folder = Path(folder)
        self.outage = Outage(logger, f"event log {folder} takes no records", f"event log {folder} takes records")
        self._log: WriterThread | None = None

    async def start(self) -> None:
        """Open the log. A log that another writer has open counts as unavailable."""
        self._log = self._log or WriterThread(self._folder, SEGMENT_BYTES, SinkUnavailableError)
        await self._log.run(lambda _writer: None)

    async def send(self, records: Sequence[OutRecord]) -> None:
        """Write and sync in a thread. A full disk counts as unavailable."""
        if self._log is None:
            raise SinkUnavailableError(f"event log {self._folder} is not open")
        await self._log.run(partial(_write, records))

    async def stop(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            await log.stop()

    def requests(self) -> AsyncIterator[ResyncRequest | None]:
        return no_requests()


def _write(records: Sequence[OutRecord], writer: EventLogWriter) -> None:
    for record in records:
        writer.append(LogRecord(0, writer.next_index, record.timestamp_ms, record.key, record.payload))
    writer.flush()
