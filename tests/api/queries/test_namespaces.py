"""Pages from an engine to an answer: of adapters and salts, with hashes that meet in a table, and as PyMotor asks."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from httpx import AsyncClient
from msgspec import structs

from api.app import create_app
from api.service import LiveService
from api.settings import ApiSettings
from engine_cache import InsertParams, RadixCache, RadixKey
from indexer.assembly import create_consumer
from indexer.settings import IndexerSettings
from kv_events.hashing import local_hashes, namespace_seed, token_array
from kv_events.kernels import page_table
from kv_events.kernels.page_table import LONGEST_WALK
from kv_events.log.memory import MemoryLog
from kv_events.schema import AllBlocksCleared, BlockStored, EngineEvent, StorageMedium
from kv_events.streams import MAMBA_GROUP, group_model
from publisher import EventPublisher, PublisherSettings
from publisher.metrics import publisher_families
from publisher.sinks.memory import MemorySink
from simulation import Request, SimulationSettings
from simulation.run import TimedFleet
from tests.rigs.api import asking
from tests.rigs.bridge import LiveBridge
from tests.rigs.cache import CacheRig
from tests.support.engines.event_payloads import cleared, names_of, payload, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream, words
from tests.support.log.records import stored as stored_pages
from tests.support.plain_tables import PLAIN
from tests.support.servers.embedded_service import TOKENS, Service, service
from tests.support.waiting import async_wait_until

PAGE = 4


def adapter_seed(name: str) -> int:
    """For engines whose extra keys are adapters."""
    return namespace_seed(lora_name=name)


def salt_seed(salt: str) -> int:
    """For engines whose extra keys are salts."""
    return namespace_seed(cache_salt=salt)


KINDS = {"lora_name": adapter_seed, "cache_salt": salt_seed}


@asynccontextmanager
async def serving(log: MemoryLog) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(LiveService(create_consumer(IndexerSettings(max_pages=2**16), log), ApiSettings(port=0)))
    async with asking(app) as client:
        yield client


async def answer_for(client: httpx.AsyncClient, **prompt: Any) -> dict[str, Any]:
    """Return the worker's part of an answer."""
    route = "/query" if "token_ids" in prompt else "/query_by_hash"
    answer = (await client.post(route, json={"model_name": "m", **prompt})).json()
    return dict(answer.get("instances", {}).get("w", {}))


async def all_say(client: httpx.AsyncClient, field: str, figure: str) -> None:
    """Wait for an answer by tokens and namespace, then query by local hashes and by tokens alone."""

    async def is_held() -> bool:
        return (await answer_for(client, token_ids=[*TOKENS, 1], **{field: "name"})).get(figure) == len(TOKENS)

    await async_wait_until(is_held)
    local = local_hashes(token_array(TOKENS), PAGE, KINDS[field]("name")).view(np.int64).tolist()
    assert (await answer_for(client, block_hashes=local))[figure] == len(TOKENS)
    assert await answer_for(client, token_ids=[*TOKENS, 1]) == {}


def publisher(log: MemoryLog, model: str = "m") -> EventPublisher:
    settings = PublisherSettings(model=model, worker="w", block_size=PAGE, linger_ms=1)
    return EventPublisher(settings, MemorySink(log))


def held_by_cache(seed_of_extra_key: Callable[[str], int]) -> list[EngineEvent]:
    """Return the events of a cache after it inserted the prompt under a name."""
    cache = RadixCache(page_size=PAGE, enable_kv_cache_events=True, seed_of_extra_key=seed_of_extra_key)
    cache.insert(InsertParams(RadixKey(TOKENS, "name"), np.arange(len(TOKENS))))
    return cache.take_events()


@pytest.mark.parametrize("field", KINDS)
async def test_pages_of_a_cache_are_found_by_tokens_and_by_hashes(field: str) -> None:
    log = MemoryLog()
    async with serving(log) as client, publisher(log) as own:
        own.publish(held_by_cache(KINDS[field]))
        await all_say(client, field, "gpu")


async def test_salted_pages_that_their_publisher_names_are_found_too() -> None:
    events = [
        structs.replace(event, sequence_hashes=b"") if isinstance(event, BlockStored) else event
        for event in held_by_cache(salt_seed)
    ]
    log = MemoryLog()
    async with serving(log) as client, publisher(log) as own:
        own.publish(events)
        await all_say(client, "cache_salt", "gpu")


@pytest.mark.parametrize("field", KINDS)
async def test_states_of_a_namespace_are_found_behind_its_pages(field: str) -> None:
    rig = CacheRig("mamba", page_size=PAGE, device_pages=16, seed_of_extra_key=KINDS[field])
    key = RadixKey(TOKENS, "name")
    rig.cache.insert(InsertParams(key, rig.pool.alloc(len(TOKENS)), mamba_value=rig.slots.alloc(1)))
    log = MemoryLog()
    async with serving(log) as client, publisher(log) as own, publisher(log, group_model("m", MAMBA_GROUP)) as states:
        own.publish(rig.cache.take_events())
        states.publish(rig.cache.take_group_events()[MAMBA_GROUP])
        await all_say(client, field, "gpu")


def test_a_simulated_worker_gives_a_salted_page_the_same_name() -> None:
    fleet = TimedFleet(SimulationSettings(workers=1, capacity_tokens=64, page_size=PAGE), "random")
    (worker,) = fleet.run.workers
    worker.serve(Request(0.0, token_array(TOKENS), extra_key="name"))
    held = [page.sequence_hash for page in worker.cache.iter_resident(StorageMedium.GPU)]
    assert held == names_of(TOKENS, salt="name")


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
    await fed.feed(Stream("w0").batch(stored_pages((0, ONE_TAG))))
    await shows(client, "stale", "index full", LONGEST_WALK, refused=LEFT_OUT)
    assert await num_found(client, ONE_TAG) == LONGEST_WALK
    assert f"kvsight_refused_pages_total {float(LEFT_OUT)}" in (await client.get("/metrics")).text


@pytest.mark.usefixtures("_plain")
async def test_a_stream_says_that_engine_hashes_did_not_fit_into_the_bridges_table() -> None:
    with ZmqEngine(replay=False) as engine:
        async with LiveBridge(bridge_idle_check_s=30.0) as bridge:
            await bridge.read(engine, block_size=4)
            engine.send(payload(stored(ONE_TAG, list(range(4 * NUM_PAGES)))))
            await bridge.degrades("ledger full")
            await async_wait_until(lambda: len(bridge.view().pages) == LONGEST_WALK, what="the other pages")
            engine.send(payload(cleared()))
            await bridge.degrades("")


RFC = {"modelname": "m", "block_size": 4, "type": "vLLM", "store_backend": "Mooncake"}
QUERY = {"model": "m", "block_size": 4, "token_ids": TOKENS}
PACKED = {"content-type": "application/msgpack"}
BLOCKS = {"matched_tokens": 12, "npu_blocks": 2, "cpu_blocks": 1, "disk_blocks": 0}
OTHER_BLOCKS = {"matched_tokens": 16, "npu_blocks": 1, "cpu_blocks": 1, "disk_blocks": 2}


async def registered(served: Service, engine: ZmqEngine, rank: int, **fields: Any) -> httpx.Response:
    return await served.client.post("/register", json={"instance_id": "w", "dp_rank": rank, **RFC, **fields})


async def ranks(served: Service, **fields: Any) -> Any:
    answer = await served.client.post("/query", json={**QUERY, **fields})
    return answer.json().get("default", {}).get("w", {}).get("DP")


async def test_addresses_by_medium_are_read_and_ranks_are_described_as_asked(caplog: pytest.LogCaptureFixture) -> None:
    with ZmqEngine(replay=False) as first, ZmqEngine(replay=False) as second, caplog.at_level(logging.WARNING):
        async with service() as served:
            everywhere = {"npu": first.endpoint, "cpu": first.endpoint, "disk": ""}
            assert (await registered(served, first, 0, medium_endpoints=everywhere)).is_success
            assert "not read" not in caplog.text
            elsewhere = {"gpu": second.endpoint, "cpu": first.endpoint}
            assert (await registered(served, second, 1, medium_endpoints=elsewhere)).is_success
            assert f"instance w: events of medium 'cpu' at '{first.endpoint}' are not read" in caplog.text
            first.wait_for_readers()
            second.wait_for_readers()
            first.send(payload(stored([1, 2], TOKENS[:8]), stored([3], TOKENS[8:12], parent=2, medium="CPU")))
            moved = [
                stored([2], TOKENS[4:8], parent=1, medium="CPU"),
                stored([3, 4], TOKENS[8:], parent=2, medium="FS"),
            ]
            second.send(payload(stored([1], TOKENS[:4]), *moved, rank=1))

            async def are_held() -> bool:
                return bool(await ranks(served, hit_detail=True) == {"0": BLOCKS, "1": OTHER_BLOCKS})

            await async_wait_until(are_held, 60, "the pages of both ranks")
            for hit_detail in (None, False, 0, ""):
                assert await ranks(served, hit_detail=hit_detail) == {"0": 8, "1": 4}
            by_json = (await served.client.post("/query", json={**QUERY, "hit_detail": "blocks"})).json()
            assert by_json["default"]["w"]["longest_matched"] == 16

            body = msgspec.msgpack.encode({**QUERY, "hit_detail": True})
            packed = await served.client.post("/query", content=body, headers=PACKED)
            assert packed.headers["content-type"] == "application/msgpack"
            assert msgspec.msgpack.decode(packed.content)["default"]["w"]["DP"] == by_json["default"]["w"]["DP"]
            plain = await served.client.post("/query", content=msgspec.msgpack.encode(QUERY), headers=PACKED)
            assert plain.json()["default"]["w"]["DP"] == {"0": 8, "1": 4}


@pytest.mark.parametrize("addresses", [{}, {"medium_endpoints": {"cpu": "tcp://h:1", "npu": ""}}])
async def test_a_registration_without_an_address_of_the_device_is_refused(addresses: dict[str, Any]) -> None:
    with ZmqEngine(replay=False) as engine:
        async with service() as served:
            answer = await registered(served, engine, 0, **addresses)
            assert (answer.status_code, answer.json()["field"]) == (422, "endpoint")
            assert "npu, gpu, xpu in medium_endpoints" in answer.json()["detail"]
