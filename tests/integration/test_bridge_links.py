"""Connections of a bridge: foreign peers, workers that vanish, engines that start late, IPv6."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack

import pytest
import zmq

from bridge import ConnectionState, EngineSettings
from kv_events.schema import ENGINE_UNHEARD
from tests.support.bridge.rig import GPU, LiveBridge, on
from tests.support.engines.event_payloads import names_of, payload, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.servers.child_process import free_port, has_ipv6
from tests.support.waiting import async_wait_until

pytestmark = pytest.mark.timing("views must be right within seconds after a link heals")

IDLE = {"bridge_idle_check_s": 30.0}
SOON = {"bridge_idle_check_s": 0.1, "bridge_away_s": 0.2}


def prompt(number: int) -> list[int]:
    """Tokens of one page."""
    return [1000 + number] * 4


def store(number: int) -> bytes:
    """Return a batch that stores one page."""
    return payload(stored([number], prompt(number)), rank=None)


def pages(*numbers: int) -> set[tuple[int, int]]:
    return on(GPU, [names_of(prompt(number))[0] for number in numbers])


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
    address = f"tcp://127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        gone, idle = (
            stack.enter_context(ZmqEngine(replay=False, topic=f"kv@{name}@m", connect_to=address))
            for name in ("gone", "idle")
        )
        async with LiveBridge(**SOON) as bridge:
            await bridge.fleet.add(EngineSettings(endpoint=address, bind=True, topic="kv@"))
            for name, pod in (("gone", gone), ("idle", idle)):
                await asyncio.to_thread(pod.wait_for_readers)
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
    address = f"tcp://127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        pod, other = (
            stack.enter_context(ZmqEngine(replay=False, topic=f"kv@{name}@m", connect_to=address))
            for name in ("pod", "other")
        )
        async with LiveBridge(bridge_idle_check_s=0.1) as bridge:
            await bridge.fleet.add(EngineSettings(endpoint=address, bind=True, topic="kv@"))
            await asyncio.to_thread(other.wait_for_readers)
            await asyncio.to_thread(pod.wait_for_readers)
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
    address = f"tcp://127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        pods = [stack.enter_context(ZmqEngine(replay=False, topic=f"kv@p{i}@m", connect_to=address)) for i in range(3)]
        async with LiveBridge(**SOON, bridge_max_workers=2) as bridge:
            await bridge.fleet.add(EngineSettings(endpoint=address, bind=True, topic="kv@"))
            for i in (0, 1):
                await asyncio.to_thread(pods[i].wait_for_readers)
                pods[i].send(store(1))
                await bridge.shows(pages(1), f"p{i}")
            await asyncio.to_thread(pods[2].wait_for_readers)

            def is_taken() -> bool:
                pods[1].send(store(1))
                pods[2].send(store(2))
                return bridge.view("p2").pages == pages(2)

            await async_wait_until(is_taken)
            await bridge.shows(set(), "p0")
            assert bridge.view("p1").pages == pages(1)


async def test_an_engine_that_comes_late_is_asked_for_what_it_sent_before_the_connection_stood() -> None:
    with ZmqEngine() as engine:
        engine.stop()
        async with LiveBridge(bridge_idle_check_s=0.1) as bridge:
            wanted = EngineSettings(
                worker="w", model="m", endpoint=engine.endpoint, replay_endpoint=engine.replay_endpoint
            )
            await bridge.fleet.add(wanted)
            await async_wait_until(lambda: bridge.counters()["failed_replays"] > 0)
            engine.restart()
            for number in range(3):
                engine.send(store(number), "dropped")
            await bridge.shows(pages(0, 1, 2), deadline_s=30)


async def test_a_replay_that_failed_before_an_engines_first_batch_is_tried_again_with_that_batch() -> None:
    with ZmqEngine(replay=False) as engine, ZmqEngine() as keeper:
        keeper.stop()
        async with LiveBridge(**IDLE) as bridge:
            await bridge.read(engine, replay_endpoint=keeper.replay_endpoint)
            await async_wait_until(lambda: bridge.counters()["failed_replays"] > 0)
            keeper.restart()
            for number in range(4):
                keeper.send(store(number))
            engine.seq = 3
            engine.send(store(3))
            await bridge.shows(pages(0, 1, 2, 3), deadline_s=30)


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("binds", [False, True])
async def test_engines_are_read_over_ipv6(binds: bool) -> None:
    address = f"tcp://[::1]:{free_port()}"
    with ZmqEngine(host="[::1]", connect_to=address if binds else None) as engine:
        engine.send(store(0), "dropped")
        async with LiveBridge(**IDLE) as bridge:
            await bridge.read(engine, endpoint=address if binds else engine.endpoint, bind=binds)
            engine.send(store(1))
            await bridge.shows(pages(0, 1))
