"""Our publisher behind the publisher interface of vLLM and SGLang."""

import atexit
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from bridge.context import BridgeCounters, EngineContext
from bridge.decoding.decoder import Decoder
from bridge.decoding.events import InvalidEvent
from bridge.settings import BridgeSettings, EngineDefaults
from bridge.worker_stream import EngineState, WorkerStream
from kv_events.errors import InvalidValueError
from kv_events.runtime.outages import RateLimitedLogger
from kv_events.streams import StreamId
from publisher.kernels.blocks import BlockTable
from publisher.publisher import EventPublisher
from publisher.settings import PublisherSettings
from publisher.sinks import create_sink
from publisher.sinks.base import Sink

logger = logging.getLogger(__name__)

_CLOSE_S = 2.0


class EnginePublisher:
    """Accepts one rank's event batches on the scheduler's thread and sends them from a thread of its own.

    Configured by `KVSIGHT_*` variables, at least `KVSIGHT_KAFKA`, `KVSIGHT_MODEL` and `KVSIGHT_WORKER`. Batches are
    decoded as the bridge decodes them from the wire, so the fields of every version are understood. Nothing is lost
    between engine and publisher, because there is no socket.
    """

    def __init__(
        self, *, data_parallel_rank: int | None = None, attn_dp_rank: int | None = None, **of_zmq: object
    ) -> None:
        """data_parallel_rank: vLLM's name of the rank. attn_dp_rank: SGLang's. of_zmq: options for sockets; ignored.
        Raises InvalidValueError naming the variable, so that an engine with bad settings does not start.
        """
        rank = data_parallel_rank if data_parallel_rank is not None else attn_dp_rank
        self._settings = PublisherSettings(dp_rank=rank or 0, block_size=1)  # the first store tells the real block size
        if self._settings.with_tokens:
            raise InvalidValueError("KVSIGHT_WITH_TOKENS", True, "false: the plug-in does not forward tokens")
        self.counters = BridgeCounters()
        self._sink: Sink | None = create_sink(self._settings)  # until the first publisher takes it
        self._replacing: threading.Thread | None = None
        self._limited_logger = RateLimitedLogger(logger, f"engine {self._settings.stream.key}")
        pages = self._settings.ledger_pages, BridgeSettings().bridge_name_pages
        context = EngineContext(EngineDefaults(), self.counters, self._limited_logger, self._new_publisher, *pages)
        self._stream = WorkerStream(self._settings.stream, context, EngineState(is_receiving=True))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = Decoder()
        self._is_closed = False
        atexit.register(self.shutdown)  # SGLang does not call it
        self._end_metrics: Callable[[], None] = lambda: None
        if self._settings.metrics_port is not None:
            self._serve_metrics(self._settings.metrics_port + self._settings.dp_rank)
        logger.info("kvsight publishes the cache events of %s", self._settings.stream.key)

    def publish(self, events: Any) -> None:
        """Publish a batch, a msgspec struct of the engine. Never waits for the sink, never raises.

        If an event cannot be decoded, all pages of the engine are dropped, because it may have removed some. Invalid
        stores are only left out.
        """
        if self._is_closed:
            return
        try:
            self._take(self._encoder.encode(events))
        except Exception:
            logger.exception("a batch of events is lost; all pages of %s are dropped", self._settings.stream.key)
            self._stream.drop_all_pages()

    def shutdown(self) -> None:
        """Publish that the engine holds no pages, for at most two seconds. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.shutdown)
        try:
            self._stream.translator.clear()
            if self._replacing is not None:
                self._replacing.join(_CLOSE_S)
            deadline = time.monotonic() + _CLOSE_S
            for publisher in self._stream.translator.publishers:
                publisher.close(max(0.0, deadline - time.monotonic()))
            self._end_metrics()
        except Exception:  # at interpreter exit a sink may be unable to start threads
            logger.exception("the end of %s could not be published", self._settings.stream.key)

    def get_publisher_config(self) -> None:
        """Called by vLLM for the addresses of sockets. There are none."""

    def describe_local_source(self, block_size: int) -> None:
        """Called by SGLang for the addresses of sockets. There are none."""

    def _take(self, payload: bytes) -> None:
        self.counters.batches += 1
        for run, num_events in self._decoder.decode(payload).runs:
            self.counters.events += num_events
            self._stream.apply(run)
            if isinstance(run, InvalidEvent):
                self._limited_logger.warning("an event is left out: %s", run.reason)
        for _ in self._stream.end_batch():
            pass
        self._start_and_close_publishers()

    def _serve_metrics(self, port: int) -> None:
        """Serve the publisher's metrics. An engine runs without them if the port is taken."""
        from publisher.metrics import PublisherMetrics, serve_metrics

        metrics = PublisherMetrics(lambda: self._stream.translator.publishers[:1])
        try:
            self._end_metrics = serve_metrics(port, metrics)
        except OSError as error:
            logger.warning("no metrics of %s on port %d: %s", self._settings.stream.key, port, error)

    def _new_publisher(self, stream: StreamId, block_size: int, blocks: BlockTable | None) -> EventPublisher:
        settings = self._settings.model_copy(update={**stream._asdict(), "block_size": block_size})
        sink, self._sink = self._sink or create_sink(settings), None
        return EventPublisher(settings, sink, blocks)

    def _start_and_close_publishers(self) -> None:
        """Start new publishers: at once, or if they have predecessors, on another thread after these are closed."""
        (unstarted, retired), before = self._stream.take_publishers(), self._replacing
        if retired or (unstarted and before is not None and before.is_alive()):
            arguments = (self._settings.stream, retired, unstarted, before)
            self._replacing = threading.Thread(target=_replace, args=arguments, daemon=True)
            self._replacing.start()
        else:
            for publisher in unstarted:
                publisher.start_in_thread()


def _replace(
    stream: StreamId, retired: list[EventPublisher], unstarted: list[EventPublisher], before: threading.Thread | None
) -> None:
    """Close publishers, then start others. before: a thread that may still start what this one closes."""
    try:
        if before is not None:
            before.join()
        for publisher in retired:
            publisher.close(_CLOSE_S, ends_stream=publisher.stream != stream)
        for publisher in unstarted:
            publisher.start_in_thread()
    except Exception:
        logger.exception("a publisher of %s could not take over", stream.key)
