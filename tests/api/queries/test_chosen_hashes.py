"""Hashes chosen so that they meet in the page table: every page is found, or its view says that some are missing."""

from typing import Any

import numpy as np
import pytest
from httpx import AsyncClient

from kv_events.kernels import page_table
from kv_events.kernels.page_table import LONGEST_WALK
from kv_events.log.memory import MemoryLog
from kv_events.schema import AllBlocksCleared, BlockStored
from publisher import EventPublisher, PublisherSettings
from publisher.metrics import publisher_families
from publisher.sinks import MemorySink
from tests.rigs.bridge import LiveBridge
from tests.support.engines.event_payloads import cleared, payload
from tests.support.engines.event_payloads import stored as stored_blocks
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream, stored, words
from tests.support.plain_tables import PLAIN
from tests.support.waiting import async_wait_until

NUM_PAGES = 4300
LEFT_OUT = NUM_PAGES - LONGEST_WALK
ONE_TAG = [7 << 32 | low for low in range(1, NUM_PAGES + 1)]
"""Hashes with one tag in tables with the secret PLAIN."""


def golden(low: int) -> int:
    """Return a hash whose folded form times 2**64 / golden ratio has a given upper half: its tag without a secret."""
    folded = (7 << 32 | low) * pow(0x9E3779B97F4A7C15, -1, 2**64) % 2**64
    return folded ^ folded >> 32


@pytest.fixture
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_table, "new_secret", lambda: PLAIN)


def publisher_to(log: MemoryLog) -> EventPublisher:
    settings = PublisherSettings(model="m", worker="w0", block_size=4, ledger_pages=100_000, heartbeat_s=0.2)
    return EventPublisher(settings, MemorySink(log))


def event(hashes: list[int]) -> BlockStored:
    """Return the store of a prompt by sequence hashes. Its block hashes meet in no table."""
    blocks = np.random.default_rng(1).integers(0, 2**63, len(hashes)).tolist()
    return BlockStored(blocks, None, [], 4, sequence_hashes=words(hashes))


async def num_found(client: AsyncClient, hashes: list[int]) -> int:
    """Ask for each page alone."""
    found = 0
    for start in range(0, len(hashes), 1000):
        queries = [{"model_name": "m", "seq_hashes": [page]} for page in hashes[start : start + 1000]]
        results = (await client.post("/query/batch", json={"queries": queries})).json()["results"]
        found += sum(bool(result.get("scores")) for result in results)
    return found


async def shows(client: AsyncClient, state: str, reason: str, pages: int, refused: int = 0) -> None:
    """Wait until the only worker is in this state."""

    async def so() -> bool:
        workers = (await client.get("/workers")).json()
        if not workers:
            return False
        listener = workers[0]["listeners"]["0"]
        shown = workers[0]["state"], listener["stale_reason"], listener["pages"]["GPU"]
        return shown == (state, reason, pages) and listener["counters"]["refused_pages"] == refused

    await async_wait_until(so, what=f"{state}, {reason!r}, {pages} pages")


async def test_hashes_chosen_without_the_secret_are_all_found(serving: Any) -> None:
    hashes = [golden(low) for low in range(NUM_PAGES)]
    async with serving() as (client, fed), publisher_to(fed.log) as publisher:
        publisher.publish([event(hashes)])
        await shows(client, "live", "", NUM_PAGES)
        assert await num_found(client, hashes) == NUM_PAGES
        publisher.check()


@pytest.mark.usefixtures("_plain")
async def test_a_view_says_that_pages_did_not_fit_into_the_publishers_ledger(serving: Any) -> None:
    async with serving() as (client, fed), publisher_to(fed.log) as publisher:
        publisher.publish([event(ONE_TAG)])
        await shows(client, "stale", "ledger full", LONGEST_WALK)
        assert await num_found(client, ONE_TAG) == LONGEST_WALK
        (family,) = (
            each
            for each in publisher_families([(publisher.stream, publisher.stats())])
            if each.name == "kvsight_publisher_left_out_pages"
        )
        assert [sample.value for sample in family.samples] == [LEFT_OUT]
        publisher.publish([AllBlocksCleared(), event(ONE_TAG[:10])])
        await shows(client, "live", "", 10)


@pytest.mark.usefixtures("_plain")
async def test_a_view_says_that_pages_did_not_fit_into_the_index(client: AsyncClient, fed: HandFed) -> None:
    await fed.feed(Stream("w0").batch(stored((0, ONE_TAG))))
    await shows(client, "stale", "index full", LONGEST_WALK, refused=LEFT_OUT)
    assert await num_found(client, ONE_TAG) == LONGEST_WALK
    assert f"kvsight_refused_pages_total {float(LEFT_OUT)}" in (await client.get("/metrics")).text


@pytest.mark.usefixtures("_plain")
async def test_a_stream_says_that_engine_hashes_did_not_fit_into_the_bridges_table() -> None:
    with ZmqEngine(replay=False) as engine:
        async with LiveBridge(bridge_idle_check_s=30.0) as bridge:
            await bridge.read(engine, block_size=4)
            engine.send(payload(stored_blocks(ONE_TAG, list(range(4 * NUM_PAGES)))))
            await bridge.degrades("ledger full")
            await async_wait_until(lambda: len(bridge.view().pages) == LONGEST_WALK, what="the other pages")
            engine.send(payload(cleared()))
            await bridge.degrades("")
