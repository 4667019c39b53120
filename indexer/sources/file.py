"""Reads an event log in a folder, also while a writer appends to it. There is no channel back to publishers."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

from indexer.sources.base import SourceUnavailableError
from kv_events.errors import os_error_text
from kv_events.log.event_log import EventLogCorruptedError, EventLogError, EventLogReader
from kv_events.log.memory import LogTruncatedError
from kv_events.records import LogRecord
from kv_events.schema import ResyncRequest

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_MAX_RECORDS = 500


class FileSource:
    """See `Source`. One partition, whose offsets are the records' indices in the log."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader: EventLogReader | None = None
        self._next = 0
        self._is_reading = asyncio.Lock()  # the reader supports one thread at a time

    async def start(self, positions: Mapping[int, int]) -> Mapping[int, int]:
        try:
            self._reader = EventLogReader(self._folder)
            oldest, end = self._reader.first_index, self._reader.next_index
        except (EventLogError, OSError) as error:
            raise _unavailable(error) from error
        wanted = positions.get(0, 0)
        self._next = wanted if oldest <= wanted <= end else oldest
        return {0: self._next}

    async def fetch(self) -> Sequence[LogRecord]:
        async with self._is_reading:
            records = await asyncio.to_thread(self._read)
        if not records:
            await asyncio.sleep(_POLL_S)
        return records

    async def ends(self) -> Mapping[int, int]:
        if self._reader is None:
            return {}
        try:
            async with self._is_reading:
                return {0: await asyncio.to_thread(lambda reader: reader.next_index, self._reader)}
        except EventLogCorruptedError:
            return {0: self._next}
        except (EventLogError, OSError) as error:
            raise _unavailable(error) from error

    async def request(self, request: ResyncRequest) -> None:
        """Do nothing: a file has no channel back to its publishers."""

    async def stop(self) -> None:
        self._reader = None

    def _read(self) -> Sequence[LogRecord]:
        if self._reader is None:
            return []
        records: list[LogRecord] = []
        try:
            for index, record in islice(self._reader.read(self._next), _MAX_RECORDS):
                records.append(record._replace(partition=0, offset=index))
        except LogTruncatedError as error:
            self._next = error.first
        except EventLogCorruptedError as error:
            self._skip_damage(error, len(records))
        except (EventLogError, OSError) as error:
            raise _unavailable(error) from error
        if records:
            self._next = max(self._next, records[-1].offset + 1)
        return records

    def _skip_damage(self, error: EventLogCorruptedError, num_read: int) -> None:
        """Continue after damaged records. The views detect the loss themselves."""
        if error.resume is None and not num_read:
            raise SourceUnavailableError(str(error)) from error
        if error.resume is not None:
            logger.warning("going on at record %d: %s", error.resume.record_index, error)
            self._next = error.resume.record_index


def _unavailable(error: EventLogError | OSError) -> SourceUnavailableError:
    return SourceUnavailableError(os_error_text(error) if isinstance(error, OSError) else str(error))
