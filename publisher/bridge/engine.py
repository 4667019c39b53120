"""One address of an engine: the task that reads it, and what it made of it so far."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, NamedTuple

import zmq
import zmq.asyncio

from kv_events.streams import StreamId
from publisher.bridge.counters import BridgeCounters
from publisher.bridge.decoding import Decoder
from publisher.bridge.frames import parse_topic
from publisher.bridge.replay import ReplayClient
from publisher.bridge.settings import EngineSettings
from publisher.bridge.source import Source
from publisher.bridge.streams import StreamRegistry, StreamStatus
from publisher.bridge.subscriber import LinkState, Subscriber
from publisher.bridge.translate import Unsaid
from publisher.bridge.workers import Workers

log = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.1
_LAST_RETRY_S = 10.0


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
        self._failure: str | None = None
        self._sources: dict[str, Source] = {}  # by topic; where the engine has a name, one, under ""
        if engine.worker is not None and engine.model is not None:
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
        await asyncio.gather(*(source.close(deadline_s, clear=clear) for source in self._sources.values()))

    def status(self) -> EngineStatus:
        """Figures of this moment."""
        return EngineStatus(
            self.engine,
            LinkState.FAILED if self._failure is not None else self._subscriber.state,
            self._failure,
            time.monotonic() - self._subscriber.heard_at,
            [status for source in list(self._sources.values()) for status in source.status()],
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
            self._source_of,
            lambda: list(self._sources.values()),
        )

    def _source_of(self, topic: str) -> Source | None:
        """The source that speaks under a topic; None: nobody that could be named, or one too many."""
        key = "" if self.engine.worker is not None else topic
        source = self._sources.get(key)
        if source is None and self.engine.worker is None:
            pod = parse_topic(topic)
            model = self.engine.model or pod.model
            if model and pod.pod and len(self._sources) < self._registry.settings.bridge_max_workers:
                source = self._sources[key] = self._new_source(model, pod.pod)
        return source

    def _new_source(self, model: str, worker: str) -> Source:
        engine, settings = self.engine, self._registry.settings
        replay: Any = None
        if engine.replay_endpoint is not None:
            replay = ReplayClient(self._context, engine.replay_endpoint, settings.bridge_replay_timeout_s)
        stream = StreamId(model, engine.tenant, worker, engine.dp_rank)
        unsaid = Unsaid(engine.block_size, engine.lora_name, engine.cache_salt)
        return Source(stream, unsaid, self._registry, self._decoder, self.counters, replay, self._workers)
