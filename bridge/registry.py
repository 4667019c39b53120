"""Which engine owns which worker stream."""

import threading

from bridge.context import BridgeCounters, EngineContext
from bridge.decoding.decoder import Decoder
from bridge.settings import BridgeSettings, EngineDefaults
from bridge.shared_sink import SharedSink
from bridge.stream.messages import Inboxes
from bridge.threads import DecodeThreads
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
