"""An engine's own interface for event publishers, in front of ours."""

from __future__ import annotations

import atexit
import logging
import threading
from typing import Any

import msgspec

from bridge.counters import BridgeCounters
from bridge.decoding.decoder import Decoder
from bridge.decoding.runs import BadEvent, ClearedRun
from bridge.naming.identity import Identity
from bridge.naming.translator import Translator
from bridge.settings import BridgeSettings
from kv_events.errors import InvalidValueError
from kv_events.rate_limited_log import RateLimitedLog
from kv_events.schema import BATCHES_LOST
from publisher.publisher import EventPublisher
from publisher.settings import PublisherSettings
from publisher.sinks import create_sink

log = logging.getLogger(__name__)

_CLOSE_S = 2.0


class EnginePublisher:
    """Takes one rank's event batches on the scheduler's thread, and sends them from a thread of its own.

    `KVSIGHT_*` variables say where to: `KVSIGHT_KAFKA`, `KVSIGHT_MODEL`, `KVSIGHT_WORKER` at least. Batches are read
    as the bridge reads them off the wire, so every version's fields are understood, and nothing can be lost between
    engine and publisher: there is no sequence to break.
    """

    def __init__(
        self, *, data_parallel_rank: int | None = None, attn_dp_rank: int | None = None, **of_zmq: object
    ) -> None:
        """The rank as vLLM or as SGLang says it. of_zmq: options of the engine's config that mean sockets; not used.

        Raises InvalidValueError naming the variable, so that an engine with bad settings does not start.
        """
        rank = data_parallel_rank if data_parallel_rank is not None else attn_dp_rank
        self._settings = PublisherSettings(dp_rank=rank or 0, block_size=1)  # the first store says how large pages are
        if self._settings.with_tokens:
            raise InvalidValueError("KVSIGHT_WITH_TOKENS", True, "false: an engine's events pass without their tokens")
        self.counters = BridgeCounters()
        self._sink = create_sink(self._settings)
        self._publisher: EventPublisher | None = None
        self._replacing: threading.Thread | None = None
        self._limited_log = RateLimitedLog(log, f"engine {self._settings.stream.key}")
        self._translator = Translator(
            Identity(self._settings.model, self._settings.tenant),
            self.counters,
            self._limited_log,
            self._start_publisher,
            block_size=None,
            ledger_pages=self._settings.ledger_pages,
            name_pages=BridgeSettings().bridge_name_pages,
        )
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = Decoder()
        self._is_closed = False
        atexit.register(self.shutdown)  # SGLang does not call it
        log.info("kvsight publishes the cache events of %s", self._settings.stream.key)

    def publish(self, events: Any) -> None:
        """Take a batch, a msgspec struct of the engine. Never waits for the sink, never raises.

        What cannot be read costs all that is known of the engine's pages, unless it is a store: some may have gone.
        """
        if self._is_closed:
            return
        try:
            self._take(self._encoder.encode(events))
        except Exception:
            log.exception("a batch of events is lost; all pages of %s are given up", self._settings.stream.key)
            self._translator.clear()
            self._doubt(BATCHES_LOST)

    def shutdown(self) -> None:
        """Say that nothing is held any more, for at most two seconds. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.shutdown)
        try:
            self._translator.clear()
            if self._replacing is not None:
                self._replacing.join(_CLOSE_S)
            if self._publisher is not None:
                self._publisher.close(_CLOSE_S)
        except Exception:  # at the interpreter's end a sink may find no threads any more
            log.exception("the end of %s could not be told", self._settings.stream.key)

    def get_publisher_config(self) -> None:
        """vLLM asks for the addresses of sockets."""

    def describe_local_source(self, block_size: int) -> None:
        """SGLang asks for the addresses of sockets."""

    def _take(self, payload: bytes) -> None:
        self.counters.batches += 1
        for run, num_events in self._decoder.decode(payload).runs:
            self.counters.events += num_events
            self._translator.apply(run)
            if isinstance(run, ClearedRun):
                self._doubt("")
            elif isinstance(run, BadEvent):
                self._limited_log.warning("an event is left out: %s", run.reason)
                if run.may_remove:
                    self._doubt(BATCHES_LOST)

    def _doubt(self, doubt: str) -> None:
        if self._publisher is not None:
            self._publisher.set_doubt(doubt)

    def _start_publisher(self, block_size: int) -> EventPublisher:
        settings = PublisherSettings(**{**self._settings.model_dump(), "block_size": block_size})
        old, sink = self._publisher, self._sink if self._publisher is None else create_sink(settings)
        self._publisher = publisher = EventPublisher(settings, sink)
        if old is None:
            publisher.start_in_thread()
        else:
            self._replacing = threading.Thread(target=_replace, args=(old, publisher), daemon=True)
            self._replacing.start()
        return publisher


def _replace(old: EventPublisher, new: EventPublisher) -> None:
    """Start a publisher when another one is done with their sink's place. On a thread of its own."""
    try:
        old.close(_CLOSE_S)
        new.start_in_thread()
    except Exception:
        log.exception("a publisher of %s could not take over", new.stream.key)
