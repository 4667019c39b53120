"""Our publisher behind the publisher interface of vLLM and SGLang."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from bridge.counters import BridgeCounters
from bridge.decoding.decoder import Decoder
from bridge.decoding.events import BadEvent, ClearedRun
from bridge.hashes.event_translator import EventTranslator
from bridge.hashes.identity import StreamIdentity
from bridge.settings import BridgeSettings
from kv_events.errors import InvalidValueError
from kv_events.runtime.rate_limited_logger import RateLimitedLogger
from kv_events.schema import BATCHES_LOST
from kv_events.streams import group_model
from publisher.kernels.blocks import BlockTable
from publisher.publisher import EventPublisher
from publisher.settings import PublisherSettings
from publisher.sinks import create_sink

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
        self._sink = create_sink(self._settings)
        self._publisher: EventPublisher | None = None
        self._replacing: threading.Thread | None = None
        self._limited_logger = RateLimitedLogger(logger, f"engine {self._settings.stream.key}")
        self._translator = EventTranslator(
            StreamIdentity(self._settings.model, self._settings.tenant),
            self.counters,
            self._limited_logger,
            self._start_publisher,
            self._drop_publisher,
            block_size=None,
            ledger_pages=self._settings.ledger_pages,
            name_pages=BridgeSettings().bridge_name_pages,
        )
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = Decoder()
        self._is_closed = False
        self._degraded_reason = ""
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
            self._translator.clear()
            self._set_degraded_reason(BATCHES_LOST)

    def shutdown(self) -> None:
        """Publish that the engine holds no pages, for at most two seconds. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.shutdown)
        try:
            self._translator.clear()
            if self._replacing is not None:
                self._replacing.join(_CLOSE_S)
            deadline = time.monotonic() + _CLOSE_S
            for publisher in self._translator.publishers:
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
            self._translator.apply(run)
            if isinstance(run, ClearedRun):
                self._set_degraded_reason("")
            elif isinstance(run, BadEvent):
                self._limited_logger.warning("an event is left out: %s", run.reason)
                if run.may_remove:
                    self._set_degraded_reason(BATCHES_LOST)
        self._translator.end_batch()
        self._set_degraded_reason(self._degraded_reason)

    def _set_degraded_reason(self, degraded_reason: str) -> None:
        self._degraded_reason = degraded_reason
        for publisher in self._translator.publishers:
            publisher.set_degraded_reason(degraded_reason or self._translator.problem)

    def _serve_metrics(self, port: int) -> None:
        """Serve the publisher's metrics. An engine runs without them if the port is taken."""
        from publisher.metrics import PublisherMetrics, serve_metrics

        metrics = PublisherMetrics(lambda: [] if self._publisher is None else [self._publisher])
        try:
            self._end_metrics = serve_metrics(port, metrics)
        except OSError as error:
            logger.warning("no metrics of %s on port %d: %s", self._settings.stream.key, port, error)

    def _start_publisher(self, block_size: int, group: str, blocks: BlockTable | None) -> EventPublisher:
        settings = PublisherSettings(**{**self._settings.model_dump(), "block_size": block_size})
        if group:
            settings = settings.model_copy(update={"model": group_model(settings.model, group)})
            publisher = EventPublisher(settings, create_sink(settings), blocks)
            publisher.start_in_thread()
            return publisher
        old, sink = self._publisher, self._sink if self._publisher is None else create_sink(settings)
        self._publisher = publisher = EventPublisher(settings, sink, blocks)
        if old is None:
            publisher.start_in_thread()
        else:
            self._replacing = threading.Thread(target=_replace, args=(old, publisher), daemon=True)
            self._replacing.start()
        return publisher

    def _drop_publisher(self, publisher: EventPublisher) -> None:
        if publisher.stream != self._settings.stream:  # its successor closes the worker's own
            threading.Thread(target=publisher.close, args=(_CLOSE_S,), daemon=True).start()


def _replace(old: EventPublisher, new: EventPublisher) -> None:
    """Start a publisher once the old one has closed its sink. Runs on a thread of its own."""
    try:
        old.close(_CLOSE_S, goodbye=False)
        new.start_in_thread()
    except Exception:
        logger.exception("a publisher of %s could not take over", new.stream.key)
