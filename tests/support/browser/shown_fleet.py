"""Fleets with the real API and a page: a simulated one, as in `kvsight demo`, and one whose records a test writes."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, NamedTuple

from playwright.async_api import Browser, Page

from api.app import create_app
from api.decisions.window import DecisionWindow
from api.server import running_server
from api.service import LiveService
from api.settings import ApiSettings
from indexer.assembly import create_consumer
from indexer.settings import IndexerSettings
from kv_events.decisions import VERSION, Outcome
from kv_events.log.memory import MemoryLog
from simulation import SimulationSettings, WorkloadSettings, generate
from simulation.caches import capacity_pages
from simulation.live import LiveFleet, memory_transport, publishing_fleet
from simulation.workload import Request
from tests.rigs.api import listening
from tests.support.browser.chromium import visiting
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream

POLICY = "overlap-load"


class ShownFleet(NamedTuple):
    """A running fleet, and the page that shows it."""

    url: str
    fleet: LiveFleet
    requests: list[Request]
    funnel: DecisionWindow
    numbers: Iterator[int]

    def serve(self, request: Request, age_s: float = 0.0) -> None:
        """Serve a request, and report what was chosen and reused, as if it were so old."""
        run = self.fleet.run
        chosen, now, request_id = run.step(request), time.time() - age_s, f"request-{next(self.numbers)}"
        self.funnel.take(run.router.decision(request, chosen, request_id, now))
        self.funnel.take(Outcome(VERSION, request_id, now, run.found_tokens))


@asynccontextmanager
async def shown_fleet(settings: ApiSettings, num_requests: int = 60, workers: int = 3) -> AsyncIterator[ShownFleet]:
    """Run a fleet that has served some requests inside a block."""
    simulated = SimulationSettings(
        workers=workers, capacity_tokens=2**13, page_size=16, cache="hiradix", host_ratio=1.5, model="llama"
    )
    log = MemoryLog()
    consumer = create_consumer(IndexerSettings.ignoring_environment(), log)
    service, room = LiveService(consumer, settings), capacity_pages(simulated)
    service.capacity = lambda _stream, _block_size: room
    async with (
        running_server(create_app(service), settings) as url,
        publishing_fleet(simulated, POLICY, memory_transport(log), consumer) as fleet,
    ):
        requests = list(generate(WorkloadSettings(num_requests=num_requests, seed=0)))
        shown = ShownFleet(url, fleet, requests, service.decision_window, count())
        for request in requests:
            shown.serve(request)
            await asyncio.sleep(0)
        await fleet.wait_until_synced()
        yield shown


class AliveFed(HandFed):
    """A consumer whose streams send heartbeats, so that a slow machine does not make them stale."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[Stream] = []
        self.url = ""

    async def hold(self, stream: Stream, *arguments: Any, **options: Any) -> list[int]:
        """Store a prompt. The stream sends heartbeats from now on."""
        if stream not in self.alive:
            self.alive.append(stream)
        return await super().hold(stream, *arguments, **options)

    async def beat(self) -> None:
        """Send heartbeats forever."""
        while True:
            await self.feed(*(stream.batch() for stream in self.alive))
            await asyncio.sleep(1)


@asynccontextmanager
async def hand_fed(
    browser: Browser, allowed: str | None = None, view: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[Page, AliveFed]]:
    """A page of a service whose records a test writes. allowed, view: see `visiting`."""
    fed = AliveFed()
    async with listening(fed.consumer, **settings) as url:
        fed.url = url
        await fed.feed()
        beating = asyncio.create_task(fed.beat())
        async with visiting(browser, url, allowed, **(view or {})) as page:
            yield page, fed
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
