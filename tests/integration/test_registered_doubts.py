"""The views of registered engines that are away, lost batches, or have another block size."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from bridge import BridgeSettings
from indexer.assembly import create_consumer
from indexer.settings import IndexerSettings
from kv_events.log.memory import MemoryLog
from tests.rigs.api import asking, embedding
from tests.support.engines.event_payloads import payload, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.servers.child_process import free_port
from tests.support.waiting import async_wait_until

TOKENS = list(range(1, 17))


class Service:
    """A service that reads engines itself, without a server."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def register(self, engine: ZmqEngine, **fields: Any) -> None:
        body = {"instance_id": 1, "endpoint": engine.endpoint, "model_name": "m", "block_size": 4, **fields}
        assert (await self._client.post("/register", json=body)).status_code == 201
        await asyncio.to_thread(engine.wait_for_readers)

    async def instance(self) -> dict[str, Any]:
        answer = await self._client.post("/query", json={"model_name": "m", "token_ids": TOKENS})
        return answer.json().get("instances", {}).get("1", {})  # type: ignore[no-any-return]

    async def listener(self, rank: int = 0) -> dict[str, Any]:
        (worker,) = (await self._client.get("/workers")).json()
        return worker["listeners"].get(str(rank), {})  # type: ignore[no-any-return]

    async def shows(self, state: str, reason: str, rank: int = 0) -> None:
        async def so() -> bool:
            listener = await self.listener(rank)
            return (listener.get("state"), listener.get("stale_reason")) == (state, reason)

        await async_wait_until(so, 60, f"{state}: {reason}")

    async def num_in_state(self, state: str) -> float:
        lines = (await self._client.get("/metrics")).text.splitlines()
        name = f'kvsight_workers{{state="{state}"}} '
        return next(float(line.removeprefix(name)) for line in lines if line.startswith(name))


@asynccontextmanager
async def service() -> AsyncIterator[Service]:
    log, indexer = MemoryLog(), IndexerSettings(max_pages=2**16)
    consumer = create_consumer(indexer, log)
    async with asking(embedding(consumer, log, BridgeSettings(bridge_name_pages=10_000))) as client:
        yield Service(client)


async def test_lost_batches_without_a_replay_socket_make_the_worker_stale() -> None:
    with ZmqEngine(replay=False) as engine:
        async with service() as served:
            await served.register(engine)
            engine.send(payload(stored([1, 2], TOKENS[:8])))
            await served.shows("live", "")
            engine.send(payload(stored([3], TOKENS[8:12], parent=2)), "lost")
            engine.send(payload(stored([1, 2], TOKENS[:8])))
            await served.shows("stale", "batches lost")

            async def is_stale_in_answers() -> bool:
                instance = await served.instance()
                return (instance.get("gpu"), instance.get("state")) == (8, "stale")

            await async_wait_until(is_stale_in_answers)
            assert (await served.num_in_state("stale"), await served.num_in_state("live")) == (1, 0)
            assert (await served.listener())["counters"]["resyncs"] == 1  # the initial one; more would not help


async def test_a_dead_engine_is_stale_in_answers_with_growing_age_and_a_reason() -> None:
    with ZmqEngine() as engine:
        async with service() as served:
            await served.register(engine, replay_endpoint=engine.replay_endpoint)
            engine.send(payload(stored([1, 2, 3, 4], TOKENS)))

            async def is_live() -> bool:
                return (await served.instance()).get("state") == "live"

            await async_wait_until(is_live)
            await asyncio.to_thread(engine.stop)
            await served.shows("stale", "engine not heard")
            first = await served.instance()
            assert (first["state"], first["gpu"]) == ("stale", 16)
            listener = await served.listener()
            assert (listener["status"], listener["failure"]) == ("failed", f"{engine.endpoint}: the connection is lost")

            async def is_heartbeat_in() -> bool:
                return bool((await served.listener())["seq"] >= listener["seq"] + 2)

            await async_wait_until(is_heartbeat_in)
            assert (await served.instance())["age_ms"] >= first["age_ms"] + 2000  # no heartbeat refreshed it


async def test_a_rank_that_only_batches_name_has_its_engines_link() -> None:
    with ZmqEngine(replay=False) as engine:
        async with service() as served:
            await served.register(engine)
            engine.send(payload(stored([1, 2], TOKENS[:8]), rank=3))
            await served.shows("live", "", rank=3)
            listener = await served.listener(3)
            assert (listener["status"], listener["endpoint"]) == ("active", engine.endpoint)
            await asyncio.to_thread(engine.stop)
            await served.shows("stale", "engine not heard", rank=3)
            listener = await served.listener(3)
            assert (listener["status"], listener["failure"]) == ("failed", f"{engine.endpoint}: the connection is lost")


async def test_an_engine_of_another_block_size_than_registered_is_stale_and_reports_it() -> None:
    with ZmqEngine() as engine:
        async with service() as served:
            await served.register(engine, block_size=16, replay_endpoint=engine.replay_endpoint)
            engine.send(payload(stored([1, 2, 3, 4], TOKENS)))
            await served.shows("stale", "block size 4, registered with 16")
            assert (await served.listener())["status"] == "active"


async def test_a_replay_socket_that_refuses_is_a_warning_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.stream.subscriber._REPLAY_RETRY_S", 0.1)
    monkeypatch.setattr("bridge.stream.engine_stream._REPLAY_PAUSE_S", 0.1)
    port = free_port()
    with ZmqEngine(replay=False) as engine:
        async with service() as served:

            async def shown(num_pages: int) -> str | None:
                listener = await served.listener()
                assert (listener["status"], listener["failure"]) == ("active", None)
                return listener["warning"] if sum(listener["pages"].values()) == num_pages else "other pages"

            async def is_refused() -> bool:
                return await shown(1) == (
                    f"no replay from tcp://127.0.0.1:{port}: no connection for 1.0 s; missed events cannot be fetched: "
                    "a gap drops all pages, and after a late start earlier pages are not known"
                )

            async def is_answered() -> bool:
                engine.send(store)  # it is never idle
                return await shown(1) is None

            await served.register(engine, replay_endpoint=f"tcp://127.0.0.1:{port}")
            store = payload(stored([1], TOKENS[:4]))
            engine.send(store)
            await async_wait_until(is_refused, 60, "the warning")
            await served.shows("live", "")
            engine.open_replay(port)
            await async_wait_until(is_answered, 60, "no warning")
            await served.shows("live", "")
