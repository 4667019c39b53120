"""Reads a `MemoryLog` in this process."""

from collections.abc import Mapping, Sequence

from kv_events.log.memory import LogTruncatedError, LogWatch, MemoryLog
from kv_events.records import LogRecord
from kv_events.schema import ResyncRequest

_WAIT_S = 0.1


class MemorySource:
    """See `Source`."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log
        self._offset = 0
        self._watch: LogWatch | None = None

    async def start(self, positions: Mapping[int, int]) -> Mapping[int, int]:
        wanted, oldest = positions.get(0, 0), self._log.first_offset
        self._offset = wanted if oldest <= wanted <= self._log.next_offset else oldest
        self._watch = self._log.watch()
        return {0: self._offset}

    async def fetch(self) -> Sequence[LogRecord]:
        records = self._read()
        if not records and self._watch is not None:
            await self._watch.wait(_WAIT_S)
            records = self._read()
        return records

    async def ends(self) -> Mapping[int, int]:
        return {0: self._log.next_offset}

    async def request(self, request: ResyncRequest) -> None:
        self._log.request(request)

    async def stop(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _read(self) -> Sequence[LogRecord]:
        try:
            records = self._log.read(self._offset)
        except LogTruncatedError as error:
            self._offset = error.first
            records = self._log.read(self._offset)
        if records:
            self._offset = records[-1].offset + 1
        return records
