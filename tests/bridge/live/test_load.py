"""Eight engines under load, with batches dropped on the way and restarts: views equal what was sent."""

import asyncio
import random
from contextlib import ExitStack
from typing import Literal

import pytest

from tests.models.stream_reader import Pages
from tests.rigs.bridge import GPU, LiveBridge
from tests.support.engines.event_payloads import names_of, payload, removed, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.waiting import async_wait_until

pytestmark = pytest.mark.timing("the bridge must keep up with an engine")

NUM_RESTARTS = (2, 2, 1, 1, 1, 0, 0, 0)
"""For each engine."""
NUM_PAGES = 100_000
EVENTS_A_BATCH, PAGES_AN_EVENT = 10, 5
BLOCK_SIZE = 4


class Load:
    """The work of one engine: it stores pages and removes some of them."""

    def __init__(self, number: int) -> None:
        self.worker = f"engine-{number}"
        self.held: dict[int, int] = {}
        self._rng = random.Random(number)
        self._next = number * 10_000_000
        layout: Literal["old", "new"] = "old" if number % 2 else "new"
        self.engine = ZmqEngine(high_water_mark=4, layout=layout)
        self._forms = "map" if number % 3 else "array"

    @property
    def pages(self) -> Pages:
        return {(GPU, name) for name in self.held.values()}

    def send(self) -> int:
        """Send one batch. Returns the number of pages stored."""
        events = []
        for _ in range(EVENTS_A_BATCH):
            hashes = [self._next + i for i in range(PAGES_AN_EVENT)]
            self._next += PAGES_AN_EVENT
            tokens = [self._rng.randrange(150_000) for _ in range(BLOCK_SIZE * PAGES_AN_EVENT)]
            self.held.update(zip(hashes, names_of(tokens, BLOCK_SIZE), strict=True))
            events.append(stored(hashes, tokens, BLOCK_SIZE, medium="GPU"))
            if self._rng.random() < 0.2:
                gone = self._rng.choice(hashes)
                del self.held[gone]
                events.append(removed([gone], "GPU"))
        fate: Literal["sent", "dropped"] = "dropped" if self._rng.random() < 0.01 else "sent"
        self.engine.send(payload(*events, form="map" if self._forms == "map" else "array"), fate)
        return EVENTS_A_BATCH * PAGES_AN_EVENT

    def work(self, num_pages: int, num_restarts: int) -> None:
        """Send batches before, between and after the restarts. Runs in its own thread."""
        self._store(num_pages)
        for _ in range(num_restarts):
            self.restart()
            self._store(num_pages)

    def _store(self, num_pages: int) -> None:
        while num_pages > 0:
            num_pages -= self.send()

    def restart(self) -> None:
        self.engine.restart()
        self.held.clear()


@pytest.mark.timeout(300)
async def test_eight_engines_with_gaps_and_restarts_are_seen_as_they_are() -> None:
    loads = [Load(number) for number in range(len(NUM_RESTARTS))]
    with ExitStack() as stack:
        for load in loads:
            stack.enter_context(load.engine)
        async with LiveBridge(bridge_idle_check_s=0.2, bridge_name_pages=300_000) as bridge:
            for load in loads:
                await bridge.read(load.engine, load.worker)
            work = zip(loads, NUM_RESTARTS, strict=True)
            await asyncio.gather(
                *(asyncio.to_thread(load.work, NUM_PAGES // (1 + restarts), restarts) for load, restarts in work)
            )
            for load in loads:
                await bridge.shows(load.pages, load.worker, deadline_s=60)
            counters = [bridge.counters(load.worker) for load in loads]
            # A slow bridge may have read an engine's drops in one replay, before it saw a gap of that engine.
            assert all(c["replays"] > 0 for c in counters), counters
            assert any(c["gaps"] > 0 for c in counters), counters
            seen = [c["restarts"] for c in counters]  # a slow bridge may not have seen an incarnation
            assert any(seen), seen
            assert all(here <= there for here, there in zip(seen, NUM_RESTARTS, strict=True)), seen
            assert not any(c["bad_events"] for c in counters), counters
            kept = [c for c, restarts in zip(counters, NUM_RESTARTS, strict=True) if restarts == 0]
            # What a slow bridge has not read is lost when an engine restarts.
            assert all(c["losses"] == 0 and c["unknown_parents"] == 0 for c in kept), counters
            await async_wait_until(lambda: all(s.streams[0].pages_held > 0 for s in bridge.fleet.status()))
