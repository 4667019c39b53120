"""Pages of adapters and salts, from an engine's cache to a router's answer, by tokens and by hashes."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest
from msgspec import structs

from api.app import create_app
from api.service import LiveService
from api.settings import ApiSettings
from engine_cache import InsertParams, RadixCache, RadixKey
from indexer.assembly import create_consumer
from indexer.settings import IndexerSettings
from kv_events.hashing import local_hashes, namespace_seed, token_array
from kv_events.log.memory import MemoryLog
from kv_events.schema import BlockStored, EngineEvent, StorageMedium
from kv_events.streams import MAMBA_GROUP, group_model
from publisher import EventPublisher, PublisherSettings
from publisher.sinks import MemorySink
from simulation import Request, SimulationSettings
from simulation.run import DirectFleet
from tests.rigs.api import asking
from tests.rigs.bridge import GPU, Rig, on
from tests.rigs.cache import CacheRig
from tests.support.engines.event_payloads import names_of, stored
from tests.support.waiting import async_wait_until

TOKENS = list(range(1, 17))
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


@pytest.mark.parametrize("field", KINDS)
def test_a_cache_and_a_bridge_give_a_page_the_same_name(field: str) -> None:
    pages = [event for event in held_by_cache(KINDS[field]) if isinstance(event, BlockStored)]
    names = np.frombuffer(b"".join(page.sequence_hashes for page in pages), "<u8").tolist()
    namespace: dict[str, Any] = {field: "name"}
    engine_event = stored([1, 2, 3, 4], TOKENS, **namespace)
    assert Rig().take(engine_event, form="map").pages == on(GPU, names)


def test_a_simulated_worker_gives_a_salted_page_the_same_name() -> None:
    fleet = DirectFleet(SimulationSettings(workers=1, capacity_tokens=64, page_size=PAGE), "random")
    (worker,) = fleet.run.workers
    worker.serve(Request(0.0, token_array(TOKENS), extra_key="name"))
    held = [page.sequence_hash for page in worker.cache.iter_resident(StorageMedium.GPU)]
    assert held == names_of(TOKENS, salt="name")
