"""Reads a `MemoryLog` in this process."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from kv_events.log.memory import LogTruncatedError, MemoryLog
from kv_events.records import LogRecord
from kv_events.schema import ResyncRequest

_WAIT_S = 0.1


class MemorySource:
    """See `Source`."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log
        self._offset = 0
        self._arrival = asyncio.Event()
        self._stop_watching: Callable[[], None] = lambda: None

    async def start(self, positions: Mapping[int, int]) -> Mapping[int, int]:
        wanted, oldest = positions.get(0, 0), self._log.first_offset
        self._offset = wanted if oldest <= wanted <= self._log.next_offset else oldest
        loop, self._arrival = asyncio.get_running_loop(), asyncio.Event()
        arrival = self._arrival

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(arrival.set)

        self._stop_watching()
        self._stop_watching = self._log.watch(wake)
        return {0: self._offset}

    async def fetch(self) -> Sequence[LogRecord]:
        self._arrival.clear()
        if not (records := self._read()):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._arrival.wait(), _WAIT_S)
            records = self._read()
        return records

    async def ends(self) -> Mapping[int, int]:
        return {0: self._log.next_offset}

    async def request(self, request: ResyncRequest) -> None:
        self._log.request(request)

    async def stop(self) -> None:
        self._stop_watching()
        self._stop_watching = lambda: None

    def _read(self) -> Sequence[LogRecord]:
        try:
            records = self._log.read(self._offset)
        except LogTruncatedError as error:
            self._offset = error.first
            records = self._log.read(self._offset)
        if records:
            self._offset = records[-1].offset + 1
        return records
