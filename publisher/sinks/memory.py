"""The sink of the embedded mode: a `MemoryLog` in the same process."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from kv_events.log.memory import MemoryLog
from kv_events.runtime.outages import Outage
from kv_events.schema import ResyncRequest
from publisher.sinks.base import OutRecord

logger = logging.getLogger(__name__)

_MAX_WAITING_REQUESTS = 256
"""Requests are repeated, so requests beyond this limit may be dropped."""


class MemorySink:
    """Appends to a `MemoryLog` and receives its requests."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log
        self.outage = Outage(logger, "the log in memory takes no records", "the log in memory takes records")
        self._requests: asyncio.Queue[ResyncRequest] = asyncio.Queue(_MAX_WAITING_REQUESTS)
        self._stop_listening: Callable[[], None] | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._stop_listening = self._log.listen(lambda request: self._forward(loop, request))

    async def send(self, records: Sequence[OutRecord]) -> None:
        """Append the records, which are durable for the life of the process."""
        for record in records:
            self._log.append(record.key, record.payload, record.timestamp_ms)

    async def stop(self) -> None:
        if self._stop_listening is not None:
            self._stop_listening()
            self._stop_listening = None

    async def requests(self) -> AsyncIterator[ResyncRequest]:
        while True:
            yield await self._requests.get()

    def _forward(self, loop: asyncio.AbstractEventLoop, request: ResyncRequest) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._take, request)

    def _take(self, request: ResyncRequest) -> None:
        if not self._requests.full():
            self._requests.put_nowait(request)
