"""Worker streams of a bridge: each has a translator, and a publisher for each of the engine's incarnations."""

from __future__ import annotations

import threading
from typing import NamedTuple

from kv_events.streams import StreamId
from publisher.bridge.counters import BridgeCounters
from publisher.bridge.runs import Run
from publisher.bridge.settings import BridgeSettings
from publisher.bridge.shared_sink import SharedSink
from publisher.bridge.translate import Identity, Translator, Unsaid
from publisher.publisher import EventPublisher
from publisher.settings import PublisherSettings

_OLD_DEADLINE_S = 0.2
"""For what an incarnation that is gone has still to say."""


class StreamStatus(NamedTuple):
    """One worker stream."""

    stream: StreamId
    block_size: int | None
    """None: no store has come yet."""
    epoch: int | None
    pages_held: int
    """Distinct pages."""
    names: int
    """Pages whose names are remembered."""


class WorkerStream:
    """What one worker's events become. `apply` and `restart` never wait; `settle` does what they left to do."""

    def __init__(self, registry: StreamRegistry, stream: StreamId, unsaid: Unsaid, counters: BridgeCounters) -> None:
        self.stream = stream
        self.is_replaced = False
        """Whether another engine was registered under this name: to be closed, and not to be used any more."""
        self._registry = registry
        self._unsaid = unsaid
        self._counters = counters
        self._unstarted: list[EventPublisher] = []
        self._retired: list[EventPublisher] = []
        self._spare: EventPublisher | None = None  # made before its incarnation's block size was known
        self._translator = self._new_translator()

    def apply(self, run: Run) -> None:
        """Take one run of events."""
        self._translator.apply(run)

    def clear(self) -> None:
        """Batches were lost: what the engine holds is not known any more."""
        self._translator.clear()

    def restart(self) -> None:
        """The engine was restarted: nothing of before holds. A new epoch says so at once, and begins with nothing; if
        the engine's first store shows another block size, that takes one more.
        """
        old = self._translator
        self._translator = self._new_translator()
        if old.publisher is None:
            return
        if old.publisher is self._spare:  # it has not been told anything yet
            self._translator.publisher = old.publisher
            return
        self._retired.append(old.publisher)
        if self._translator.publisher is None:
            self._spare = self._translator.publisher = self._make_publisher(old.publisher.block_size)

    async def settle(self) -> None:
        """Start the publisher that was made, close those of old incarnations."""
        while self._unstarted:
            await self._unstarted.pop(0).start()
        while self._retired:
            await self._retired.pop().aclose(_OLD_DEADLINE_S)

    async def close(self, deadline_s: float, *, clear: bool) -> None:
        """Publish what waits for at most that long. clear: and first of all, that nothing is held any more."""
        await self.settle()
        publisher = self._translator.publisher
        if clear:
            self._translator.clear()
        if publisher is not None:
            await publisher.aclose(deadline_s)
        self._registry.release(self)

    def status(self) -> StreamStatus:
        """Figures of this moment."""
        publisher = self._translator.publisher
        return StreamStatus(
            self.stream,
            self._translator.block_size,
            None if publisher is None else publisher.epoch,
            0 if publisher is None else publisher.stats().pages["held"],
            self._translator.num_names,
        )

    def _new_translator(self) -> Translator:
        return Translator(
            Identity(self.stream.model, self.stream.tenant, self._unsaid.lora_name, self._unsaid.cache_salt),
            self._counters,
            self._publisher_of_size,
            block_size=self._unsaid.block_size,
            name_pages=self._registry.settings.bridge_name_pages,
        )

    def _publisher_of_size(self, block_size: int) -> EventPublisher:
        """For a translator that has learned the block size."""
        spare, self._spare = self._spare, None
        if spare is not None:
            if spare.block_size == block_size:
                return spare
            self._retired.append(spare)
        return self._make_publisher(block_size)

    def _make_publisher(self, block_size: int) -> EventPublisher:
        publisher = self._registry.new_publisher(self.stream, block_size)
        self._unstarted.append(publisher)
        return publisher


class StreamRegistry:
    """Sees to it that every worker stream has one owner. Any thread may open one."""

    def __init__(self, settings: BridgeSettings, template: PublisherSettings, sink: SharedSink) -> None:
        """template: settings of all publishers, save for names and block sizes."""
        self.settings = settings
        self._template = template.model_dump()
        self._sink = sink
        self._streams: dict[StreamId, WorkerStream] = {}
        self._registered: set[StreamId] = set()
        self._lock = threading.Lock()  # guards both

    def open(
        self, stream: StreamId, unsaid: Unsaid, counters: BridgeCounters, *, is_registered: bool
    ) -> WorkerStream | None:
        """A stream of one's own; None: it has an owner. is_registered: the stream was asked for by name, and so is
        taken from whoever had it only because its events said so.
        """
        with self._lock:
            holder = self._streams.get(stream)
            if holder is not None:
                if not is_registered or stream in self._registered:
                    return None
                holder.is_replaced = True
            if is_registered:
                self._registered.add(stream)
            opened = self._streams[stream] = WorkerStream(self, stream, unsaid, counters)
            return opened

    def release(self, stream: WorkerStream) -> None:
        """A stream was closed."""
        with self._lock:
            if self._streams.get(stream.stream) is stream:
                del self._streams[stream.stream]
                self._registered.discard(stream.stream)

    def new_publisher(self, stream: StreamId, block_size: int) -> EventPublisher:
        """A publisher, not started."""
        own = {**stream._asdict(), "block_size": block_size}
        return EventPublisher(PublisherSettings(**{**self._template, **own}), self._sink.lane(stream))
