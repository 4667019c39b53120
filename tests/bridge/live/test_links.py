"""Connections of a bridge: foreign peers, workers that vanish, engines that start late, IPv6."""

import asyncio
import socket

import pytest
import zmq

from bridge import ConnectionState, EngineSettings
from kv_events.schema import ENGINE_UNHEARD
from tests.rigs.bridge import LiveBridge, bridged, pages, self_named, store
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.servers.child_process import free_port, has_ipv6
from tests.support.waiting import async_wait_until

pytestmark = pytest.mark.timing("views must be right within seconds after a link heals")

SOON = {"bridge_idle_check_s": 0.1, "bridge_away_s": 0.2}


def call_and_hang_up(port: int, words: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port)) as caller:
        caller.sendall(words)


@pytest.mark.parametrize("stranger", ["a port scanner", "a browser", "a socket of another type"])
async def test_strangers_on_a_bound_address_do_not_make_the_engine_look_away(stranger: str) -> None:
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    with ZmqEngine(replay=False, connect_to=address) as engine, zmq.Context() as context:
        async with LiveBridge(**SOON) as bridge:
            await bridge.fleet.add(EngineSettings(worker="w", model="m", endpoint=address, bind=True))
            await asyncio.to_thread(engine.wait_for_readers)
            if stranger == "a socket of another type":
                dealer = context.socket(zmq.DEALER)
                dealer.connect(address)
                dealer.close(linger=0)
            else:
                call_and_hang_up(port, b"" if stranger == "a port scanner" else b"GET / HTTP/1.1\r\n\r\n" * 9)
            for number in range(40):
                engine.send(store(number))
                await bridge.shows(pages(*range(number + 1)))
                assert bridge.status().state is ConnectionState.CONNECTED
            assert bridge.counters()["restarts"] == 0


async def test_a_worker_that_named_itself_is_forgotten_when_its_connection_is_lost_and_others_are_not() -> None:
    async with self_named("gone", "idle", **SOON) as ((gone, idle), bridge):
        for name, pod in (("gone", gone), ("idle", idle)):
            pod.send(store(1))
            await bridge.shows(pages(1), name)
        await asyncio.to_thread(gone.stop)
        await bridge.shows(set(), "gone")
        (status,) = bridge.fleet.status()
        assert [stream.stream.worker for stream in status.streams] == ["idle"]
        assert (bridge.view("idle").pages, bridge.view("idle").degraded_reason) == (pages(1), "")

        await asyncio.to_thread(gone.restart)
        await asyncio.to_thread(gone.wait_for_readers)
        gone.send(store(2))
        await bridge.shows(pages(2), "gone")


async def test_a_worker_that_named_itself_is_degraded_while_its_connection_is_lost_and_starts_again_after() -> None:
    async with self_named("pod", "other", bridge_idle_check_s=0.1) as ((pod, _), bridge):
        pod.send(store(0))
        await bridge.shows(pages(0), "pod")
        await asyncio.to_thread(pod.restart)
        await bridge.degrades(ENGINE_UNHEARD, "pod")
        assert bridge.view("pod").pages == pages(0)
        pod.seq = 1  # its first batch was missed; the next number is consistent
        await asyncio.to_thread(pod.wait_for_readers)
        pod.send(store(2))
        await bridge.shows(pages(2), "pod")
        assert bridge.fleet.status()[0].counters.restarts == 1


async def test_the_worker_that_was_silent_for_longest_makes_room_for_an_active_one() -> None:
    async with self_named("p0", "p1", "p2", **SOON, bridge_max_workers=2) as (pods, bridge):
        for i in (0, 1):
            pods[i].send(store(1))
            await bridge.shows(pages(1), f"p{i}")

        def is_taken() -> bool:
            pods[1].send(store(1))
            pods[2].send(store(2))
            return bridge.view("p2").pages == pages(2)

        await async_wait_until(is_taken)
        await bridge.shows(set(), "p0")
        assert bridge.view("p1").pages == pages(1)


async def test_an_engine_that_comes_late_is_asked_for_what_it_sent_before_the_connection_stood() -> None:
    async with bridged(settings={"bridge_idle_check_s": 0.1}, is_read=False) as (engine, bridge):
        engine.stop()
        await bridge.fleet.add(
            EngineSettings(worker="w", model="m", endpoint=engine.endpoint, replay_endpoint=engine.replay_endpoint)
        )
        await async_wait_until(lambda: bridge.counters()["failed_replays"] > 0)
        engine.restart()
        for number in range(3):
            engine.send(store(number), "dropped")
        await bridge.shows(pages(0, 1, 2), deadline_s=30)


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("binds", [False, True])
async def test_engines_are_read_over_ipv6(binds: bool) -> None:
    address = f"tcp://[::1]:{free_port()}"
    async with bridged(is_read=False, host="[::1]", connect_to=address if binds else None) as (engine, bridge):
        engine.send(store(0), "dropped")
        await bridge.read(engine, endpoint=address if binds else engine.endpoint, bind=binds)
        engine.send(store(1))
        await bridge.shows(pages(0, 1))
