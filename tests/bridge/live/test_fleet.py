"""Many engines in one bridge: ranks, workers named by topics, engines that come and go, and who owns a stream."""

import asyncio
import logging
import time
from contextlib import ExitStack

import pytest

from bridge import BridgeSettings, ConnectionState, EngineConflictError, EngineSettings, Fleet
from kv_events.errors import InvalidValueError
from kv_events.schema import BATCHES_LOST
from publisher import PublisherSettings
from publisher.sinks.memory import MemorySink
from tests.rigs.bridge import GPU, LiveBridge, bridged, on, self_named
from tests.support.engines.event_payloads import names_of, payload, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.log.hand_fed import HandFed
from tests.support.waiting import async_wait_until

TOKENS = [7, 8, 9, 10]
PAGE = on(GPU, names_of(TOKENS))
OTHER_PAGE = on(GPU, names_of(TOKENS[::-1]))
STORE = payload(stored([1], TOKENS), rank=None)
OTHER_STORE = payload(stored([2], TOKENS[::-1]), rank=None)


def ranked(rank: int) -> bytes:
    return payload(stored([1], TOKENS), rank=rank)


async def test_the_rank_that_a_batch_names_wins_over_the_registered_one() -> None:
    async with bridged() as (engine, bridge):
        engine.send(STORE)
        engine.send(ranked(3))
        await bridge.shows(PAGE, rank=3)
        await bridge.shows(PAGE, rank=0)


async def test_a_rank_that_is_registered_elsewhere_is_not_taken_from_there() -> None:
    with ZmqEngine() as engine, ZmqEngine() as other:
        async with LiveBridge() as bridge:
            await bridge.read(engine, dp_rank=0)
            await bridge.read(other, dp_rank=1)
            engine.send(ranked(1))
            engine.send(payload(stored([2], TOKENS[::-1]), rank=0))
            await bridge.shows(OTHER_PAGE, rank=0)
            assert bridge.view(rank=1).pages == set()
            assert bridge.counters()["foreign_ranks"] == 1


async def test_a_rank_registered_later_belongs_to_who_was_registered() -> None:
    with ZmqEngine() as engine, ZmqEngine() as other:
        async with LiveBridge() as bridge:
            await bridge.read(engine)
            engine.send(ranked(1))
            await bridge.shows(PAGE, rank=1)
            await bridge.read(other, dp_rank=1)
            other.send(payload(stored([2], TOKENS[::-1]), rank=1))
            await bridge.shows(OTHER_PAGE, rank=1)
            engine.send(ranked(1))
            engine.send(STORE)
            await bridge.shows(PAGE, rank=0)
            assert bridge.view(rank=1).pages == OTHER_PAGE
            assert bridge.counters()["foreign_ranks"] == 1


async def test_ranks_are_found_by_counting_ports_up() -> None:
    with ExitStack() as stack:
        engines = [stack.enter_context(ZmqEngine(replay=False))]
        first = int(engines[0].endpoint.rpartition(":")[2])
        engines.append(stack.enter_context(ZmqEngine(replay=False, port=first + 1)))
        async with LiveBridge() as bridge:
            await bridge.fleet.add(EngineSettings(worker="w", model="m", endpoint=engines[0].endpoint, num_ranks=2))
            for rank, engine in enumerate(engines):
                await asyncio.to_thread(engine.wait_for_readers)
                engine.send(STORE)
                await bridge.shows(PAGE, rank=rank)


async def test_workers_may_name_themselves_and_connect_to_us() -> None:
    names = [f"10.0.0.{i}:80" for i in range(3)]
    async with self_named(*names) as (pods, bridge):
        for name, pod in zip(names, pods, strict=True):
            pod.send(STORE)
            await bridge.shows(PAGE, name)
        pods[1].send(OTHER_STORE, "lost")
        pods[1].send(payload(stored([3], [1] * 4)))
        await bridge.shows(on(GPU, names_of([1] * 4)), names[1])  # its own gap
        await bridge.shows(PAGE, names[2])


async def test_adding_and_removing_twice_change_nothing() -> None:
    async with bridged() as (_, bridge):
        wanted = bridge.status().engine
        assert not await bridge.fleet.add(wanted)
        with pytest.raises(EngineConflictError, match="w rank 0 is registered already"):
            await bridge.fleet.add(EngineSettings(worker="w", model="m", endpoint="tcp://127.0.0.1:1"))
        assert await bridge.fleet.remove("w", dp_rank=1) == []
        assert await bridge.fleet.remove("w") == [wanted]
        assert await bridge.fleet.remove("w") == []
        assert bridge.fleet.status() == []


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_removed_engine_holds_nothing_and_may_come_back(is_cancelled: bool) -> None:
    async with bridged() as (engine, bridge):
        engine.send(STORE)
        await bridge.shows(PAGE)
        removing = asyncio.create_task(bridge.fleet.remove("w"))
        if is_cancelled:
            await asyncio.sleep(0)
            removing.cancel()
        else:
            await removing
            await bridge.shows(set())
        await bridge.read(engine)
        await bridge.shows(PAGE)


async def test_an_address_that_cannot_be_used_is_shown_and_tried_again() -> None:
    with ZmqEngine(replay=False) as engine:
        async with LiveBridge() as bridge:
            await bridge.fleet.add(EngineSettings(worker="w", model="m", endpoint=engine.endpoint, bind=True))
            await async_wait_until(lambda: bridge.status().state is ConnectionState.FAILED)
            assert "in use" in (bridge.status().failure or "")
            engine.stop()
            await async_wait_until(lambda: bridge.status().state is not ConnectionState.FAILED)


def test_a_bridge_passes_no_tokens_on_and_reports_it() -> None:
    template = PublisherSettings(model="-", worker="-", block_size=1, with_tokens=True)
    with pytest.raises(InvalidValueError, match="KVSIGHT_WITH_TOKENS"):
        Fleet(BridgeSettings(), template, MemorySink(HandFed().log))


async def test_a_worker_added_while_it_is_removed_is_read() -> None:
    async with bridged() as (engine, bridge):
        engine.send(STORE)
        await bridge.shows(PAGE)
        wanted = bridge.status().engine
        removing = asyncio.create_task(bridge.fleet.remove("w"))
        await asyncio.sleep(0)
        assert await bridge.fleet.add(wanted)
        assert await removing == [wanted]
        await bridge.shows(PAGE)
        assert bridge.status().failure is None


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
    with caplog.at_level(logging.WARNING):
        async with self_named("pod", "x" * 300) as ((pod, other), bridge):
            for _ in range(3):
                other.send(STORE)
                pod.send(STORE)
            await bridge.shows(PAGE, worker="pod")
            await async_wait_until(lambda: bridge.fleet.status()[0].counters.undecodable == 3)
            assert bridge.fleet.status()[0].counters.restarts == 0
            await async_wait_until(lambda: "topic 'kv@xxx" in caplog.text, what="the log line")


async def test_an_engine_whose_batches_cannot_be_taken_loses_them_and_is_read_on_by_a_failure_put_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with bridged(replay=False) as (engine, bridge):
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
    async with bridged() as (engine, bridge):
        engine.send(STORE)
        await bridge.shows(PAGE)
        real = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: real() - 10**10)
        engine.restart()
        engine.send(OTHER_STORE)
        await bridge.shows(OTHER_PAGE)
