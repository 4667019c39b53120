"""A connection is lost and restored, without a replay that shows whether the engine restarted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.bridge.rig import GPU, LiveBridge, on
from tests.support.engines.event_payloads import names_of, payload, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.waiting import async_wait_until

TOKENS = list(range(12))
CHILD = payload(stored([3], TOKENS[8:], parent=2))


@asynccontextmanager
async def after_a_blip() -> AsyncIterator[tuple[ZmqEngine, LiveBridge]]:
    """An engine that stored two pages before its connection was lost."""
    with ZmqEngine(replay=False) as engine:
        async with LiveBridge(bridge_idle_check_s=30.0) as bridge:
            await bridge.read(engine)
            engine.send(payload(stored([1, 2], TOKENS[:8])))
            await bridge.shows(on(GPU, names_of(TOKENS[:8])))
            engine.restart()
            await asyncio.to_thread(engine.wait_for_readers)
            await bridge.shows(set())
            yield engine, bridge


async def test_its_pages_are_dropped_and_their_hashes_are_not() -> None:
    async with after_a_blip() as (engine, bridge):
        engine.seq = 7
        engine.send(CHILD)
        await bridge.shows(on(GPU, names_of(TOKENS)[2:]))


async def test_hashes_are_dropped_when_it_is_certain_that_the_engine_is_another() -> None:
    async with after_a_blip() as (engine, bridge):
        engine.seq = 7
        engine.send(payload(stored([5], TOKENS[:4])))
        await bridge.shows(on(GPU, names_of(TOKENS[:4])))
        engine.seq = 0
        engine.send(CHILD)
        await bridge.shows(set())
        await async_wait_until(lambda: bridge.counters()["unknown_parents"] == 1)


async def test_another_page_size_is_taken() -> None:
    async with after_a_blip() as (engine, bridge):
        engine.send(payload(stored([1], TOKENS[:8], 8)))
        await bridge.shows(on(GPU, names_of(TOKENS[:8], 8)))
        assert bridge.view().block_size == 8
