"""Engines that a service reads itself: real sockets, real server."""

import asyncio

from tests.support.engines.event_payloads import payload, removed, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.servers.embedded_service import TOKENS, service
from tests.support.waiting import async_wait_until


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
            return bool((await served.listener())["status"] == status)

        await async_wait_until(lambda: has_status("active"), what="connected")
        await asyncio.to_thread(engine.stop)
        await async_wait_until(lambda: has_status("failed"), what="seen to be away")


async def test_a_restarted_engine_starts_again() -> None:
    with ZmqEngine() as engine:
        async with service() as served:
            await served.register(engine, replay_endpoint=engine.replay_endpoint)
            engine.send(payload(stored([1, 2, 3, 4], TOKENS)))
            await served.holds(16)
            await asyncio.to_thread(engine.restart)
            await asyncio.to_thread(engine.wait_for_readers)
            engine.send(payload(stored([1], TOKENS[:4])))
            await served.holds(4)
