"""Engines that a service reads itself: real sockets, real server, restarts of both sides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_events import payload, removed, stored
from redis_server import RedisServer
from waiting import async_wait_until
from zmq_engine import ZmqEngine

from api.app import create_app
from api.registrations import Registrations
from api.server import running_server
from api.settings import ApiSettings, RegistrationSettings
from indexer.assembly import create_consumer, create_store
from indexer.settings import IndexerSettings
from kv_events.memory_log import MemoryLog
from publisher.bridge import BridgeSettings

TOKENS = list(range(1, 17))


class Service:
    """One process's worth of it, on a real port."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def register(self, engine: ZmqEngine, instance: int | str = 1, **fields: Any) -> httpx.Response:
        """In the running peer's dialect, unless the fields say otherwise; waits until the engine is listened to."""
        body = {"instance_id": instance, "endpoint": engine.endpoint, "block_size": 4, **fields}
        if "modelname" not in body:
            body["model_name"] = "m"
        answer = await self.client.post("/register", json=body)
        if answer.is_success:
            await asyncio.to_thread(engine.wait_for_readers)
        return answer

    async def gpu(self, tokens: list[int], instance: int | str = 1, **fields: Any) -> int:
        """Tokens that an instance holds on its device."""
        answer = await self.client.post("/query", json={"model_name": "m", "token_ids": tokens, **fields})
        return answer.json().get("instances", {}).get(str(instance), {}).get("gpu", 0)  # type: ignore[no-any-return]

    async def holds(self, num_tokens: int, tokens: list[int] = TOKENS, **fields: Any) -> None:
        async def so() -> bool:
            return await self.gpu(tokens, **fields) == num_tokens

        await async_wait_until(so, 15, f"{num_tokens} tokens on the device")

    async def listener(self, rank: int = 0) -> dict[str, Any]:
        (worker,) = (await self.client.get("/workers")).json()
        return worker["listeners"][str(rank)]  # type: ignore[no-any-return]


@asynccontextmanager
async def service(**settings: Any) -> AsyncIterator[Service]:
    indexer = IndexerSettings(max_pages=2**16, **settings)
    log = MemoryLog(first_offset=10**6)
    consumer = create_consumer(indexer, log)
    store = create_store(indexer, "registrations")
    bridge = BridgeSettings(bridge_name_pages=10_000, bridge_idle_check_s=0.2)
    registrations = Registrations(consumer, log, RegistrationSettings(), bridge, store)
    settings_of_api = ApiSettings(port=0)
    app = create_app(consumer, settings_of_api, registrations)
    async with running_server(app, settings_of_api) as url, httpx.AsyncClient(base_url=url) as client:
        yield Service(client)


async def test_a_registered_engine_is_in_the_answers_until_it_is_unregistered() -> None:
    with ZmqEngine() as engine:
        async with service() as served:
            assert (await served.register(engine)).status_code == 201
            engine.send(payload(stored([1, 2, 3, 4], TOKENS)))
            await served.holds(16)
            engine.send(payload(removed([4])))
            await served.holds(12)
            listener = await served.listener()
            assert (listener["status"], listener["state"], listener["endpoint"]) == ("active", "live", engine.endpoint)
            assert (await served.client.post("/unregister", json={"instance_id": 1, "model_name": "m"})).is_success
            answer = await served.client.post("/query", json={"model_name": "m", "token_ids": TOKENS})
            assert "1" not in answer.json().get("instances", {})
            assert (await served.client.get("/workers")).json() == []


async def test_an_engine_may_come_back_under_the_same_name_and_is_read_from_the_beginning() -> None:
    with ZmqEngine() as engine:
        async with service() as served:
            await served.register(engine, replay_endpoint=engine.replay_endpoint)
            engine.send(payload(stored([1, 2], TOKENS[:8])))
            await served.holds(8)
            await served.client.post("/unregister", json={"instance_id": 1, "model_name": "m"})
            await served.register(engine, replay_endpoint=engine.replay_endpoint)
            await served.holds(8)


async def test_one_rank_is_unregistered_and_the_others_stay() -> None:
    with ZmqEngine() as first, ZmqEngine() as second:
        async with service() as served:
            await served.register(first)
            await served.register(second, dp_rank=1)
            first.send(payload(stored([1, 2], TOKENS[:8])))
            second.send(payload(stored([1, 2, 3], TOKENS[:12]), rank=1))
            await served.holds(12)
            await served.client.post("/unregister", json={"instance_id": 1, "model_name": "m", "dp_rank": 1})
            assert await served.gpu(TOKENS) == 8


async def test_ranks_that_only_the_batches_named_go_with_the_engine() -> None:
    with ZmqEngine() as engine:
        async with service() as served:
            await served.register(engine)
            engine.send(payload(stored([1, 2], TOKENS[:8]), rank=3))
            await served.holds(8)
            await served.client.post("/unregister", json={"instance_id": 1, "model_name": "m"})
            assert (await served.client.get("/workers")).json() == []


async def test_a_salt_of_the_registration_holds_where_events_name_none() -> None:
    with ZmqEngine() as engine:
        async with service() as served:
            await served.register(engine, modelname="m", additionalsalt="s", lora_name="ad")
            engine.send(payload(stored([1, 2], TOKENS[:8])))
            await served.holds(8, cache_salt="s", lora_name="ad")
            engine.send(payload(stored([5, 6], TOKENS[8:], cache_salt="own"), form="map"))
            await served.holds(8, TOKENS[8:], cache_salt="own", lora_name="ad")
            assert await served.gpu(TOKENS) == 0


async def test_an_engine_that_is_not_there_is_pending_and_one_that_went_has_failed() -> None:
    engine = ZmqEngine()
    async with service() as served:
        body = {"instance_id": 1, "endpoint": "tcp://127.0.0.1:1", "model_name": "m", "block_size": 4}
        await served.client.post("/register", json=body)
        assert (await served.listener())["status"] == "pending"
        await served.client.post("/unregister", json=body)
        await served.register(engine)

        async def has_status(status: str) -> bool:
            return (await served.listener())["status"] == status

        await async_wait_until(lambda: has_status("active"), what="connected")
        await asyncio.to_thread(engine.stop)
        await async_wait_until(lambda: has_status("failed"), what="seen to be away")


@pytest.fixture(params=["folder", "redis"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Settings of a service that keeps what it is told."""
    if request.param == "folder":
        return {"snapshot_dir": tmp_path}
    server: RedisServer = request.getfixturevalue("redis_server")
    return {"redis": server.url}


async def test_registrations_outlive_the_service(kept: dict[str, Any]) -> None:
    with ZmqEngine() as engine, ZmqEngine() as gone:
        async with service(**kept) as served:
            await served.register(engine, replay_endpoint=engine.replay_endpoint)
            await served.register(gone, instance=2)
            engine.send(payload(stored([1, 2], TOKENS[:8])))
            await served.holds(8)
            await served.client.post("/unregister", json={"instance_id": 2, "model_name": "m"})
        engine.send(payload(stored([3], TOKENS[8:12], parent=2)))  # nobody listens
        async with service(**kept) as served:
            await served.holds(12)
            (worker,) = (await served.client.get("/workers")).json()
            assert worker["instance_id"] == "1"
            again = {"instance_id": 1, "endpoint": engine.endpoint, "model_name": "m", "block_size": 4}
            again["replay_endpoint"] = engine.replay_endpoint
            assert (await served.client.post("/register", json=again)).status_code == 200


async def test_a_restarted_engine_begins_anew() -> None:
    with ZmqEngine() as engine:
        async with service() as served:
            await served.register(engine, replay_endpoint=engine.replay_endpoint)
            engine.send(payload(stored([1, 2, 3, 4], TOKENS)))
            await served.holds(16)
            await asyncio.to_thread(engine.restart)
            await asyncio.to_thread(engine.wait_for_readers)
            engine.send(payload(stored([1], TOKENS[:4])))
            await served.holds(4)


async def test_registrations_are_saved_once_their_store_is_back(redis_server: RedisServer) -> None:
    settings = {"redis": redis_server.url}
    with ZmqEngine() as engine:
        async with service(**settings) as served:
            await async_wait_until(lambda: _is_ready(served), what="ready")
            redis_server.kill()
            assert (await served.register(engine)).status_code == 201
            redis_server.restart()

            async def is_saved() -> bool:
                store = create_store(IndexerSettings(redis=redis_server.url), "registrations")
                assert store is not None
                data = await store.load()
                await store.close()
                return data is not None and engine.endpoint.encode() in data

            await async_wait_until(is_saved, 20, "saved")


async def test_registrations_that_do_not_read_back_stop_nothing(tmp_path: Path) -> None:
    (tmp_path / "registrations.json").write_bytes(b'{"engines":[{"endpoint":1},{"nothing":')
    async with service(snapshot_dir=tmp_path) as served:
        assert (await served.client.get("/workers")).json() == []
    kept = (
        b'{"engines":[{"endpoint":"bad","worker":"a","model":"m"},{"endpoint":"tcp://h:1","worker":"b","model":"m"}]}'
    )
    (tmp_path / "registrations.json").write_bytes(kept)
    async with service(snapshot_dir=tmp_path) as served:

        async def names() -> bool:
            return [each["instance_id"] for each in (await served.client.get("/workers")).json()] == ["b"]

        await async_wait_until(names, what="the sound one is read")


async def _is_ready(served: Service) -> bool:
    return (await served.client.get("/ready")).is_success
