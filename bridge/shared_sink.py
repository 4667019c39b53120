"""One sink for many publishers: a process has one broker connection or event log, not one for each worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence

from kv_events.runtime.supervised import cancel, keep_running
from kv_events.schema import ResyncRequest
from kv_events.streams import StreamId
from publisher.sinks.base import OutRecord, Sink, SinkUnavailableError

logger = logging.getLogger(__name__)

_MAX_WAITING_REQUESTS = 256
"""Requests repeat, and a second one adds nothing to one that waits. More than these are dropped."""


class _Part:
    def __init__(self, records: Sequence[OutRecord]) -> None:
        self.records = records
        self.is_done = False
        self.error: Exception | None = SinkUnavailableError("sending was interrupted")


class SharedSink:
    """Owns the real sink. Each publisher has a `StreamSink`; what these send at the same time goes out in one call."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.outage = sink.outage
        self._sinks: dict[str, StreamSink] = {}  # by key of the stream
        self._lock = asyncio.Lock()  # one call of the sink at a time
        self._waiting: list[_Part] = []
        self._listener: asyncio.Task[None] | None = None

    def sink_of(self, stream: StreamId) -> StreamSink:
        """Make a sink for one publisher. It receives the stream's requests, instead of any older one."""
        sink = self._sinks[stream.key] = StreamSink(self, stream.key)
        return sink

    async def stop(self) -> None:
        """Stop the real sink. All publishers must be closed."""
        await cancel(self._listener)
        self._listener = None
        await self._sink.stop()

    async def open(self) -> None:
        """Start the real sink if it is not started yet. Raises SinkUnavailableError."""
        async with self._lock:
            if self._listener is None:
                await self._sink.start()
                listening = keep_running(self._forward_requests, "bridge-control", logger)
                self._listener = asyncio.create_task(listening, name="bridge-control")

    async def send(self, records: Sequence[OutRecord]) -> None:
        """Send records. The first caller also sends for those that wait. Raises what the sink raises."""
        part = _Part(records)
        self._waiting.append(part)
        async with self._lock:
            if not part.is_done:
                parts, self._waiting = self._waiting, []
                try:
                    await self._send_together(parts)
                finally:
                    for each in parts:
                        each.is_done = True
        if part.error is not None:
            raise part.error

    def forget(self, sink: StreamSink) -> None:
        if self._sinks.get(sink.key) is sink:
            del self._sinks[sink.key]

    async def _send_together(self, parts: list[_Part]) -> None:
        outcome: Exception | None = None
        try:
            await self._sink.send([record for part in parts for record in part.records])
        except SinkUnavailableError as error:
            outcome = error
        except Exception as error:  # noqa: BLE001  (raised by the caller whose records caused it)
            if len(parts) > 1:
                for part in parts:  # one by one, so that only the culprit fails
                    await self._send_together([part])
                return
            outcome = error
        for part in parts:
            part.error = outcome

    async def _forward_requests(self) -> None:
        async for request in self._sink.requests():
            if request is None:
                for sink in self._sinks.values():
                    sink.take(None)
            elif (wanted := self._sinks.get(request.stream)) is not None:
                wanted.take(request)


class StreamSink:
    """A publisher's share of a `SharedSink`. See `Sink`."""

    def __init__(self, shared: SharedSink, key: str) -> None:
        self.key = key
        self.outage = shared.outage
        self._shared = shared
        self._requests: asyncio.Queue[ResyncRequest | None] = asyncio.Queue(_MAX_WAITING_REQUESTS)

    async def start(self) -> None:
        await self._shared.open()

    async def send(self, records: Sequence[OutRecord]) -> None:
        await self._shared.send(records)

    async def stop(self) -> None:
        """Leave the real sink running for the other streams."""
        self._shared.forget(self)

    async def requests(self) -> AsyncIterator[ResyncRequest | None]:
        """Yield resync requests for this stream, and None for each message that is not a request."""
        while True:
            yield await self._requests.get()

    def take(self, request: ResyncRequest | None) -> None:
        """Queue a request, or None for a message that is not one."""
        with contextlib.suppress(asyncio.QueueFull):
            self._requests.put_nowait(request)
