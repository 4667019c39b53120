"""One address of an engine: the task that reads it, its engine streams and its status."""

import asyncio
import logging
import time
from collections import OrderedDict
from typing import Any, NamedTuple

import zmq
import zmq.asyncio

from bridge.context import BridgeCounters
from bridge.registry import StreamRegistry
from bridge.republisher import Republisher
from bridge.settings import EngineSettings, is_name
from bridge.stream.engine_stream import EngineStream
from bridge.stream.rank_streams import Missed, RankStreams
from bridge.stream.replay import ReplayClient
from bridge.stream.subscriber import ConnectionState, Subscriber
from bridge.worker_stream import StreamStatus
from kv_events.engine_wire import parse_topic
from kv_events.errors import KvsightError, shorten
from kv_events.runtime.outages import RateLimitedLogger
from kv_events.runtime.supervised import cancel, keep_running
from kv_events.streams import StreamId

logger = logging.getLogger(__name__)

_LEAVING_DEADLINE_S = 0.2


class AddressError(KvsightError):
    """An address cannot be used now."""


class EngineStatus(NamedTuple):
    engine: EngineSettings
    state: ConnectionState
    failure: str | None
    """Why it is not read or not published at present; None if all is well."""
    warning: str | None
    """What a failed replay costs, while the engine is read all the same; None if no replay failed."""
    silent_s: float
    """Time since the last message."""
    down_s: float | None
    """Time without a connection; None while there is one."""
    missed: dict[str, Missed]
    """Worker -> batches that cannot be recovered."""
    streams: list[StreamStatus]
    counters: BridgeCounters


class EngineConnection:
    """Owns the task that reads one rank, and its engine streams.

    A task that fails starts again, see `keep_running`.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        engine: EngineSettings,
        registry: StreamRegistry,
        republisher: Republisher | None = None,
    ) -> None:
        """republisher: started; stopped with the connection."""
        self.engine = engine
        self.counters = BridgeCounters()
        self._context = context
        self._registry = registry
        self._limited_logger = RateLimitedLogger(logger, f"engine {engine.worker or engine.endpoint}")
        self._failure: str | None = None
        self._engine_streams: OrderedDict[str, EngineStream] = OrderedDict()  # by topic; least recently heard first
        self._leaving: list[EngineStream] = []  # to be closed
        self._tidy_at = 0.0
        self._republisher = republisher
        if engine.worker is not None and engine.model is not None:  # the only one
            self._engine_streams[""] = self._new_stream(engine.model, engine.worker)
        self._subscriber = self._new_subscriber()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        name = f"bridge:{self.engine.worker or self.engine.endpoint}"
        self._task = asyncio.create_task(keep_running(self._read, name, logger, self._note_failure), name=name)

    async def stop(self, deadline_s: float, *, clear: bool) -> None:
        """Stop reading and publish what is queued. clear: also publish that the engine holds no pages."""
        await cancel(self._task)
        streams = [*self._engine_streams.values(), *self._leaving]
        await asyncio.gather(*(each.ranks.close(deadline_s, clear=clear) for each in streams))
        if self._republisher is not None:
            if clear:
                self._republisher.clear()
            await self._republisher.stop()

    def status(self) -> EngineStatus:
        engine_streams = list(self._engine_streams.values())
        streams = [status for each in engine_streams for status in each.ranks.status()]
        publishers = [stream.publisher for stream in streams if stream.publisher is not None]
        failures = [self._failure, self._subscriber.failure]
        failures += [each.failure for each in engine_streams]
        failures += [each.failure for each in publishers]
        return EngineStatus(
            self.engine,
            ConnectionState.FAILED if self._failure is not None else self._subscriber.state,
            next(filter(None, failures), None),
            next((each.replay_failure for each in engine_streams if each.replay_failure), None),
            time.monotonic() - self._subscriber.last_message_at,
            None if self._subscriber.state is ConnectionState.CONNECTED else self._subscriber.down_s,
            {each.ranks.worker: each.ranks.missed for each in engine_streams if each.ranks.missed is not None},
            streams,
            self.counters.copy(),
        )

    async def _read(self) -> None:
        """Read until cancelled."""
        self._failure = None
        self._subscriber = self._new_subscriber()
        try:
            await self._subscriber.run()
        except zmq.ZMQError as error:
            raise AddressError(f"{self.engine.endpoint}: {error}") from error

    def _note_failure(self, error: Exception) -> None:
        self._failure = str(error) if isinstance(error, AddressError) else repr(error)
        for engine_stream in self._engine_streams.values():
            engine_stream.set_receiving(False)

    def _new_subscriber(self) -> Subscriber:
        return Subscriber(
            self._context,
            self.engine,
            self._registry,
            self.counters,
            self._limited_logger,
            self._stream_of_topic,
            lambda: list(self._engine_streams.values()),
            self._tidy_up,
        )

    def _stream_of_topic(self, topic: str) -> EngineStream | None:
        """The engine stream of a topic. None if the topic names no valid worker and model, or one too many."""
        key = "" if self.engine.worker is not None else topic
        engine_stream = self._engine_streams.get(key)
        if engine_stream is not None:
            self._engine_streams.move_to_end(key)
        if engine_stream is None and self.engine.worker is None:
            pod, model = parse_topic(topic)
            model = self.engine.model or model or ""
            if not (is_name(model) and is_name(pod)):
                self._limited_logger.warning("topic %s left out: it names no valid worker and model", shorten(topic))
            elif self._has_room():
                engine_stream = self._engine_streams[key] = self._new_stream(model, pod)
        return engine_stream

    def _has_room(self) -> bool:
        """Whether one more self-named worker fits. The one silent for longest is dropped if it was silent for long."""
        settings = self._registry.settings
        if len(self._engine_streams) < settings.bridge_max_workers:
            return True
        topic, engine_stream = next(iter(self._engine_streams.items()))
        if time.monotonic() - engine_stream.last_message_at < settings.bridge_away_s:
            return False
        del self._engine_streams[topic]
        self._leaving.append(engine_stream)
        return True

    async def _tidy_up(self) -> None:
        """Drop self-named workers whose connections were lost long ago."""
        settings, now = self._registry.settings, time.monotonic()
        if now >= self._tidy_at:
            self._tidy_at = now + settings.bridge_idle_check_s
            for topic, engine_stream in list(self._engine_streams.items()):
                if engine_stream.lost_at is not None and now - engine_stream.lost_at >= settings.bridge_away_s:
                    del self._engine_streams[topic]
                    self._leaving.append(engine_stream)
        if self._leaving:
            await asyncio.gather(*(leaving.ranks.close(_LEAVING_DEADLINE_S, clear=True) for leaving in self._leaving))
            self._leaving.clear()

    def _new_stream(self, model: str, worker: str) -> EngineStream:
        engine, registry = self.engine, self._registry
        replay: Any = None
        if engine.replay_endpoint is not None:
            timeout_s = registry.settings.bridge_replay_timeout_s
            replay = ReplayClient(self._context, engine.replay_endpoint, timeout_s, registry.locate)
        stream = StreamId(model, engine.tenant, worker, engine.dp_rank)
        ranks = RankStreams(stream, engine, registry, self.counters, self._republisher)
        return EngineStream(ranks, registry.threads, self.counters, replay)
