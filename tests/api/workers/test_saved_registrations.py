"""Registrations that survive a service: loading, failures to load, and conflicts between services."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from api.workers.registrations import SavedRegistrations
from indexer.assembly import create_store
from indexer.settings import IndexerSettings
from tests.support.engines.event_payloads import payload, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.http_checks import check_problem
from tests.support.servers.embedded_service import TOKENS, service
from tests.support.servers.redis_server import RedisServer
from tests.support.waiting import async_wait_for, async_wait_until


@pytest.fixture(params=["folder", "redis"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Settings of a service that saves its registrations."""
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
        engine.send(payload(stored([3], TOKENS[8:12], parent=2)))  # nothing listens there
        async with service(**kept) as served:
            await served.holds(12)
            (worker,) = (await served.client.get("/workers")).json()
            assert worker["instance_id"] == "1"
            again = {"instance_id": 1, "endpoint": engine.endpoint, "model_name": "m", "block_size": 4}
            again["replay_endpoint"] = engine.replay_endpoint
            assert (await served.client.post("/register", json=again)).status_code == 200


async def test_registrations_are_saved_once_their_store_is_back(redis_server: RedisServer) -> None:
    settings = {"redis": redis_server.url}
    with ZmqEngine() as engine:
        async with service(**settings) as served:
            await async_wait_until(served.is_ready, what="ready")
            redis_server.kill()
            assert (await served.register(engine)).status_code == 201
            redis_server.restart()

            async def is_saved() -> bool:
                store = create_store(IndexerSettings(redis=redis_server.url), "registrations", "")
                assert store is not None
                data = await store.load()
                await store.close()
                return data is not None and engine.endpoint.encode() in data

            await async_wait_until(is_saved, 60, "saved")


async def test_registrations_that_do_not_read_back_stop_nothing(tmp_path: Path) -> None:
    (tmp_path / "registrations.json").write_bytes(b'{"engines":[{"endpoint":1},{"nothing":')
    async with service(snapshot_dir=tmp_path) as served:
        assert (await served.client.get("/workers")).json() == []
    kept = (
        b'{"engines":[{"endpoint":"bad","worker":"a","model":"m"},{"endpoint":"tcp://h:1","worker":"b","model":"m"}]}'
    )
    (tmp_path / "registrations.json").write_bytes(kept)
    async with service(snapshot_dir=tmp_path) as served:
        await async_wait_for(served.workers, lambda found: found == [("b", "m")], what="the sound one is read")


async def test_a_rank_that_only_batches_named_does_not_outlive_its_engine(kept: dict[str, Any]) -> None:
    with ZmqEngine(replay=False) as engine:
        async with service(**kept) as served:
            await served.register(engine)
            engine.send(payload(stored([1, 2, 3, 4], TOKENS), rank=3))
            await served.holds(16)
        await asyncio.to_thread(engine.stop)
        async with service(**kept) as served:
            await async_wait_for(served.workers, bool, what="registered again")
            assert await served.gpu(TOKENS) == 0
            (worker,) = (await served.client.get("/workers")).json()
            assert list(worker["listeners"]) == ["0"]


async def test_a_service_is_ready_once_what_its_engines_still_keep_is_in_the_answers(kept: dict[str, Any]) -> None:
    with ZmqEngine() as engine, ZmqEngine(replay=False) as silent:
        async with service(**kept) as served:
            await served.register(engine, replay_endpoint=engine.replay_endpoint)
            await served.register(silent, instance=2)
        prompt = list(range(1, 4001))
        for page in range(1000):  # nothing listens there
            tokens = prompt[4 * page : 4 * page + 4]
            engine.send(payload(stored([page + 1], tokens, parent=page or None)))
        async with service(**kept) as served:
            await async_wait_until(served.is_ready, 60, "ready")
            assert await served.gpu(prompt) == 4000


async def test_an_engine_that_is_not_there_keeps_a_service_from_being_ready_only_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("api.workers.registrations._FIRST_READ_TIMEOUT_S", 0.5)
    async with service(snapshot_dir=tmp_path) as served:
        body = {"instance_id": 1, "endpoint": "tcp://127.0.0.1:1", "model_name": "m", "block_size": 4}
        assert (await served.client.post("/register", json=body)).status_code == 201
    async with service(snapshot_dir=tmp_path) as served:
        ready = await async_wait_for(
            lambda: served.client.get("/ready"),
            lambda answer: "1 registered engine still to be read" in answer.text,
            what="not ready",
        )
        check_problem(ready, 503)
        await async_wait_until(served.is_ready, what="ready all the same")
    assert "default/m/1/0 is registered, but could not be read" in caplog.text


@contextmanager
def store_unavailable(folder: Path) -> Iterator[None]:
    """Make the saved registrations unreadable inside the block."""
    kept = folder / "registrations.json"
    kept.rename(folder / "aside")
    kept.symlink_to(kept)  # unlike a folder, it is replaced at once: without a file, nothing was saved
    yield
    (folder / "aside").replace(kept)


async def test_while_registrations_cannot_be_read_none_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.workers.registrations._LOAD_TIMEOUT_S", 0.1)
    monkeypatch.setattr("api.workers.registrations._RETRY_S", 0.1)
    with ZmqEngine() as engine:
        async with service(snapshot_dir=tmp_path) as served:
            await served.register(engine)
        with store_unavailable(tmp_path):
            serving = service(snapshot_dir=tmp_path)
            served = await serving.__aenter__()
            body = {"instance_id": 1, "endpoint": engine.endpoint, "model_name": "m", "block_size": 4}
            for path in ("/register", "/unregister"):
                answer = await served.client.post(path, json=body)
                assert "saved registrations" in check_problem(answer, 503)["error"]
                assert answer.headers["retry-after"] == "1"
            assert not await served.is_ready()
        try:
            await async_wait_until(served.is_ready, what="the store is back")
            other = {**body, "model_name": "other"}
            check_problem(await served.client.post("/register", json=other), 409)
            assert (await served.client.post("/unregister", json=body)).status_code == 200
        finally:
            await serving.__aexit__(None, None, None)
    async with service(snapshot_dir=tmp_path) as served:
        await async_wait_until(served.is_ready, what="ready")
        assert (await served.client.get("/workers")).json() == []


async def test_an_unexpected_fault_is_logged_once_and_does_not_end_the_reading(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, faults = SavedRegistrations.load, iter([ValueError("odd")] * 3)

    async def faulty(saved: SavedRegistrations) -> Any:
        for fault in faults:
            raise fault
        return await load(saved)

    monkeypatch.setattr(SavedRegistrations, "load", faulty)
    monkeypatch.setattr("api.workers.registrations._RETRY_S", 0.01)
    async with service(snapshot_dir=tmp_path) as served:
        await async_wait_until(served.is_ready, what="ready")
    assert (list(faults), caplog.text.count("ValueError: odd")) == ([], 1)


async def test_saved_registrations_that_cannot_be_found_are_one_line_and_do_not_end_the_saving(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.workers.registrations._RETRY_S", 0.01)
    redis = Redis.from_url(redis_server.url)
    await redis.set("kvsight:registrations:current", "neither a name nor a number")
    with ZmqEngine() as engine:
        async with service(redis=redis_server.url) as served:
            said = "kvsight:registrations:current has b'neither a name nor a number', which names no snapshot"
            ready = await async_wait_for(
                lambda: served.client.get("/ready"), lambda answer: said in answer.text, what="the reason"
            )
            check_problem(ready, 503)

            async def num_looks() -> int:
                return int((await redis.info("commandstats"))["cmdstat_get"]["calls"])

            before = await num_looks()
            await async_wait_for(num_looks, lambda looks: looks > before + 2, what="further attempts")
            assert caplog.text.count(said) == 1
            await redis.delete("kvsight:registrations:current")
            await async_wait_until(served.is_ready, what="ready")
            assert (await served.register(engine)).status_code == 201
        async with service(redis=redis_server.url) as served:
            await async_wait_until(served.is_ready, what="ready")
            assert len((await served.client.get("/workers")).json()) == 1
    await redis.aclose()


async def test_two_services_in_one_place_do_not_overwrite_each_other(
    kept: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with ZmqEngine() as one, ZmqEngine() as other:
        async with service(**kept) as first, service(**kept) as second:
            await async_wait_until(first.is_ready, what="ready")
            await async_wait_until(second.is_ready, what="ready")
            await first.register(one)
            assert "--snapshot-dir" not in caplog.text
            await second.register(other, instance=2)
            assert "--snapshot-dir" in caplog.text
            assert "kvsight_registration_save_failures_total 0.0" not in (await second.client.get("/metrics")).text
        async with service(**kept) as served:
            await async_wait_until(served.is_ready, what="ready")
            assert await served.workers() == [("1", "m")]


async def test_what_cannot_be_registered_together_is_not_read_back_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entries = [
        {"endpoint": "tcp://h:1", "worker": "a", "model": "m", "block_size": 4},
        {"endpoint": "tcp://h:1", "worker": "a", "model": "other", "block_size": 4},
        {"endpoint": "tcp://h:1", "worker": "b", "model": "third", "block_size": 4},
    ]
    (tmp_path / "registrations.json").write_bytes(msgspec.json.encode({"engines": entries}))
    async with service(snapshot_dir=tmp_path, max_namespaces=1) as served:
        await async_wait_for(served.workers, lambda found: found == [("a", "m")], what="the first is read")
    assert "default/other/a/0 is dropped: instance a is already registered for model=m" in caplog.text
    assert "default/third/b/0 is dropped: index full: at most 1 namespaces (KVSIGHT_MAX_NAMESPACES)" in caplog.text
