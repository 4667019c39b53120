"""Engines that a service reads itself: their pages in answers, their states, and what they cost."""

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.engines.event_payloads import payload, removed, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.servers.child_process import free_port
from tests.support.servers.embedded_service import TOKENS, Service, reading, service
from tests.support.servers.service_process import ServiceProcess
from tests.support.waiting import async_wait_for, async_wait_until


async def test_a_registered_engine_is_in_the_answers_until_it_is_unregistered() -> None:
    async with reading() as (served, engine):
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


async def test_ranks_that_only_the_batches_named_go_with_the_engine() -> None:
    async with reading() as (served, engine):
        engine.send(payload(stored([1, 2], TOKENS[:8]), rank=3))
        await served.holds(8)
        await served.client.post("/unregister", json={"instance_id": 1, "model_name": "m"})
        assert (await served.client.get("/workers")).json() == []


async def test_a_salt_of_the_registration_holds_where_events_name_none() -> None:
    async with reading(modelname="m", additionalsalt="s", lora_name="ad") as (served, engine):
        engine.send(payload(stored([1, 2], TOKENS[:8])))
        await served.holds(8, cache_salt="s", lora_name="ad")
        engine.send(payload(stored([5, 6], TOKENS[8:], cache_salt="own"), form="map"))
        await served.holds(8, TOKENS[8:], cache_salt="own", lora_name="ad")
        assert await served.gpu(TOKENS) == 0


async def shows(served: Service, state: str, reason: str, rank: int = 0) -> dict[str, Any]:
    """Wait until the stream of a rank is in a state, and return it."""
    return await async_wait_for(
        lambda: served.listener(rank),
        lambda found: (found.get("state"), found.get("stale_reason")) == (state, reason),
        *(60, f"{state}: {reason}"),
    )


async def instance(served: Service) -> dict[str, Any]:
    answer = await served.client.post("/query", json={"model_name": "m", "token_ids": TOKENS})
    return answer.json().get("instances", {}).get("1", {})  # type: ignore[no-any-return]


async def test_a_dead_engine_is_stale_in_answers_with_growing_age_and_a_reason() -> None:
    async with reading(with_replay=True) as (served, engine):
        engine.send(payload(stored([1, 2, 3, 4], TOKENS)))
        await async_wait_for(lambda: instance(served), lambda found: found.get("state") == "live")
        await asyncio.to_thread(engine.stop)
        await shows(served, "stale", "engine not heard")
        first = await instance(served)
        assert (first["state"], first["gpu"]) == ("stale", 16)
        found = await served.listener()
        assert (found["status"], found["failure"]) == ("failed", f"{engine.endpoint}: the connection is lost")
        await async_wait_for(served.listener, lambda later: later["seq"] >= found["seq"] + 2)
        assert (await instance(served))["age_ms"] >= first["age_ms"] + 2000  # no heartbeat refreshed it


async def test_a_rank_that_only_batches_name_has_its_engines_link() -> None:
    async with reading(ZmqEngine(replay=False)) as (served, engine):
        engine.send(payload(stored([1, 2], TOKENS[:8]), rank=3))
        found = await shows(served, "live", "", rank=3)
        assert (found["status"], found["endpoint"]) == ("active", engine.endpoint)
        await asyncio.to_thread(engine.stop)
        found = await shows(served, "stale", "engine not heard", rank=3)
        assert (found["status"], found["failure"]) == ("failed", f"{engine.endpoint}: the connection is lost")


async def test_a_replay_socket_that_refuses_is_a_warning_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.stream.subscriber._REPLAY_RETRY_S", 0.1)
    monkeypatch.setattr("bridge.stream.engine_stream._REPLAY_PAUSE_S", 0.1)
    port = free_port()
    with ZmqEngine(replay=False) as engine:
        async with service() as served:

            async def shown(num_pages: int) -> str | None:
                found = await served.listener()
                assert (found["status"], found["failure"]) == ("active", None)
                return found["warning"] if sum(found["pages"].values()) == num_pages else "other pages"

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
            await shows(served, "live", "")
            engine.open_replay(port)
            await async_wait_until(is_answered, 60, "no warning")
            await shows(served, "live", "")


NUM_ENGINES = 30
MOST_BYTES = 500 * 2**10
"""For each engine. It is 100 to 150 KiB on a quiet machine."""


@pytest.mark.timing("registrations must not hold the event loop")
def test_engines_that_come_and_go_leave_no_memory_behind(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service:
        service.wait_until_ready()
        _register_and_unregister(service, 1)  # what the first registration of a process needs
        before = _own_bytes(service)
        for _ in range(2):
            _register_and_unregister(service, NUM_ENGINES)
        assert _own_bytes(service) - before < NUM_ENGINES * MOST_BYTES


def _register_and_unregister(service: ServiceProcess, num_engines: int) -> None:
    workers = [{"instance_id": number, "model_name": "m"} for number in range(num_engines)]
    for worker in workers:
        body = {**worker, "endpoint": "tcp://127.0.0.1:1", "block_size": 16}
        assert service.post("/register", body).status_code == 201
    for worker in workers:
        assert service.post("/unregister", worker).status_code == 200


def _own_bytes(service: ServiceProcess) -> int:
    memory = psutil.Process(service.pid).memory_info()
    return int(memory.rss - memory.shared)
