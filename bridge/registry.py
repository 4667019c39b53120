"""Which engine owns which worker stream, and the threads that decode and translate large messages."""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from bridge.context import BridgeCounters, EngineContext
from bridge.decoding.decoder import Decoder
from bridge.settings import BridgeSettings, EngineDefaults
from bridge.shared_sink import SharedSink
from bridge.stream.messages import Inboxes
from bridge.worker_stream import EngineState, WorkerStream
from kv_events.engine_wire import Locate, as_given
from kv_events.runtime.outages import RateLimitedLogger
from kv_events.streams import StreamId
from publisher.kernels.blocks import BlockTable
from publisher.publisher import EventPublisher
from publisher.settings import PublisherSettings


class StreamRegistry:
    """Ensures that every worker stream has one owner, and holds what the engines of a process share.

    Streams may be opened on any thread.
    """

    def __init__(
        self, settings: BridgeSettings, template: PublisherSettings, sink: SharedSink, locate: Locate = as_given
    ) -> None:
        """template: settings of all publishers, except for names and block sizes. locate: see `Fleet`."""
        self.settings = settings
        self.locate = locate
        self.decoder, self.threads, self.inboxes = Decoder(), DecodeThreads(), Inboxes()
        self._template = template
        self._sink = sink
        self._streams: dict[StreamId, WorkerStream] = {}
        self._registered: set[StreamId] = set()
        self._lock = threading.Lock()  # guards both

    def context(
        self, defaults: EngineDefaults, counters: BridgeCounters, limited_logger: RateLimitedLogger
    ) -> EngineContext:
        pages = self._template.ledger_pages, self.settings.bridge_name_pages
        return EngineContext(defaults, counters, limited_logger, self._new_publisher, *pages)

    def open(
        self, stream: StreamId, context: EngineContext, state: EngineState, *, is_registered: bool
    ) -> WorkerStream | None:
        """Open a stream. Returns None if it has another owner.

        is_registered: whether the stream was registered by name. Such an owner replaces one that opened the stream only
        because events named it.
        """
        with self._lock:
            holder = self._streams.get(stream)
            if holder is not None:
                if not is_registered or stream in self._registered:
                    return None
                holder.is_replaced = True
            if is_registered:
                self._registered.add(stream)
            opened = self._streams[stream] = WorkerStream(stream, context, state)
            return opened

    def release(self, stream: WorkerStream) -> None:
        with self._lock:
            if self._streams.get(stream.stream) is stream:
                del self._streams[stream.stream]
                self._registered.discard(stream.stream)

    def _new_publisher(self, stream: StreamId, block_size: int, blocks: BlockTable | None) -> EventPublisher:
        own = {**stream._asdict(), "block_size": block_size}
        # names and sizes were checked when the engine was registered
        return EventPublisher(self._template.model_copy(update=own), self._sink.sink_of(stream), blocks)


_T = TypeVar("_T")

_MAX_THREADS = 4
_SMALL_BYTES = 16 * 1024
"""Less than this is processed faster than a thread can be woken."""
_TURN_S, _TURN_AT_ONCE_S = 0.01, 0.002
_NICENESS = 10
"""Added to the process's own. Everything that the threads produce waits for the event loop, so the loop goes first."""


class DecodeThreads:
    """A pool of at most four threads, which start on demand. The kernels release the GIL, and engines take turns.

    Work is done in steps. Work that is no longer wanted ends after a step.
    """

    def __init__(self) -> None:
        num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="bridge", initializer=_lower_priority)

    async def run(self, num_bytes: int, work: Generator[None, None, _T]) -> _T:
        """Do work, which yields after each step, and return its result. num_bytes: how much it is.

        Little work is done at once, as far as it takes little time. Steps may run on several threads. If
        this task is cancelled, its current steps still end; the rest is left out.
        """
        if num_bytes <= _SMALL_BYTES and (result := _some_steps(work, _TURN_AT_ONCE_S)):
            return result[0]
        while True:
            turn = asyncio.get_running_loop().run_in_executor(self._pool, _some_steps, work, _TURN_S)
            try:
                result = await asyncio.shield(turn)
            except asyncio.CancelledError:
                await asyncio.wait([turn])
                raise
            if result:
                return result[0]

    def close(self) -> None:
        """Release the threads. `run` must not be called afterwards."""
        self._pool.shutdown(wait=False)


def _some_steps(work: Generator[None, None, _T], turn_s: float) -> tuple[_T] | None:
    """Do a step, and more until `turn_s` has passed. Returns the result in a tuple, or None if work is left."""
    until = time.monotonic() + turn_s
    try:
        next(work)
        while time.monotonic() < until:
            next(work)
    except StopIteration as end:
        return (end.value,)
    return None


def _lower_priority() -> None:
    """Let the event loop's thread win where both compete for a processor."""
    if sys.platform == "linux":  # elsewhere threads have no niceness of their own
        own = threading.get_native_id()
        with suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + _NICENESS)
