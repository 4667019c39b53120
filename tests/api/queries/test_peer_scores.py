"""NVIDIA Dynamo's indexer and kvsight give the same scores after the same events."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from engine_cache import EvictParams, InsertParams, MatchPrefixParams, RadixCache, RadixKey
from indexer.settings import IndexerSettings
from kv_events.hashing import local_hashes, namespace_seed, token_array
from kv_events.log.memory import MemoryLog
from publisher import EventPublisher, PublisherSettings
from publisher.sinks.memory import MemorySink
from publisher.sinks.zmq import ZmqSink
from tests.rigs.api import embedded
from tests.support.engines.event_payloads import cleared, payload, removed, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.servers.child_process import free_port
from tests.support.servers.peer_indexer import PeerIndexer
from tests.support.waiting import async_wait_until

BLOCK = 4
MEDIA = {"GPU": "gpu", "CPU_PINNED": "cpu", "DISK": "disk"}


class Both:
    """The peer's process, and kvsight's API in this process."""

    def __init__(self, peer: PeerIndexer, log: MemoryLog, client: httpx.AsyncClient) -> None:
        self.log = log
        self.peer = peer
        self._client = client

    async def read(self, worker: int, engine: ZmqEngine, rank: int = 0) -> None:
        """Register an engine's rank with both."""
        rank_of_engine: dict[str, Any] = {"replay_endpoint": engine.replay_endpoint, "dp_rank": rank}
        registration: dict[str, Any] = {
            "endpoint": engine.endpoint,
            "model_name": "m",
            "block_size": BLOCK,
            **rank_of_engine,
        }
        answer = await self._client.post("/register", json={"instance_id": worker, **registration})
        assert answer.status_code == 201, answer.text
        await asyncio.to_thread(self.peer.register, worker, **registration)
        await asyncio.to_thread(engine.wait_for_readers, 2)

    async def asked(self, route: str = "query", **question: Any) -> tuple[Any, Any]:
        """Return scores and tiers of the peer and of kvsight."""
        theirs = await asyncio.to_thread(getattr(self.peer, route), model_name="m", **question)
        ours = (await self._client.post(f"/{route}", json={"model_name": "m", **question})).raise_for_status().json()
        ours.pop("hint", None)  # as the fields below, only kvsight has it
        for instance in ours["instances"].values():
            for more in ("external", "state", "age_ms", "matched_dp"):
                instance.pop(more, None)
        return theirs, ours

    async def agree(self, wanted: Any = None, **question: Any) -> Any:
        """Wait until both answers are equal and the scores are as expected. Returns the answer."""
        answers: Any = None

        async def same() -> bool:
            nonlocal answers
            answers = await self.asked(**question)
            return answers[0] == answers[1] and (wanted is None or answers[0]["scores"] == wanted)

        try:
            await async_wait_until(same, 60)
        except AssertionError:
            assert answers[0] == answers[1]
            assert answers[0]["scores"] == wanted
        return answers[0]

    async def send_to_both(self, engine: ZmqEngine, worker: int, rank: int = 0) -> None:
        """Wait until both have applied everything that an engine sent, by a page that is sent last."""
        mark = [2**32 - 1 - worker, rank, engine.seq, 0]
        engine.send(payload(stored([2**63 + engine.seq], mark), rank=rank))
        await self.agree({str(worker): {str(rank): BLOCK}}, token_ids=mark)


@asynccontextmanager
async def both(place: Path) -> AsyncIterator[Both]:
    log = MemoryLog()
    async with AsyncExitStack() as stack:
        peer = await asyncio.to_thread(stack.enter_context, PeerIndexer(place / "peer.log"))
        client = await stack.enter_async_context(embedded(IndexerSettings(max_pages=2**17), log))
        yield Both(peer, log, client)


def instance(gpu: int, cpu: int, disk: int, rank: int = 0) -> dict[str, Any]:
    return {"longest_matched": disk, "gpu": gpu, "dp": {str(rank): gpu}, "cpu": cpu, "disk": disk}


async def test_ranks_tiers_adapters_and_salts(tmp_path: Path) -> None:
    tokens = list(range(1, 25))
    async with both(tmp_path) as two:
        with ZmqEngine() as first, ZmqEngine(layout="old") as second, ZmqEngine() as other, ZmqEngine() as outer:
            await two.read(1, first)
            await two.read(1, second, rank=1)
            await two.read(2, other)
            await two.read(3, outer)
            first.send(payload(stored([1, 2], tokens[:8], medium="GPU"), rank=0))
            second.send(payload(stored([1, 2, 3], tokens[:12], medium="GPU"), rank=1, form="map"))
            other.send(payload(stored([1], tokens[:4], medium="GPU"), form="array with nils"))
            other.send(payload(stored([1, 2, 3], tokens[:12], medium="CPU_PINNED")))
            other.send(payload(stored([1, 2, 3, 4, 5], tokens[:20], medium="DISK")))
            other.send(payload(stored([21], tokens[:4], lora_name="ad", medium="GPU", lora_id=None)))
            other.send(payload(stored([31, 32], tokens[:8], cache_salt="s", medium="GPU", lora_name=None), form="map"))
            salted: dict[str, Any] = {"cache_salt": "s", "lora_name": "ad"}
            other.send(payload(stored([41], tokens[:4], medium="GPU", **salted), form="map"))
            outside = [9, *tokens, *tokens[:4]]
            outer.send(payload(stored([51, 52], outside[:8], medium="GPU")))
            outer.send(payload(stored([51, 52, 53, 54, 55, 56], outside[:24], medium="CPU_PINNED")))
            outer.send(payload(stored([51, 52, 53, 54, 55, 56, 57], outside[:28], medium="EXTERNAL")))
            for engine, worker, rank in ((first, 1, 0), (second, 1, 1), (other, 2, 0), (outer, 3, 0)):
                await two.send_to_both(engine, worker, rank)

            answer = await two.agree({"1": {"0": 8, "1": 12}, "2": {"0": 4}}, token_ids=tokens)
            assert answer["instances"]["2"] == instance(4, 12, 20)
            await two.agree({"2": {"0": 4}}, token_ids=tokens, lora_name="ad")
            await two.agree({"2": {"0": 8}}, token_ids=tokens, cache_salt="s")
            await two.agree({"2": {"0": 4}}, token_ids=tokens, **salted)
            await two.agree({}, token_ids=tokens, cache_salt="another")
            await two.agree({}, token_ids=tokens[1:])
            await two.agree({}, token_ids=[])
            hashes = local_hashes(token_array(tokens), BLOCK).astype(np.int64).tolist()
            by_hash = await two.agree(
                {"1": {"0": 8, "1": 12}, "2": {"0": 4}}, route="query_by_hash", block_hashes=hashes
            )
            assert by_hash == answer
            named: list[tuple[dict[str, Any], int]] = [({"lora_name": "ad"}, 4), ({"cache_salt": "s"}, 8), (salted, 4)]
            for names, held in named:  # local hashes find the pages of an adapter and a salt without their names
                hashes = local_hashes(token_array(tokens), BLOCK, namespace_seed(**names)).astype(np.int64).tolist()
                question = {"route": "query_by_hash", "block_hashes": hashes}
                for lora_name in (None, "ad", "another"):
                    await two.agree({"2": {"0": held}}, **question, lora_name=lora_name)
            answer = await two.agree({"3": {"0": 8}}, token_ids=outside)
            assert answer["instances"]["3"] == instance(8, 24, 28)


async def test_engines_that_name_a_page_differently_cost_the_peer_slower_tiers_and_us_nothing(tmp_path: Path) -> None:
    """As vLLM's do without PYTHONHASHSEED: from its index of devices the peer goes on by the first worker's name."""
    tokens = list(range(1, 25))
    async with both(tmp_path) as two:
        with ZmqEngine() as first, ZmqEngine() as other:
            await two.read(1, first)
            await two.read(2, other)
            first.send(payload(stored([1, 2], tokens[:8])))
            await two.send_to_both(first, 1)
            other.send(payload(stored([11], tokens[:4])))
            other.send(payload(stored([11, 12, 13], tokens[:12], medium="CPU_PINNED")))
            await two.send_to_both(other, 2)
            theirs, ours = await two.asked(token_ids=tokens)
            assert ours["scores"] == theirs["scores"] == {"1": {"0": 8}, "2": {"0": 4}}
            assert ours["instances"]["2"] == instance(4, 12, 12)
            assert theirs["instances"]["2"] == instance(4, 4, 4)


async def test_windows_and_states_are_no_prefix_to_either(tmp_path: Path) -> None:
    """The pages of a window beyond those of full attention do not count, whatever the group's number."""
    tokens = list(range(1, 17))
    async with both(tmp_path) as two:
        with ZmqEngine() as engine:
            await two.read(1, engine)
            full: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
            window: dict[str, Any] = {
                "group_idx": 0,
                "kv_cache_spec_kind": "sliding_window",
                "kv_cache_spec_sliding_window": 8,
            }
            engine.send(payload(stored([1, 2], tokens[:8], medium="GPU", lora_name=None, **full), form="map"))
            engine.send(payload(stored([1, 2, 3, 4], tokens, medium="GPU", lora_name=None, **window), form="map"))
            await two.agree({"1": {"0": 8}}, token_ids=tokens)


async def test_an_engine_that_restarts_keeps_its_old_pages_only_at_the_peers(tmp_path: Path) -> None:
    tokens = list(range(1, 17))
    async with both(tmp_path) as two:
        with ZmqEngine() as engine:
            await two.read(1, engine)
            engine.send(payload(stored([1, 2, 3, 4], tokens, medium="GPU")))
            await two.send_to_both(engine, 1)
            await asyncio.to_thread(engine.restart)
            await asyncio.to_thread(engine.wait_for_readers, 2)
            engine.send(payload(stored([1], tokens[:4], medium="GPU")))

            async def ours_is_right() -> bool:
                return bool((await two.asked(token_ids=tokens))[1]["scores"] == {"1": {"0": 4}})

            await async_wait_until(ours_is_right, 60, "the new incarnation is known")
            theirs, _ = await two.asked(token_ids=tokens)
            assert theirs["scores"] == {"1": {"0": 16}}


@pytest.mark.parametrize("seed", range(3))
async def test_random_lives_of_caches(tmp_path: Path, seed: int) -> None:
    """Return prefixes of prompts on tiers, each slower tier reaching at least as far, as in caches with tiers."""
    rng = random.Random(seed)
    async with both(tmp_path) as two:
        with ZmqEngine() as one, ZmqEngine() as other:
            engines = {1: one, 2: other}
            prompts = [[rng.randrange(2**32) for _ in range(4 * rng.randint(1, 8))] for _ in range(10)]
            for worker, engine in engines.items():
                await two.read(worker, engine)
            for _ in range(40):
                worker, engine = rng.choice(list(engines.items()))
                engine.send(payload(*_step(rng, rng.choice(range(10)), prompts), form=rng.choice(["array", "map"])))
            for worker, engine in engines.items():
                await two.send_to_both(engine, worker)
            found = [await two.agree(token_ids=tokens) for tokens in prompts]
            found += [await two.agree(token_ids=tokens[:6] + tokens[4:]) for tokens in prompts]
            assert any(answer["scores"] for answer in found)


def _step(rng: random.Random, number: int, prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
    if rng.random() < 0.03:
        return [cleared()]
    tokens = prompts[number]
    num_pages = len(tokens) // BLOCK
    hashes = [1000 * number + place for place in range(num_pages)]
    reaches = sorted(rng.randint(0, num_pages) for _ in MEDIA)
    events = []
    for medium, reach in zip(MEDIA, reaches, strict=True):
        events.append(removed(hashes, medium))  # no page has two copies, which only kvsight counts
        if reach:
            events.append(stored(hashes[:reach], tokens[: reach * BLOCK], medium=medium))
    return events


async def test_our_own_cache_through_the_zmq_sink(tmp_path: Path) -> None:
    rng = random.Random(0)
    live, replay = free_port(), free_port()
    addresses: dict[str, Any] = {"zmq": f"tcp://*:{live}", "zmq_replay": f"tcp://*:{replay}"}
    settings = PublisherSettings(model="m", worker="1", block_size=BLOCK, with_tokens=True, linger_ms=1, **addresses)
    cache = RadixCache(page_size=BLOCK, enable_kv_cache_events=True)
    prompts = [[rng.randrange(2**32) for _ in range(24)] for _ in range(20)]
    prompts += [prompt[:12] + [rng.randrange(2**32) for _ in range(12)] for prompt in prompts]
    keys = [RadixKey(tokens, "salt" if number % 4 == 3 else None) for number, tokens in enumerate(prompts)]
    async with (
        both(tmp_path) as two,
        EventPublisher(settings, ZmqSink(settings)) as out,
        EventPublisher(settings, MemorySink(two.log)) as own,
    ):
        reach = {"endpoint": f"tcp://127.0.0.1:{live}", "replay_endpoint": f"tcp://127.0.0.1:{replay}"}
        await asyncio.to_thread(two.peer.register, 1, model_name="m", block_size=BLOCK, **reach)

        def publish() -> None:
            events = cache.take_events()
            out.publish(events)
            own.publish(events)

        marks: list[list[int]] = []

        async def is_read() -> bool:
            """Store another page. The peer may subscribe late, and asks for what it missed when the next page comes."""
            marks.append([rng.randrange(2**32) for _ in range(BLOCK)])
            cache.insert(InsertParams(RadixKey(marks[-1]), np.arange(BLOCK)))
            publish()
            return bool((await two.asked(token_ids=marks[0]))[0]["scores"])

        async def is_known() -> bool:
            return (await two._client.post("/query", json={"model_name": "m", "token_ids": []})).is_success

        await async_wait_until(is_known, what="the publisher's first record in the index")
        await async_wait_until(is_read, what="the first page at the peer")
        for number, key in enumerate(keys):
            cache.insert(InsertParams(key, np.arange(24)))
            if number % 5 == 4:
                cache.evict(EvictParams(num_tokens=60))
            publish()
        lengths = [len(cache.match_prefix(MatchPrefixParams(key)).device_indices) for key in keys]
        assert len(set(lengths)) > 2
        for tokens, key, held in zip(prompts, keys, lengths, strict=True):
            wanted = {"1": {"0": held}} if held else {}
            await two.agree(wanted, token_ids=tokens, **({"cache_salt": key.extra_key} if key.extra_key else {}))
