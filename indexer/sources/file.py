"""Records of an event log in a folder, also while somebody appends to it. There is no way back to the publishers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

from indexer.sources.base import SourceUnavailableError
from kv_events.event_log import EventLogError, EventLogReader
from kv_events.records import LogRecord
from kv_events.schema import ResyncRequest

_POLL_S = 0.05
_MAX_RECORDS = 500


class FileSource:
    """See `Source`. One partition, whose offsets are the records' indices in the log."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader: EventLogReader | None = None
        self._next = 0

    async def start(self, positions: Mapping[int, int]) -> Mapping[int, int]:
        try:
            self._reader = EventLogReader(self._folder)
        except EventLogError as error:
            raise SourceUnavailableError(str(error)) from error
        self._next = max(positions.get(0, 0), self._reader.first_index)
        return {0: self._next}

    async def fetch(self) -> Sequence[LogRecord]:
        records = self._read()
        if not records:
            await asyncio.sleep(_POLL_S)
            records = self._read()
        return records

    async def ends(self) -> Mapping[int, int]:
        return {0: self._reader.next_index} if self._reader is not None else {}

    async def request(self, request: ResyncRequest) -> None:
        """A file has no publisher at its other end."""

    async def stop(self) -> None:
        self._reader = None

    def _read(self) -> Sequence[LogRecord]:
        if self._reader is None:
            return []
        records = [
            record._replace(partition=0, offset=index)
            for index, record in islice(self._reader.read(self._next), _MAX_RECORDS)
        ]
        self._next += len(records)
        return records
