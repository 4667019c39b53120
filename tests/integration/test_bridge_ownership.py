"""Each worker stream of a bridge has one owner, in whatever order engines start, stop and identify themselves."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from bridge import EngineSettings
from kv_events.schema import BATCHES_LOST
from tests.support.bridge.rig import GPU, LiveBridge, on
from tests.support.engines.event_payloads import names_of, payload, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.servers.child_process import free_port
from tests.support.waiting import async_wait_until

TOKENS = [7, 8, 9, 10]
PAGE = on(GPU, names_of(TOKENS))
OTHER_PAGE = on(GPU, names_of(TOKENS[::-1]))
STORE = payload(stored([1], TOKENS), rank=None)
OTHER_STORE = payload(stored([2], TOKENS[::-1]), rank=None)


async def test_a_worker_added_while_it_is_removed_is_read() -> None:
    with ZmqEngine() as engine:
        async with LiveBridge() as bridge:
            await bridge.read(engine)
            engine.send(STORE)
            await bridge.shows(PAGE)
            wanted = bridge.status().engine
            removing = asyncio.create_task(bridge.fleet.remove("w"))
            await asyncio.sleep(0)
            assert await bridge.fleet.add(wanted)
            assert await removing == [wanted]
            await bridge.shows(PAGE)
            assert bridge.status().failure is None


async def test_a_worker_whose_removal_was_cancelled_may_come_back() -> None:
    with ZmqEngine() as engine:
        async with LiveBridge() as bridge:
            await bridge.read(engine)
            engine.send(STORE)
            await bridge.shows(PAGE)
            removing = asyncio.create_task(bridge.fleet.remove("w"))
            await asyncio.sleep(0)
            removing.cancel()
            await bridge.read(engine)
            await bridge.shows(PAGE)


async def test_an_engine_whose_name_another_one_has_is_shown_as_such() -> None:
    with ZmqEngine(replay=False) as engine, ZmqEngine(topic="kv@w@m", replay=False) as pod:
        async with LiveBridge() as bridge:
            await bridge.fleet.add(EngineSettings(endpoint=pod.endpoint, topic="kv@"))
            await asyncio.to_thread(pod.wait_for_readers)
            pod.send(STORE)
            await bridge.shows(PAGE)
            await bridge.read(engine)
            engine.send(OTHER_STORE)
            await async_wait_until(lambda: bridge.counters()["batches"] == 1)
            assert "another owner" in (bridge.status().failure or "")
            assert bridge.view().pages == PAGE


async def test_a_name_is_free_as_soon_as_its_owner_ended() -> None:
    with ZmqEngine(replay=False) as engine, ZmqEngine(topic="kv@w@m", replay=False) as pod:
        async with LiveBridge() as bridge:
            await bridge.read(engine)
            engine.send(STORE)
            await bridge.shows(PAGE)
            await bridge.fleet.add(EngineSettings(endpoint=pod.endpoint, topic="kv@"))
            await asyncio.to_thread(pod.wait_for_readers)
            pod.send(payload(stored([5], [5] * 4), rank=None))
            await async_wait_until(lambda: bridge.fleet.status()[1].counters.batches == 1)
            await bridge.fleet.remove("w")
            await bridge.shows(set())

            def is_taken() -> bool:
                pod.send(OTHER_STORE)
                return bridge.view().pages == OTHER_PAGE

            await async_wait_until(is_taken)
            await bridge.degrades(BATCHES_LOST)


async def test_a_topic_that_names_no_valid_worker_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with (
        ZmqEngine(replay=False, topic="kv@pod@m", connect_to=address) as pod,
        ZmqEngine(replay=False, topic=f"kv@{'x' * 300}@m", connect_to=address) as other,
        caplog.at_level(logging.WARNING),
    ):
        async with LiveBridge() as bridge:
            await bridge.fleet.add(EngineSettings(endpoint=address, bind=True, topic="kv@"))
            for each in (pod, other):
                await asyncio.to_thread(each.wait_for_readers)
            for _ in range(3):
                other.send(STORE)
                pod.send(STORE)
            await bridge.shows(PAGE, worker="pod")
            counters = bridge.fleet.status()[0].counters
            await async_wait_until(lambda: bridge.fleet.status()[0].counters.undecodable == 3)
            assert counters.restarts == 0
            assert "topic 'kv@xxx" in caplog.text


async def test_an_engine_whose_batches_cannot_be_taken_loses_them_and_is_read_on_by_a_failure_put_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ZmqEngine(replay=False) as engine:
        async with LiveBridge() as bridge:
            await bridge.read(engine)
            engine.send(STORE)
            await bridge.shows(PAGE)
            with monkeypatch.context() as patched:
                patched.setattr("bridge.worker_stream.WorkerStream.apply", None)
                engine.send(STORE)
                await bridge.shows(set())
            engine.send(OTHER_STORE)
            await bridge.shows(OTHER_PAGE)
            assert bridge.counters()["lost_batches"] == 1


async def test_a_restart_after_the_clock_was_set_back_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with ZmqEngine() as engine:
        async with LiveBridge() as bridge:
            await bridge.read(engine)
            engine.send(STORE)
            await bridge.shows(PAGE)
            real = time.time_ns
            monkeypatch.setattr(time, "time_ns", lambda: real() - 10**10)
            engine.restart()
            engine.send(OTHER_STORE)
            await bridge.shows(OTHER_PAGE)
