"""NVIDIA Dynamo's selection service and kvsight's give the same answers to the same requests."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from selection.settings import SelectionSettings
from tests.rigs.api import embedded
from tests.support.engines.event_payloads import payload, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.servers.peer_indexer import PeerIndexer
from tests.support.waiting import async_wait_until

BLOCK = 4
PROMPT = list(range(1, 33))
TOKENS = {"model_name": "m", "token_ids": PROMPT}
OURS_ONLY = ("endpoint", "candidates", "reason", "reported_requests", "reported_blocks")


class Both:
    """The peer's process, and kvsight's API in this process."""

    def __init__(self, peer: PeerIndexer, client: httpx.AsyncClient) -> None:
        self._peer = peer
        self._client = client

    async def read(self, worker: int, engine: ZmqEngine) -> None:
        """Register an engine with both."""
        body = {"instance_id": worker, "endpoint": engine.endpoint, "model_name": "m", "block_size": BLOCK}
        assert (await self._client.post("/register", json=body)).status_code == 201
        body = {"worker_id": worker, "model_name": "m", "block_size": BLOCK, "endpoint": f"http://w-{worker}"}
        body |= {"kv_events_endpoints": {"0": engine.endpoint}}
        answer = await asyncio.to_thread(self._peer.request, "POST", "/workers", json=body)
        assert answer.status_code == 201, answer.text
        await asyncio.to_thread(engine.wait_for_readers, 2)

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[httpx.Response, httpx.Response]:
        """Return the answers of the peer and of kvsight."""
        given = {} if body is None else {"json": body}
        theirs = await asyncio.to_thread(self._peer.request, method, path, **given)
        return theirs, await self._client.request(method, path, **given)

    async def agree(self, method: str, path: str, body: Any = None) -> Any:
        """Assert that both answer the same, and return the answer."""
        theirs, ours = await self.ask(method, path, body)
        assert ours.status_code == theirs.status_code, (method, path, body, theirs.text, ours.text)
        if theirs.is_success:
            assert plain(ours.json()) == plain(theirs.json()), (method, path, body)
        else:
            assert isinstance(ours.json()["error"], str) == isinstance(theirs.json()["error"], str)
        return ours.json()


def plain(value: Any) -> Any:
    """Remove what only kvsight has. Sort ranks, which the peer lists in any order."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items() if name not in OURS_ONLY}
    if isinstance(value, list) and value and isinstance(value[0], dict) and "worker_id" in value[0]:
        return sorted(map(plain, value), key=lambda each: (each["worker_id"], each["dp_rank"]))
    return list(map(plain, value)) if isinstance(value, list) else value


@asynccontextmanager
async def both(tmp_path: Path, num_workers: int = 3) -> AsyncIterator[tuple[Both, list[ZmqEngine]]]:
    async with AsyncExitStack() as stack:
        peer = stack.enter_context(PeerIndexer(tmp_path / "peer.log", module="dynamo.select_service"))
        client = await stack.enter_async_context(embedded(selection=SelectionSettings(predict_s=0)))
        pair = Both(peer, client)
        engines = [stack.enter_context(ZmqEngine()) for _ in range(num_workers)]
        for worker, engine in enumerate(engines):
            await pair.read(worker, engine)
        yield pair, engines


def pages(first: int, count: int, medium: str) -> Any:
    """Pages of the prompt. The engine's names of pages are their positions."""
    tokens = PROMPT[first * BLOCK : (first + count) * BLOCK]
    return stored(range(first, first + count), tokens, BLOCK, first - 1 if first else None, medium=medium)


async def hold(pair: Both, engines: list[ZmqEngine]) -> None:
    """Let worker 0 hold pages on three tiers, worker 1 most of them on its host, and worker 2 none."""
    engines[0].send(payload(pages(0, 2, "GPU"), pages(2, 2, "CPU_PINNED"), pages(4, 1, "DISK")))
    engines[1].send(payload(pages(0, 1, "GPU"), pages(0, 6, "CPU_PINNED")))

    async def are_known() -> bool:
        theirs, ours = await pair.ask("POST", "/overlap_scores", TOKENS)
        found: list[int] = [each["disk_blocks"] for answer in (theirs, ours) for each in answer.json()["workers"]]
        return sum(found) == 22

    await async_wait_until(are_known)


async def test_tiers_count_alike(tmp_path: Path) -> None:
    async with both(tmp_path) as (pair, engines):
        await hold(pair, engines)
        for more in ([], [7, 7], [7] * 9):
            body = {"model_name": "m", "token_ids": PROMPT + more}
            await pair.agree("POST", "/overlap_scores", body)
            await pair.agree("POST", "/potential_loads", body)
            for worker in range(3):
                await pair.agree("POST", "/select", body | {"allowed_worker_ids": [worker], "selection_id": "s"})
                await pair.agree("POST", "/select", body | {"pinned_worker": {"worker_id": worker, "dp_rank": 0}})
        chosen = await pair.agree("POST", "/select", TOKENS)
        assert chosen["worker_id"] == 1


REFUSED = [
    ("POST", "/select", {"token_ids": [1]}),
    ("POST", "/select", {"model_name": "m"}),
    ("POST", "/select", {"model_name": "nope", "token_ids": [1]}),
    ("POST", "/select", {"model_name": "m", "block_hashes": [1, 2]}),
    ("POST", "/select", {"model_name": "m", "block_hashes": [1, 2], "sequence_hashes": [5]}),
    ("POST", "/select", {"model_name": "m", "token_ids": "x"}),
    ("POST", "/select", {"model_name": "m", "token_ids": [-1]}),
    ("POST", "/select", TOKENS | {"selection_id": 3}),
    ("POST", "/select", TOKENS | {"pinned_worker": 3}),
    ("POST", "/select", TOKENS | {"pinned_worker": {"worker_id": 2}}),
    ("POST", "/select", TOKENS | {"pinned_worker": {"worker_id": 77, "dp_rank": 0}}),
    ("POST", "/select", TOKENS | {"allowed_worker_ids": [99]}),
    ("POST", "/select", TOKENS | {"allowed_worker_ids": []}),
    ("POST", "/select", TOKENS | {"session_context": {}}),
    ("POST", "/select", TOKENS | {"affinity_target": 3}),
    ("POST", "/select", TOKENS | {"strict_priority": -3}),
    ("POST", "/select", TOKENS | {"routing_constraints": 3}),
    ("POST", "/reservations", {"model_name": "m", "selection_id": "never"}),
    ("POST", "/reservations", {"model_name": "m", "worker_id": 1}),
    (
        "POST",
        "/reservations",
        {"model_name": "m", "selection_id": "x", "worker_id": 77, "sequence_hashes": [1], "isl_tokens": 4},
    ),
    ("POST", "/reservations", {"model_name": "m", "selection_id": "x", "worker_id": 1}),
    (
        "POST",
        "/reservations",
        {"model_name": "m", "selection_id": "x", "worker_id": 1, "dp_rank": 5, "sequence_hashes": [1], "isl_tokens": 4},
    ),
    ("POST", "/reservations/never/prefill_complete", None),
    ("POST", "/reservations/never/output_block", {"decay_fraction": 0.5}),
    ("POST", "/reservations/never/output_block", {"decay_fraction": 5}),
    ("DELETE", "/reservations/never", None),
]


async def test_bad_requests_have_the_same_status(tmp_path: Path) -> None:
    async with both(tmp_path) as (pair, _):
        for request in REFUSED:
            await pair.agree(*request)


@pytest.mark.parametrize("seed", range(3))
async def test_loads_stay_alike_through_random_lives_of_requests(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    async with both(tmp_path) as (pair, engines):
        await hold(pair, engines)
        live: list[str] = []
        for number in range(60):
            await step(pair, chance, live, f"r-{number}")
            await pair.agree("GET", "/loads?model_name=m")
        # decays round in the same way only while each request has pages of its own
        await pair.agree("POST", "/potential_loads", TOKENS)


async def step(pair: Both, chance: random.Random, live: list[str], name: str) -> None:
    """Let both do one random thing."""
    prompt = PROMPT[: chance.randrange(0, 33)] + [chance.randrange(50, 60) for _ in range(chance.randrange(0, 9))]
    body = {"model_name": "m", "token_ids": prompt, "selection_id": name}
    place = {"worker_id": chance.randrange(3), "dp_rank": 0}
    match chance.randrange(7) if live else 0:
        case 0:
            await pair.agree("POST", "/select_and_reserve", body | {"pinned_worker": place})
            live.append(name)
        case 1:
            await pair.agree("POST", "/select", body | {"pinned_worker": place})
            await pair.agree("POST", "/reservations", {"model_name": "m", "selection_id": name})
            live.append(name)
        case 2:
            explicit = {"sequence_hashes": [chance.randrange(-9, 9)], "isl_tokens": 6, "effective_prefill_tokens": 5}
            request = {"model_name": "m", "selection_id": name, **place, **explicit}
            await pair.agree("POST", "/reservations", request)
            live.append(name)
        case 3:
            await pair.agree("POST", f"/reservations/{chance.choice(live)}/prefill_complete")
        case 4:
            await pair.agree("POST", f"/reservations/{chance.choice(live)}/output_block", {})
        case 5:
            await pair.agree("DELETE", f"/reservations/{live.pop(chance.randrange(len(live)))}")
        case _:
            theirs, ours = await pair.ask("POST", "/select", body | {"explain": True})
            costs = {each["worker_id"]: each["cost"] for each in ours.json()["candidates"]}
            assert costs[theirs.json()["worker_id"]] == min(costs.values())


async def test_a_decay_counts_alike(tmp_path: Path) -> None:
    async with both(tmp_path, 1) as (pair, _):
        await pair.agree(
            "POST", "/select_and_reserve", {"model_name": "m", "token_ids": PROMPT[:17], "selection_id": "a"}
        )
        for decay in (0.5, 0.1, 0.0, 1.0, None):
            await pair.agree("POST", "/reservations/a/output_block", {} if decay is None else {"decay_fraction": decay})
            await pair.agree("GET", "/loads")
        await pair.agree("DELETE", "/reservations/a")
        await pair.agree("GET", "/loads")
