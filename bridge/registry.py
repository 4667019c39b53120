"""Worker streams of a bridge: each has a translator, and a publisher for each of the engine's incarnations."""

from __future__ import annotations

import threading
from typing import NamedTuple

from bridge.counters import BridgeCounters
from bridge.decoding.runs import ClearedRun, Run
from bridge.naming.identity import Identity, Unsaid
from bridge.naming.translator import Translator
from bridge.settings import BridgeSettings
from bridge.shared_sink import SharedSink
from kv_events.rate_limited_log import RateLimitedLog
from kv_events.schema import BATCHES_LOST, ENGINE_UNHEARD
from kv_events.streams import StreamId
from publisher.publisher import EventPublisher, PublisherStats
from publisher.settings import PublisherSettings

_OLD_DEADLINE_S = 0.2
"""For what an incarnation that is gone has still to say."""


class StreamStatus(NamedTuple):
    """One worker stream."""

    stream: StreamId
    block_size: int | None
    """None: no store has come yet."""
    epoch: int | None
    publisher: PublisherStats | None
    """None: no store has come yet."""
    names: int
    """Pages whose names are remembered."""

    @property
    def pages_held(self) -> int:
        """Distinct pages."""
        return 0 if self.publisher is None else self.publisher.pages["held"]


class WorkerStream:
    """What one worker's events become. `apply` and `restart` never wait; `settle` does what they left to do."""

    def __init__(
        self,
        registry: StreamRegistry,
        stream: StreamId,
        unsaid: Unsaid,
        counters: BridgeCounters,
        limited_log: RateLimitedLog,
    ) -> None:
        self.stream = stream
        self.is_replaced = False
        """Whether another engine was registered under this name: to be closed, and not to be used any more."""
        self._registry = registry
        self._unsaid = unsaid
        self._counters = counters
        self._limited_log = limited_log
        self._unstarted: list[EventPublisher] = []
        self._retired: list[EventPublisher] = []
        self._spare: EventPublisher | None = None  # made before its incarnation's block size was known
        self._is_engine_heard = False
        self._is_incomplete = False  # the engine may hold more than its events since then said
        self._translator = self._new_translator()
        self._tell_doubt()

    @property
    def size_doubt(self) -> str:
        """See `Translator.size_doubt`."""
        return self._translator.size_doubt

    def apply(self, run: Run) -> None:
        """Take one run of events."""
        before = self._translator.publisher
        self._translator.apply(run)
        if before is not None and before is not self._translator.publisher:  # the block size is another one
            self._retired.append(before)
        if isinstance(run, ClearedRun):
            self._is_incomplete = False
        self._tell_doubt()

    def hear(self, is_engine_heard: bool) -> None:
        """Whether the engine is heard at present; at first it is not."""
        self._is_engine_heard = is_engine_heard
        self._tell_doubt()

    def begin_late(self) -> None:
        """Batches before the next one are not to be had: the engine may hold more than is known until it clears all."""
        self._is_incomplete = True
        self._tell_doubt()

    def lose(self) -> None:
        """Batches were lost: what the engine holds is not known any more."""
        self._translator.clear()
        self.begin_late()

    def restart(self, *, is_certain: bool) -> None:
        """The engine was restarted: nothing of before holds. A new epoch says so at once, and begins with nothing; if
        the engine's first store shows another block size, that takes one more. is_certain: false: maybe it was not,
        and goes on to speak of pages of which it said before what they are.
        """
        old = self._translator.publisher
        self._is_incomplete = False
        if old is not None and old is not self._spare:  # which has not been told anything yet
            self._retired.append(old)
            if is_certain:
                self._forget(old.block_size)
            else:
                self._translator.begin_anew(self._make_publisher(old.block_size))
        self._tell_doubt()

    async def settle(self) -> None:
        """Start the publisher that was made, close those of old incarnations."""
        while self._unstarted:
            await self._unstarted.pop(0).start()
        while self._retired:
            await self._retired.pop().aclose(_OLD_DEADLINE_S)

    async def close(self, deadline_s: float, *, clear: bool) -> None:
        """Publish what waits for at most that long. clear: and first of all, that nothing is held any more."""
        try:
            await self.settle()
            publisher = self._translator.publisher
            if clear:
                self._translator.clear()
            if publisher is not None:
                await publisher.aclose(deadline_s)
        finally:
            self._registry.release(self)

    def status(self) -> StreamStatus:
        """Figures of this moment."""
        publisher = self._translator.publisher
        return StreamStatus(
            self.stream,
            self._translator.block_size,
            None if publisher is None else publisher.epoch,
            None if publisher is None else publisher.stats(),
            self._translator.num_names,
        )

    def _tell_doubt(self) -> None:
        doubt = BATCHES_LOST if self._is_incomplete else self._translator.size_doubt
        if self._translator.publisher is not None:
            self._translator.publisher.set_doubt(doubt if self._is_engine_heard else ENGINE_UNHEARD)

    def _forget(self, block_size: int) -> None:
        """Begin with a new translator, and a publisher of a page size that has still to prove right."""
        self._translator = self._new_translator()
        if self._translator.publisher is None:
            self._spare = self._translator.publisher = self._make_publisher(block_size)

    def _new_translator(self) -> Translator:
        return Translator(
            Identity(self.stream.model, self.stream.tenant, self._unsaid.lora_name, self._unsaid.cache_salt),
            self._counters,
            self._limited_log,
            self._publisher_of_size,
            block_size=self._unsaid.block_size,
            ledger_pages=self._registry.ledger_pages,
            name_pages=self._registry.settings.bridge_name_pages,
        )

    def _publisher_of_size(self, block_size: int) -> EventPublisher:
        """For a translator that has learned the block size."""
        spare, self._spare = self._spare, None
        is_fit = spare is not None and spare.block_size == block_size
        return spare if spare is not None and is_fit else self._make_publisher(block_size)

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
        self.ledger_pages = template.ledger_pages
        self._sink = sink
        self._streams: dict[StreamId, WorkerStream] = {}
        self._registered: set[StreamId] = set()
        self._lock = threading.Lock()  # guards both

    def open(
        self,
        stream: StreamId,
        unsaid: Unsaid,
        counters: BridgeCounters,
        limited_log: RateLimitedLog,
        *,
        is_registered: bool,
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
            opened = self._streams[stream] = WorkerStream(self, stream, unsaid, counters, limited_log)
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
