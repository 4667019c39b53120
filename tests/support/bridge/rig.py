"""Bridges for tests: `Rig` accepts payloads and needs no socket, `LiveBridge` reads engines over ZMQ."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Self

from bridge import BridgeSettings, EngineSettings, EngineStatus, Fleet
from bridge.counters import BridgeCounters
from bridge.decoding.decoder import Decoder
from bridge.hashes.event_translator import EventTranslator
from bridge.settings import EngineDefaults
from kv_events.codec import RemovedPages, StoredPages, decode_batch
from kv_events.endpoints import Locate, as_given
from kv_events.log.memory import MemoryLog
from kv_events.runtime.rate_limited_logger import RateLimitedLogger
from kv_events.schema import AllBlocksCleared, SnapshotBegin, SnapshotEnd
from kv_events.streams import StreamId, split_group
from publisher import EventPublisher, PublisherSettings
from publisher.kernels.blocks import BlockTable
from publisher.sinks import MemorySink
from tests.support.engines.event_payloads import payload
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.waiting import async_wait_until

NOW = 1_700_000_000.0
GPU, CPU, DISK, EXTERNAL = range(4)

Pages = set[tuple[int, int]]
"""(tier, sequence hash)"""


class View:
    """The state of one stream, rebuilt from its records."""

    def __init__(self) -> None:
        self.pages: Pages = set()
        self.epoch = -1
        self.block_size = 0
        self.degraded_reason: str | None = None
        self._named: Pages | None = None

    def read(self, record: bytes) -> None:
        batch = decode_batch(record)
        if batch.epoch < self.epoch:
            return
        self.epoch, self.block_size, self.degraded_reason = batch.epoch, batch.block_size, batch.degraded_reason
        for step in batch.steps:
            match step:
                case StoredPages():
                    here = {(step.medium, name) for name in step.hashes.tolist()}
                    self.pages |= here
                    if self._named is not None:
                        self._named |= here
                case RemovedPages():
                    self.pages -= {(step.medium, name) for name in step.hashes.tolist()}
                case AllBlocksCleared():
                    self.pages.clear()
                case SnapshotBegin():
                    self._named = set()
                case SnapshotEnd():
                    assert self._named is not None
                    self.pages, self._named = self._named, None


class LiveBridge:
    """A fleet that publishes to a log in memory, and the views rebuilt from that log."""

    def __init__(self, locate: Locate = as_given, /, **settings: Any) -> None:
        self.log = MemoryLog()
        template = PublisherSettings(model="-", worker="-", block_size=1, ledger_pages=200_000, linger_ms=1)
        self.fleet = Fleet(BridgeSettings(**settings), template, MemorySink(self.log), locate)
        self._views: dict[str, View] = defaultdict(View)
        self._offset = 0

    def view(self, worker: str = "w", rank: int = 0, model: str = "m") -> View:
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
            lambda: self.view(worker, rank).degraded_reason == degraded_reason, 20.0, f"{degraded_reason!r} of {worker}"
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.fleet.close()


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
        self._views: defaultdict[str, View] = defaultdict(View)
        self._decoder = Decoder()
        self.translator = EventTranslator(
            StreamId("m", "default", "w", 0),
            EngineDefaults(**defaults),
            self.counters,
            RateLimitedLogger(logging.getLogger("tests"), "engine w"),
            self._publisher,
            lambda publisher: None,
            ledger_pages=ledger_pages,
            name_pages=name_pages,
        )

    def take(self, *events: Any, **shape: Any) -> Self:
        """Pass one batch of events to the bridge, see `event_payloads.payload`."""
        return self.take_payload(payload(*events, **shape))

    def take_payload(self, data: bytes) -> Self:
        for run, num_events in self._decoder.decode(data).runs:
            self.counters.events += num_events
            self.translator.apply(run)
        self.translator.end_batch()
        return self

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
