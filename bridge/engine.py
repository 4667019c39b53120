"""One address of an engine: the task that reads it, and what it made of it so far."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from typing import Any, NamedTuple

import zmq
import zmq.asyncio

from bridge.counters import BridgeCounters
from bridge.decoding.decoder import Decoder
from bridge.naming.identity import Unsaid
from bridge.registry import StreamRegistry, StreamStatus
from bridge.settings import EngineSettings, is_name
from bridge.stream.engine_stream import Source
from bridge.stream.replay import ReplayClient
from bridge.stream.subscriber import LinkState, Subscriber
from bridge.worker_threads import Workers
from kv_events.engine_wire import parse_topic
from kv_events.errors import shorten
from kv_events.rate_limited_log import RateLimitedLog
from kv_events.streams import StreamId

log = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.1
_LAST_RETRY_S = 10.0
_LEAVING_DEADLINE_S = 0.2


class EngineStatus(NamedTuple):
    """One rank of an engine."""

    engine: EngineSettings
    state: LinkState
    failure: str | None
    """Why it is not read at present."""
    silent_s: float
    """Since its last message."""
    streams: list[StreamStatus]
    counters: BridgeCounters


class EngineReader:
    """Owns the reading task of one rank, and its sources. A task that fails is begun anew, ever more slowly."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        engine: EngineSettings,
        registry: StreamRegistry,
        decoder: Decoder,
        workers: Workers,
    ) -> None:
        """engine: one rank. workers: threads of the whole fleet."""
        self.engine = engine
        self.counters = BridgeCounters()
        self._context = context
        self._registry = registry
        self._decoder = decoder
        self._workers = workers
        self._limited_log = RateLimitedLog(log, f"engine {engine.worker or engine.endpoint}")
        self._failure: str | None = None
        self._sources: OrderedDict[str, Source] = OrderedDict()  # by topic; who was heard last comes last
        self._leaving: list[Source] = []  # to be closed
        self._tidy_at = 0.0
        if engine.worker is not None and engine.model is not None:  # the only one
            self._sources[""] = self._new_source(engine.model, engine.worker)
        self._subscriber = self._new_subscriber()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to read, in the running event loop."""
        self._task = asyncio.create_task(self._run(), name=f"bridge:{self.engine.worker or self.engine.endpoint}")

    async def stop(self, deadline_s: float, *, clear: bool) -> None:
        """Stop reading, publish what waits. clear: and that the engine's pages are not to be counted on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*(source.close(deadline_s, clear=clear) for source in self._all_sources()))

    def status(self) -> EngineStatus:
        """Figures of this moment."""
        streams = [status for source in list(self._sources.values()) for status in source.status()]
        return EngineStatus(
            self.engine,
            LinkState.FAILED if self._failure is not None else self._subscriber.state,
            self._failure or self._subscriber.failure or self._source_failure() or _publisher_failure(streams),
            time.monotonic() - self._subscriber.heard_at,
            streams,
            self.counters.copy(),
        )

    async def _run(self) -> None:
        pause_s = _FIRST_RETRY_S
        while True:
            began = time.monotonic()
            try:
                self._failure = None
                await self._subscriber.run()
            except zmq.ZMQError as error:
                self._failure = f"{self.engine.endpoint}: {error}"
                log.warning("bridge: %s; trying again", self._failure)
            except Exception as error:
                self._failure = repr(error)
                log.exception("bridge: reading %s failed; trying again", self.engine.endpoint)
            for source in self._sources.values():
                source.hear(False)
            if time.monotonic() - began > _LAST_RETRY_S:
                pause_s = _FIRST_RETRY_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_RETRY_S)
            self._subscriber = self._new_subscriber()

    def _new_subscriber(self) -> Subscriber:
        return Subscriber(
            self._context,
            self.engine,
            self._registry.settings,
            self.counters,
            self._limited_log,
            self._source_of,
            lambda: list(self._sources.values()),
            self._tidy_up,
        )

    def _source_of(self, topic: str) -> Source | None:
        """The source that speaks under a topic; None: nobody that could be named, or one too many."""
        key = "" if self.engine.worker is not None else topic
        source = self._sources.get(key)
        if source is not None:
            self._sources.move_to_end(key)
        if source is None and self.engine.worker is None:
            pod = parse_topic(topic)
            model = self.engine.model or pod.model or ""
            if not (is_name(model) and is_name(pod.pod)):
                self._limited_log.warning("topic %s left out: it names no worker and model that can be", shorten(topic))
            elif self._has_room():
                source = self._sources[key] = self._new_source(model, pod.pod)
        return source

    def _has_room(self) -> bool:
        """Whether one more worker may name itself. Who was silent for longest makes room, if that was for long."""
        settings = self._registry.settings
        if len(self._sources) < settings.bridge_max_workers:
            return True
        topic, source = next(iter(self._sources.items()))
        if time.monotonic() - source.heard_at < settings.bridge_away_s:
            return False
        del self._sources[topic]
        self._leaving.append(source)
        return True

    async def _tidy_up(self) -> None:
        """Forget workers that named themselves and whose connections were lost long ago; close those forgotten."""
        settings, now = self._registry.settings, time.monotonic()
        if now >= self._tidy_at:
            self._tidy_at = now + settings.bridge_idle_check_s
            for topic, source in list(self._sources.items()):
                if source.lost_at is not None and now - source.lost_at >= settings.bridge_away_s:
                    del self._sources[topic]
                    self._leaving.append(source)
        if self._leaving:
            await asyncio.gather(*(source.close(_LEAVING_DEADLINE_S, clear=True) for source in self._leaving))
            self._leaving.clear()

    def _all_sources(self) -> list[Source]:
        return [*self._sources.values(), *self._leaving]

    def _source_failure(self) -> str | None:
        return next((source.failure for source in list(self._sources.values()) if source.failure is not None), None)

    def _new_source(self, model: str, worker: str) -> Source:
        engine, settings = self.engine, self._registry.settings
        replay: Any = None
        if engine.replay_endpoint is not None:
            replay = ReplayClient(self._context, engine.replay_endpoint, settings.bridge_replay_timeout_s)
        stream = StreamId(model, engine.tenant, worker, engine.dp_rank)
        unsaid = Unsaid(engine.block_size, engine.lora_name, engine.cache_salt)
        return Source(stream, unsaid, self._registry, self._decoder, self.counters, replay, self._workers)


def _publisher_failure(streams: list[StreamStatus]) -> str | None:
    publishers = (stream.publisher for stream in streams)
    return next((stats.failure for stats in publishers if stats is not None and stats.failure is not None), None)
