"""A bridge on real sockets: gaps, replays, restarts, lost connections."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

from tests.support.bridge.rig import CPU, GPU, LiveBridge, on
from tests.support.engines.event_payloads import names_of, payload, removed, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.waiting import async_wait_until

IDLE = {"bridge_idle_check_s": 30.0}
SOON = {"bridge_idle_check_s": 0.1}


def prompt(number: int) -> list[int]:
    """Tokens of one page."""
    return [1000 + number] * 4


def store(number: int) -> bytes:
    """Return a batch that stores one page."""
    return payload(stored([number], prompt(number)))


def pages(*numbers: int) -> set[tuple[int, int]]:
    return on(GPU, [names_of(prompt(number))[0] for number in numbers])


async def test_what_was_sent_before_the_bridge_came_is_replayed() -> None:
    with ZmqEngine() as engine:
        for number in range(5):
            engine.send(store(number))
        async with LiveBridge(**IDLE) as bridge:
            await bridge.read(engine)
            await bridge.shows(pages(*range(5)))
            engine.send(store(5))
            await bridge.shows(pages(*range(6)))
            assert bridge.counters()["gaps"] == 0


@pytest.mark.parametrize("layout", ["old", "new"])
async def test_a_gap_is_closed_by_a_replay_whatever_its_layout(layout: Literal["old", "new"]) -> None:
    with ZmqEngine(layout=layout) as engine:
        async with LiveBridge(**IDLE) as bridge:
            await bridge.read(engine)
            engine.send(store(0))
            await bridge.shows(pages(0))
            engine.send(store(1), "dropped")
            engine.send(payload(removed([0])), "dropped")
            engine.send(store(3))
            await bridge.shows(pages(1, 3))
            counters = bridge.counters()
            assert (counters["gaps"], counters["losses"], counters["restarts"]) == (1, 0, 0)
            assert engine.requests[-1] == 0  # the last one applied: its content shows that the engine did not restart


async def test_live_batches_that_were_replayed_before_are_not_taken_twice() -> None:
    with ZmqEngine() as engine:
        async with LiveBridge(**IDLE) as bridge:
            await bridge.read(engine)
            engine.send(store(0))
            await bridge.shows(pages(0))
            engine.send(store(1), "dropped")
            for number in range(2, 200):
                engine.send(store(number))
            engine.send(payload(removed([50])))
            await bridge.shows(pages(*(number for number in range(200) if number != 50)))
            await async_wait_until(lambda: bridge.counters()["duplicate_batches"] > 0)
            assert bridge.counters()["batches"] == 201


async def test_an_answer_that_was_cut_is_asked_for_again_from_where_it_ended() -> None:
    with ZmqEngine() as engine:
        engine.answers_at_most = 10
        for number in range(35):
            engine.send(store(number))
        async with LiveBridge(**SOON) as bridge:
            await bridge.read(engine)
            await bridge.shows(pages(*range(35)))


async def test_when_the_buffer_no_longer_has_what_is_missing_no_page_is_trusted() -> None:
    with ZmqEngine(buffer_steps=3) as engine:
        async with LiveBridge(**IDLE) as bridge:
            await bridge.read(engine)
            engine.send(store(0))
            await bridge.shows(pages(0))
            for number in range(1, 9):
                engine.send(store(number), "dropped")
            engine.send(store(9))
            await bridge.shows(pages(7, 8, 9))
            counters = bridge.counters()
            assert (counters["losses"], counters["lost_batches"], counters["restarts"]) == (1, 6, 0)


async def test_children_of_pages_from_before_a_loss_are_still_named() -> None:
    tokens = list(range(12))
    with ZmqEngine(replay=False) as engine:
        async with LiveBridge(**IDLE) as bridge:
            await bridge.read(engine)
            engine.send(payload(stored([1, 2], tokens[:8])))
            await bridge.shows(on(GPU, names_of(tokens[:8])))
            engine.send(store(7), "lost")
            engine.send(payload(stored([3], tokens[8:], parent=2), stored([2], [], 0, medium="CPU")))
            await bridge.shows(on(GPU, names_of(tokens)[2:]) | on(CPU, names_of(tokens)[1:2]))
            assert bridge.counters()["losses"] == 1


async def test_a_sequence_that_goes_back_is_another_incarnation_and_another_epoch() -> None:
    with ZmqEngine(replay=False) as engine:
        async with LiveBridge(**IDLE) as bridge:
            await bridge.read(engine)
            for number in range(5):
                engine.send(store(number))
            await bridge.shows(pages(*range(5)))
            epoch = bridge.view().epoch
            engine.seq = 0  # as behind a proxy that keeps its connection to us
            engine.send(store(8))
            await bridge.shows(pages(8))
            assert bridge.view().epoch > epoch
            assert bridge.counters()["restarts"] == 1


async def test_a_restart_is_noticed_though_its_first_batches_were_missed_and_the_next_number_fits() -> None:
    with ZmqEngine() as engine:
        async with LiveBridge(**IDLE) as bridge:
            await bridge.read(engine)
            engine.send(store(0))
            await bridge.shows(pages(0))
            engine.restart()
            engine.send(store(5), "dropped")
            await asyncio.to_thread(engine.wait_for_readers)
            engine.send(store(6))  # number 1, as expected
            await bridge.shows(pages(5, 6))
            assert bridge.counters()["restarts"] == 1


async def test_a_restart_of_an_engine_that_stays_silent_is_noticed_by_the_reconnect() -> None:
    with ZmqEngine() as engine:
        async with LiveBridge(**IDLE) as bridge:
            await bridge.read(engine)
            engine.send(store(0))
            await bridge.shows(pages(0))
            engine.restart()
            await bridge.shows(set())


async def test_without_a_replay_socket_a_reconnect_is_another_incarnation() -> None:
    with ZmqEngine(replay=False) as engine:
        async with LiveBridge(**IDLE) as bridge:
            await bridge.read(engine)
            engine.send(store(0))
            await bridge.shows(pages(0))
            epoch = bridge.view().epoch
            engine.restart()
            await bridge.shows(set())
            assert bridge.view().epoch > epoch


async def test_another_block_size_after_a_restart_is_taken() -> None:
    with ZmqEngine() as engine:
        async with LiveBridge(**IDLE) as bridge:
            await bridge.read(engine)
            engine.send(store(0))
            await bridge.shows(pages(0))
            engine.restart()
            engine.send(payload(stored([1], [9] * 8, 8)))
            await bridge.shows(on(GPU, names_of([9] * 8, 8)))
            assert bridge.view().block_size == 8


async def test_batches_dropped_last_before_a_silence_are_found_by_asking() -> None:
    with ZmqEngine() as engine:
        async with LiveBridge(**SOON) as bridge:
            await bridge.read(engine)
            engine.send(store(0))
            engine.send(store(1), "dropped")
            await bridge.shows(pages(0, 1))


async def test_an_engine_that_is_away_for_long_is_not_counted_on_and_comes_back_with_what_it_keeps() -> None:
    with ZmqEngine() as engine:
        async with LiveBridge(bridge_away_s=0.2) as bridge:
            await bridge.read(engine)
            engine.send(store(0))
            await bridge.shows(pages(0))
            engine.stop()
            await bridge.shows(set())
            assert bridge.status().state == "away"
            engine.restart()
            engine.send(store(1))
            await bridge.shows(pages(1))


async def test_a_replay_socket_that_does_not_answer_costs_what_was_missed_but_no_standstill() -> None:
    with ZmqEngine(replay=False) as engine, ZmqEngine() as other:
        async with LiveBridge(**IDLE, bridge_replay_timeout_s=0.1) as bridge:
            other.stop()
            await bridge.read(engine, replay_endpoint=other.replay_endpoint)
            engine.send(store(0))
            await bridge.shows(pages(0))
            engine.send(store(1), "dropped")
            engine.send(store(2))
            await bridge.shows(pages(2))
            assert bridge.counters()["failed_replays"] > 0


async def test_messages_that_are_none_are_counted_and_the_next_ones_taken() -> None:
    with ZmqEngine() as engine:
        async with LiveBridge(**IDLE) as bridge:
            await bridge.read(engine)
            for frames in ([b"one"], [b"", b"short", b""], [b"", b"\0" * 8, b"", b""]):
                engine.send_raw(*frames)
            engine.send(b"\xc1 no msgpack")
            engine.send(payload(stored([1], ["x"] * 4), ["Unknown"], stored([2], prompt(2))))
            await bridge.shows(pages(2))
            counters = bridge.counters()
            assert (counters["undecodable"], counters["bad_events"]) == (4, {"tokens": 1, "tag": 1})


async def test_batches_that_the_engines_own_replay_does_not_know_are_left_out_without_asking_for_each() -> None:
    with ZmqEngine() as engine:
        async with LiveBridge(**IDLE) as bridge:
            await bridge.read(engine)
            engine.send(store(0))
            await bridge.shows(pages(0))
            asked = len(engine.requests)
            for seq in range(500, 520):  # sent before the restart
                engine.send_raw(b"", seq.to_bytes(8, "big"), store(seq))
            engine.send(store(1))
            await bridge.shows(pages(0, 1))  # possibly by a replay, before the last of the others was read
            await async_wait_until(lambda: bridge.counters()["stale_batches"] >= 20, what="20 stale batches")
            counters = bridge.counters()
            assert (counters["stale_batches"], counters["losses"], counters["restarts"]) == (20, 0, 0)
            assert len(engine.requests) <= asked + 2


async def test_a_replay_socket_that_never_knows_what_comes_live_is_not_believed_for_ever() -> None:
    with ZmqEngine(replay=False) as engine, ZmqEngine() as other:
        other.send(store(100))
        async with LiveBridge(**IDLE) as bridge:
            await bridge.read(engine, replay_endpoint=other.replay_endpoint)
            engine.seq = 50

            def all_shown() -> bool:
                engine.send(store(1))
                return pages(1) <= bridge.view().pages

            await async_wait_until(all_shown, deadline_s=30)
