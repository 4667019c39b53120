"""A bridge says so when it does not know all that its engine holds: engines away, batches lost, other block sizes."""

from __future__ import annotations

import asyncio
import logging

import pytest

from bridge.stream.engine_stream import EngineStream
from kv_events.codec import decode_batch
from kv_events.digest import page_counts
from kv_events.schema import BATCHES_LOST, CLOSED, ENGINE_UNHEARD, REPLAYING
from tests.support.bridge.rig import GPU, LiveBridge, on
from tests.support.engines.event_payloads import cleared, names_of, payload, removed, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.waiting import async_wait_until

IDLE = {"bridge_idle_check_s": 30.0}


def prompt(number: int) -> list[int]:
    """Tokens of one page."""
    return [1000 + number] * 4


def store(number: int, rank: int = 0) -> bytes:
    """Return a batch that stores one page."""
    return payload(stored([number], prompt(number)), rank=rank)


def pages(*numbers: int) -> set[tuple[int, int]]:
    return on(GPU, [names_of(prompt(number))[0] for number in numbers])


async def test_an_engine_that_is_heard_is_not_degraded() -> None:
    with ZmqEngine(replay=False) as engine:
        async with LiveBridge(**IDLE) as bridge:
            await bridge.read(engine, block_size=4)
            await bridge.degrades(ENGINE_UNHEARD)
            engine.send(store(0))
            await bridge.shows(pages(0))
            await bridge.degrades("")


async def test_an_idle_engine_with_a_replay_socket_is_heard() -> None:
    with ZmqEngine() as engine:
        async with LiveBridge(**IDLE) as bridge:
            await bridge.read(engine, block_size=4)
            await bridge.degrades("")


async def test_a_replay_degrades_the_stream_until_all_of_the_past_is_applied() -> None:
    with ZmqEngine() as engine:
        async with LiveBridge(**IDLE) as bridge:
            await bridge.read(engine)
            engine.send(store(0))
            await bridge.shows(pages(0))
            await bridge.degrades("")
            before = bridge.log.next_offset
            for number in range(1, 3000):
                engine.send(store(number), "dropped")
            engine.send(store(3000))
            await bridge.shows(pages(*range(3001)))
            await bridge.degrades("")
            batches = [decode_batch(record.payload) for record in bridge.log.read(before, 10_000)]
    counts = {
        reason: [sum(page_counts(b.digest)) for b in batches if b.degraded_reason == reason]
        for reason in ("", REPLAYING)
    }
    assert len(counts[REPLAYING]) > 1
    assert min(counts[""]) >= 3000


def of_groups(*kinds: str) -> bytes:
    """Return a batch that stores one page in a group of each kind."""
    stores = [stored([0], prompt(0), group_idx=number, kv_cache_spec_kind=kind) for number, kind in enumerate(kinds)]
    return payload(*stores, form="map")


async def test_a_group_of_an_unknown_kind_degrades_all_streams_of_its_worker(caplog: pytest.LogCaptureFixture) -> None:
    with ZmqEngine() as engine:
        async with LiveBridge(**IDLE) as bridge:
            await bridge.read(engine, block_size=4)
            engine.send(of_groups("full_attention", "mamba", "holographic"))
            await bridge.shows(pages(0))

            def reasons() -> list[str]:
                return [bridge.view(model=model).degraded_reason or "" for model in ("m", "m#mamba")]

            await async_wait_until(lambda: all("'holographic'" in reason for reason in reasons()))
    assert "attention group 2: 'holographic'" in caplog.text


async def test_an_engine_that_comes_back_without_a_group_ends_its_stream() -> None:
    with ZmqEngine() as engine:
        async with LiveBridge(**IDLE) as bridge:
            await bridge.read(engine, block_size=4)
            engine.send(of_groups("full_attention", "mamba"))
            await async_wait_until(lambda: bridge.view(model="m#mamba").pages == pages(0))
            await asyncio.to_thread(engine.restart)
            await asyncio.to_thread(engine.wait_for_readers)
            engine.send(of_groups("full_attention"))
            await async_wait_until(lambda: bridge.view(model="m#mamba").degraded_reason == CLOSED)
            await bridge.shows(pages(0))
            await bridge.degrades("")


@pytest.mark.parametrize("replay", [False, True])
async def test_a_loss_degrades_the_stream_until_the_engine_clears_its_cache(replay: bool) -> None:
    with ZmqEngine(replay=replay, buffer_steps=1) as engine:
        async with LiveBridge(**IDLE) as bridge:
            await bridge.read(engine)
            engine.send(store(0))
            await bridge.shows(pages(0))
            engine.send(payload(removed([0])), "lost")
            engine.send(store(2))
            await bridge.shows(pages(2))
            await bridge.degrades(BATCHES_LOST)
            engine.send(store(3))
            await bridge.shows(pages(2, 3))
            assert bridge.view().degraded_reason == BATCHES_LOST
            engine.send(payload(cleared(), stored([4], prompt(4))))
            await bridge.shows(pages(4))
            await bridge.degrades("")


async def test_a_loss_is_forgotten_with_the_engines_incarnation() -> None:
    with ZmqEngine(replay=False) as engine:
        async with LiveBridge(**IDLE) as bridge:
            await bridge.read(engine)
            engine.send(store(0))
            engine.send(store(1), "lost")
            engine.send(store(2))
            await bridge.degrades(BATCHES_LOST)
            engine.seq = 0
            engine.send(store(3))
            await bridge.shows(pages(3))
            await bridge.degrades("")


async def test_a_batch_that_cannot_be_read_is_a_loss() -> None:
    with ZmqEngine() as engine:
        async with LiveBridge(**IDLE) as bridge:
            await bridge.read(engine)
            engine.send(store(0))
            await bridge.degrades("")
            engine.send(b"\xc1 no msgpack")
            await bridge.degrades(BATCHES_LOST)


async def test_joining_an_engine_that_no_longer_keeps_its_first_batches_is_degraded() -> None:
    with ZmqEngine(buffer_steps=2) as engine:
        for number in range(5):
            engine.send(store(number))
        async with LiveBridge(**IDLE) as bridge:
            await bridge.read(engine)
            await bridge.shows(pages(3, 4))
            await bridge.degrades(BATCHES_LOST)


async def test_an_engine_that_counts_from_one_is_joined_at_its_beginning() -> None:
    with ZmqEngine(replay=False, first_seq=1) as engine:
        async with LiveBridge(**IDLE) as bridge:
            await bridge.read(engine)
            engine.send(store(0))
            await bridge.shows(pages(0))
            await bridge.degrades("")


async def test_a_disconnected_engine_is_degraded_at_once_and_its_pages_stay() -> None:
    with ZmqEngine() as engine:
        async with LiveBridge(**IDLE) as bridge:
            await bridge.read(engine)
            engine.send(store(0))
            await bridge.degrades("")
            await asyncio.to_thread(engine.stop)
            await bridge.degrades(ENGINE_UNHEARD)
            assert bridge.view().pages == pages(0)
            assert "connection is lost" in (bridge.status().failure or "")


async def test_an_engine_that_is_back_is_heard_once_its_replay_or_a_batch_reports_what_happened() -> None:
    with ZmqEngine() as engine, ZmqEngine(replay=False) as other:
        async with LiveBridge(**IDLE) as bridge:
            await bridge.read(engine)
            await bridge.read(other, "other", block_size=4)
            for each in (engine, other):
                each.send(store(0))
            await bridge.degrades("")
            await bridge.degrades("", "other")
            for each in (engine, other):
                await asyncio.to_thread(each.restart)
                await asyncio.to_thread(each.wait_for_readers)
            await bridge.shows(set())
            await bridge.shows(set(), "other")
            await bridge.degrades("")
            assert bridge.view("other").degraded_reason == ENGINE_UNHEARD
            other.send(store(1))
            await bridge.shows(pages(1), "other")
            await bridge.degrades("", "other")


async def test_a_connection_that_was_lost_without_a_replay_socket_leaves_a_degraded_reason() -> None:
    with ZmqEngine(replay=False) as engine:
        async with LiveBridge(**IDLE) as bridge:
            await bridge.read(engine)
            engine.send(store(0))
            await bridge.shows(pages(0))
            await asyncio.to_thread(engine.restart)
            engine.seq = 7  # a proxy's connection was cut; the engine went on
            await asyncio.to_thread(engine.wait_for_readers)
            await bridge.shows(set())
            engine.send(store(8))
            await bridge.shows(pages(8))
            await bridge.degrades(BATCHES_LOST)


async def test_an_engine_that_stays_away_holds_nothing_and_is_still_degraded() -> None:
    with ZmqEngine() as engine:
        async with LiveBridge(bridge_away_s=0.2) as bridge:
            await bridge.read(engine)
            engine.send(store(0))
            await bridge.shows(pages(0))
            await asyncio.to_thread(engine.stop)
            await bridge.shows(set())
            assert bridge.view().degraded_reason == ENGINE_UNHEARD


async def test_an_engine_whose_reading_task_failed_is_degraded_by_a_failure_put_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ZmqEngine(replay=False) as engine:
        async with LiveBridge(**IDLE) as bridge:
            await bridge.read(engine)
            engine.send(store(0))
            await bridge.degrades("")
            with monkeypatch.context() as patched:
                patched.setattr(EngineStream, "take_live", None)
                engine.send(store(1))
                await bridge.degrades(ENGINE_UNHEARD)


async def test_ranks_that_only_batches_name_share_the_degraded_reason_of_their_engine() -> None:
    with ZmqEngine(replay=False) as engine:
        async with LiveBridge(**IDLE) as bridge:
            await bridge.read(engine)
            engine.send(store(0, rank=3))
            await bridge.degrades("", rank=3)
            engine.send(store(1, rank=3), "lost")
            engine.send(store(2, rank=5))  # heard of for the first time after the loss
            await bridge.degrades(BATCHES_LOST, rank=3)
            await bridge.degrades(BATCHES_LOST, rank=5)
            await asyncio.to_thread(engine.stop)
            await bridge.degrades(ENGINE_UNHEARD, rank=3)


async def test_another_block_size_than_registered_is_logged_and_shown_to_routers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ZmqEngine() as engine, caplog.at_level(logging.WARNING):
        async with LiveBridge(**IDLE) as bridge:
            await bridge.read(engine, block_size=16)
            engine.send(payload(stored([1, 2], prompt(1) + prompt(2))))
            await bridge.degrades("block size 4, registered with 16")
            assert "block size 4, registered with 16" in caplog.text
            engine.send(payload(stored([3], [7] * 16, 16)))
            await bridge.shows(on(GPU, names_of([7] * 16, 16)))
            await bridge.degrades("")
            engine.send(payload(stored([4], prompt(4)), removed([3])))
            await bridge.shows(set())
            assert bridge.view().degraded_reason == ""  # that one page is left out is counted
            assert bridge.counters()["other_block_sizes"] == 3
