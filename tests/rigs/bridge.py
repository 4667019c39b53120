"""Bridges for tests: `Rig` accepts payloads and needs no socket, `LiveBridge` reads engines over ZMQ."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import fields
from typing import Any, Literal, Self

from bridge import BridgeSettings, EngineSettings, EngineStatus, Fleet
from bridge.context import BridgeCounters, EngineContext
from bridge.decoding.decoder import Decoder
from bridge.hashes.event_translator import EventTranslator
from bridge.settings import EngineDefaults
from kv_events.engine_wire import Locate, as_given
from kv_events.log.memory import MemoryLog
from kv_events.runtime.outages import RateLimitedLogger
from kv_events.schema import BATCHES_LOST, ENGINE_UNHEARD, counted_reason
from kv_events.streams import StreamId, split_group
from publisher import EventPublisher, PublisherSettings
from publisher.kernels.blocks import BlockTable
from publisher.sinks.memory import MemorySink
from tests.models.stream_reader import Pages, StreamReader
from tests.support.engines.event_payloads import cleared, names_of, payload, removed, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.servers.child_process import free_port
from tests.support.waiting import async_wait_until

NOW = 1_700_000_000.0
GPU, CPU, DISK, EXTERNAL = range(4)


class LiveBridge:
    """A fleet that publishes to a log in memory, and the views rebuilt from that log."""

    def __init__(self, locate: Locate = as_given, /, **settings: Any) -> None:
        self.log = MemoryLog()
        template = PublisherSettings(model="-", worker="-", block_size=1, ledger_pages=200_000, linger_ms=1)
        self.fleet = Fleet(BridgeSettings(**settings), template, MemorySink(self.log), locate)
        self._views: dict[str, StreamReader] = defaultdict(StreamReader)
        self._offset = 0

    def view(self, worker: str = "w", rank: int = 0, model: str = "m") -> StreamReader:
        """Return a worker's current view. model: that of a group stream."""
        while records := self.log.read(self._offset):
            self._offset = records[-1].offset + 1
            for record in records:
                self._views[record.key.decode()].read(record.payload)
        return self._views[StreamId(model, "default", worker, rank).key]

    def counters(self, worker: str = "w", rank: int = 0) -> dict[str, Any]:
        counters = self.status(worker, rank).counters
        return {field.name: getattr(counters, field.name) for field in fields(counters)}

    def status(self, worker: str = "w", rank: int = 0) -> EngineStatus:
        return next(s for s in self.fleet.status() if (s.engine.worker, s.engine.dp_rank) == (worker, rank))

    async def read(self, engine: ZmqEngine, worker: str = "w", **fields: Any) -> None:
        """Add an engine and wait until it has been subscribed to."""
        wanted = {"endpoint": engine.endpoint, "replay_endpoint": engine.replay_endpoint, **fields}
        await self.fleet.add(EngineSettings(worker=worker, model="m", **wanted))
        await asyncio.to_thread(engine.wait_for_readers)

    async def shows(self, pages: Pages, worker: str = "w", rank: int = 0, deadline_s: float = 20.0) -> None:
        """Wait until a worker's view holds exactly these pages."""
        await async_wait_until(
            lambda: self.view(worker, rank).pages == pages, deadline_s, f"{len(pages)} pages of {worker}"
        )

    async def degrades(self, degraded_reason: str, worker: str = "w", rank: int = 0) -> None:
        """Wait until a worker's records report this degraded reason."""
        await async_wait_until(
            lambda: counted_reason(str(self.view(worker, rank).degraded_reason))[0] == degraded_reason,
            20.0,
            f"{degraded_reason!r} of {worker}",
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.fleet.close()


@asynccontextmanager
async def bridged(
    *, read: dict[str, Any] | None = None, settings: dict[str, Any] | None = None, is_read: bool = True, **engine: Any
) -> AsyncIterator[tuple[ZmqEngine, LiveBridge]]:
    """An engine and a bridge that reads it. The bridge does not ask an idle engine, unless `settings` say so."""
    with ZmqEngine(**engine) as sender:
        async with LiveBridge(**{"bridge_idle_check_s": 30.0, **(settings or {})}) as bridge:
            if is_read:
                await bridge.read(sender, **(read or {}))
            yield sender, bridge


@asynccontextmanager
async def self_named(*names: str, **settings: Any) -> AsyncIterator[tuple[list[ZmqEngine], LiveBridge]]:
    """Workers that name themselves by their topics and connect to a bridge."""
    address = f"tcp://127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        pods = [
            stack.enter_context(ZmqEngine(replay=False, topic=f"kv@{name}@m", connect_to=address)) for name in names
        ]
        async with LiveBridge(**settings) as bridge:
            await bridge.fleet.add(EngineSettings(endpoint=address, bind=True, topic="kv@"))
            for pod in pods:
                await asyncio.to_thread(pod.wait_for_readers)
            yield pods, bridge


def prompt(number: int) -> list[int]:
    """Tokens of one page."""
    return [1000 + number] * 4


def store(number: int, rank: int | None = 0) -> bytes:
    """A batch that stores one page."""
    return payload(stored([number], prompt(number)), rank=rank)


def pages(*numbers: int) -> Pages:
    """The pages of these stores."""
    return on(GPU, [names_of(prompt(number))[0] for number in numbers])


_FATES: dict[str, Literal["sent", "dropped", "lost"]] = {"send": "sent", "drop": "dropped", "lose": "lost"}
_REASONS = {"none": "", "unheard": ENGINE_UNHEARD, "lost": BATCHES_LOST}


class Play:
    """An engine and its bridge, which follow a script: steps that are separated by commas.

    send, drop (kept for replays only) or lose: a batch for each number, which stores that page; -0 removes page 0.
    clear: one batch that clears and then stores these pages. show: wait until the bridge shows exactly these pages.
    reason, still: wait for a degraded reason, or have it now. until: wait until a counter is above 0.
    read: the bridge comes; without it, before all steps.
    """

    def __init__(self, engine: ZmqEngine, bridge: LiveBridge, read: dict[str, Any]) -> None:
        self._engine, self._bridge, self._read = engine, bridge, read
        self._epoch = -1

    @classmethod
    async def follow(
        cls, script: str, *, read: dict[str, Any] | None = None, **opening: Any
    ) -> tuple[dict[str, Any], list[int]]:
        """Return the bridge's counters at the end, and the numbers from which the engine was asked. See `bridged`."""
        steps = [step.split() for step in script.split(",")]
        async with bridged(**opening, is_read=False) as (engine, bridge):
            play = cls(engine, bridge, read or {})
            for step in steps if ["read"] in steps else [["read"], *steps]:
                await play._do(*step)
            return bridge.counters(), engine.requests

    async def _do(self, what: str, *words: str) -> None:
        engine, bridge = self._engine, self._bridge
        match what:
            case "read":
                await bridge.read(engine, **self._read)
            case "send" | "drop" | "lose":
                for word in words:
                    for number in _numbers([word.lstrip("-")]):
                        batch = payload(removed([number])) if word.startswith("-") else store(number)
                        engine.send(batch, _FATES[what])
            case "clear":
                engine.send(payload(cleared(), *(stored([number], prompt(number)) for number in _numbers(words))))
            case "garble":
                engine.send(b"\xc1 no msgpack")
            case "count":
                engine.seq = int(words[0])
            case "show":
                await bridge.shows(pages(*_numbers(words)))
            case "reason":
                await bridge.degrades(_REASONS[words[0]])
            case "still":
                assert counted_reason(bridge.view().degraded_reason)[0] == _REASONS[words[0]]
            case "until":
                await async_wait_until(lambda: bridge.counters()[words[0]] > 0)
            case "epoch":
                assert bridge.view().epoch > self._epoch
                self._epoch = bridge.view().epoch
            case "state":
                assert (bridge.status().state.value, bool(bridge.status().failure)) == (words[0], words[0] == "away")
            case "restart" | "stop" | "wait_for_readers":
                await asyncio.to_thread(getattr(engine, what))
            case _:
                raise ValueError(what)


def _numbers(words: Sequence[str]) -> Iterator[int]:
    for word in words:
        first, _, last = word.partition("..")
        yield from range(int(first), int(last or first) + 1)


class Rig:
    """One worker stream of a bridge."""

    def __init__(
        self,
        *,
        name_pages: int = 10_000,
        ledger_pages: int = 10_000,
        failures: Iterable[Exception] = (),
        **defaults: Any,
    ) -> None:
        """failures: errors of the first attempts to create a publisher. defaults: fields of `EngineDefaults`."""
        self._failures = list(failures)
        self._ledger_pages = ledger_pages
        self.counters = BridgeCounters()
        self._views: defaultdict[str, StreamReader] = defaultdict(StreamReader)
        self._decoder = Decoder()
        limited_logger = RateLimitedLogger(logging.getLogger("tests"), "engine w")
        context = EngineContext(
            EngineDefaults(**defaults), self.counters, limited_logger, self._publisher, ledger_pages, name_pages
        )
        self.translator = EventTranslator(StreamId("m", "default", "w", 0), context)

    def take(self, *events: Any, **shape: Any) -> Self:
        """Pass one batch of events to the bridge, see `event_payloads.payload`."""
        return self.take_payload(payload(*events, **shape))

    def take_payload(self, data: bytes) -> Self:
        for run, num_events in self._decoder.decode(data).runs:
            self.counters.events += num_events
            self.translator.apply(run)
        self.translator.end_batch()
        return self

    def counts(self) -> dict[str, Any]:
        return {field.name: getattr(self.counters, field.name) for field in fields(self.counters)}

    @property
    def pages(self) -> Pages:
        """Return the pages that the worker's own stream holds according to its records."""
        return self.groups.get("", self._views[""].pages)

    @property
    def groups(self) -> dict[str, Pages]:
        """Return the pages of each stream, by the name of its group."""
        for publisher in self.translator.publishers:
            for record in publisher.take_records(NOW, force=True):
                self._views[split_group(publisher.stream.model)[1] or ""].read(record.payload)
            publisher.check()
        names = [split_group(publisher.stream.model)[1] or "" for publisher in self.translator.publishers]
        return {name: self._views[name].pages for name in names}

    def fail_once(self, error: Exception) -> None:
        """Raise an error when the next publisher is created."""
        self._failures.append(error)

    def _publisher(self, stream: StreamId, block_size: int, blocks: BlockTable | None) -> EventPublisher:
        if self._failures:
            raise self._failures.pop(0)
        settings = PublisherSettings(
            model=stream.model, worker="w", block_size=block_size, ledger_pages=self._ledger_pages
        )
        return EventPublisher(settings, MemorySink(MemoryLog()), blocks)


def on(tier: int, names: list[int]) -> Pages:
    """Return pages on one tier."""
    return {(tier, name) for name in names}
