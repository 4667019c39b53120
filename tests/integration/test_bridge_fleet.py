"""Many engines in one bridge: ranks, workers identified by topics, engines that are added and removed."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from bridge import BridgeSettings, ConnectionState, EngineConflictError, EngineSettings, Fleet
from indexer.views import ViewState
from kv_events.errors import InvalidValueError
from publisher import PublisherSettings
from publisher.sinks import MemorySink
from tests.support.bridge.rig import GPU, LiveBridge, on
from tests.support.engines.event_payloads import names_of, payload, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.log.hand_fed import HandFed
from tests.support.servers.child_process import free_port
from tests.support.waiting import async_wait_until

TOKENS = [7, 8, 9, 10]
PAGE = on(GPU, names_of(TOKENS))
OTHER_PAGE = on(GPU, names_of(TOKENS[::-1]))
STORE = payload(stored([1], TOKENS), rank=None)


def ranked(rank: int) -> bytes:
    return payload(stored([1], TOKENS), rank=rank)


async def test_the_rank_that_a_batch_names_wins_over_the_registered_one() -> None:
    with ZmqEngine() as engine:
        async with LiveBridge() as bridge:
            await bridge.read(engine)
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
    address = f"tcp://127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        pods = [
            stack.enter_context(ZmqEngine(replay=False, topic=f"kv@10.0.0.{i}:80@m", connect_to=address))
            for i in range(3)
        ]
        async with LiveBridge() as bridge:
            await bridge.fleet.add(EngineSettings(endpoint=address, bind=True, topic="kv@"))
            for i, pod in enumerate(pods):
                await asyncio.to_thread(pod.wait_for_readers)
                pod.send(STORE)
                await bridge.shows(PAGE, worker=f"10.0.0.{i}:80")
            pods[1].send(payload(stored([2], TOKENS[::-1])), "lost")
            pods[1].send(payload(stored([3], [1] * 4)))
            await bridge.shows(on(GPU, names_of([1] * 4)), worker="10.0.0.1:80")  # its own gap
            await bridge.shows(PAGE, worker="10.0.0.2:80")


async def test_adding_and_removing_twice_change_nothing() -> None:
    with ZmqEngine() as engine:
        async with LiveBridge() as bridge:
            await bridge.read(engine)
            wanted = bridge.status().engine
            assert not await bridge.fleet.add(wanted)
            with pytest.raises(EngineConflictError, match="w rank 0 is registered already"):
                await bridge.fleet.add(EngineSettings(worker="w", model="m", endpoint="tcp://127.0.0.1:1"))
            assert await bridge.fleet.remove("w", dp_rank=1) == []
            assert await bridge.fleet.remove("w") == [wanted]
            assert await bridge.fleet.remove("w") == []
            assert bridge.fleet.status() == []


async def test_a_removed_engine_holds_nothing_and_may_come_back() -> None:
    with ZmqEngine() as engine:
        async with LiveBridge() as bridge:
            await bridge.read(engine)
            engine.send(STORE)
            await bridge.shows(PAGE)
            await bridge.fleet.remove("w")
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


async def test_a_block_size_that_is_known_beforehand_shows_the_worker_before_its_first_page() -> None:
    with ZmqEngine() as engine:
        async with LiveBridge() as bridge:
            await bridge.read(engine, block_size=4)
            await async_wait_until(lambda: bridge.view().epoch > 0)


async def test_the_routers_view_of_a_bridged_engine_is_live() -> None:
    fed = HandFed()
    template = PublisherSettings(model="-", worker="-", block_size=1)
    with ZmqEngine() as engine:
        async with Fleet(BridgeSettings(), template, MemorySink(fed.log)) as fleet, fed.consumer.running():
            await fleet.add(EngineSettings(worker="w", model="m", endpoint=engine.endpoint))
            await asyncio.to_thread(engine.wait_for_readers)
            engine.send(payload(stored(range(1, 5), range(16))))

            def view_is_right() -> bool:
                views = fed.consumer.namespaces.views
                return [(view.state, view.num_pages[0]) for view in views] == [(ViewState.LIVE, 4)]

            await async_wait_until(view_is_right)


def test_a_bridge_passes_no_tokens_on_and_reports_it() -> None:
    template = PublisherSettings(model="-", worker="-", block_size=1, with_tokens=True)
    with pytest.raises(InvalidValueError, match="KVSIGHT_WITH_TOKENS"):
        Fleet(BridgeSettings(), template, MemorySink(HandFed().log))
