"""A bridge on real sockets: gaps, replays, restarts, lost connections, and what it says when it does not know all."""

import asyncio
import logging
from typing import Any

import msgspec
import pytest

from bridge.engine import EngineConnection
from bridge.stream import sequence_check
from bridge.stream.engine_stream import EngineStream
from kv_events.codec import decode_batch
from kv_events.digest import page_counts
from kv_events.schema import BATCHES_LOST, CLOSED, ENGINE_UNHEARD, REPLAYING
from tests.rigs.bridge import CPU, GPU, Play, bridged, on, pages, prompt, store
from tests.support.engines.event_payloads import cleared, names_of, payload, removed, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.waiting import async_wait_until

ALONE = {"replay": False}
SOON = {"settings": {"bridge_idle_check_s": 0.1}}
AWAY = {"settings": {"bridge_away_s": 0.2}}
UNTIL_CLEARED = (
    "send 0, show 0, lose -0, send 2, show 2, reason lost, send 3, show 2 3, still lost, clear 4, show 4, reason none"
)


@pytest.mark.parametrize(
    ("script", "opening", "counters"),
    [
        pytest.param(script, opening, counters, id=name)
        for name, script, opening, counters in (
            (
                "live batches that were replayed before are not taken twice",
                "send 0, show 0, drop 1, send 2..199 -50, show 0..49 51..199, until duplicate_batches",
                {},
                {"batches": 201},
            ),
            ("sent before the bridge came", "send 0..4, read, show 0..4, send 5, show 0..5", {}, {"gaps": 0}),
            ("answers that are cut are continued", "send 0..34, read, show 0..34", {**SOON, "answers_at_most": 10}, {}),
            (
                "the buffer no longer has what is missing",
                "send 0, show 0, drop 1..8, send 9, show 7..9, reason lost",
                {"buffer_steps": 3},
                {"losses": 1, "lost_batches": 6, "restarts": 0},
            ),
            (
                "the buffer has a hole",
                "send 0, show 0, drop 1, lose 2, drop 3 4, send 5, show 3..5, reason lost",
                {},
                {"losses": 1, "lost_batches": 1, "restarts": 0},
            ),
            (
                "numbers go back",
                "send 0..4, show 0..4, epoch, count 0, send 8, show 8, epoch",  # as behind a proxy
                ALONE,
                {"restarts": 1},
            ),
            (
                "a restart whose first batches were missed, and the next number fits",
                "send 0, show 0, restart, drop 5, wait_for_readers, send 6, show 5 6",
                {},
                {"restarts": 1},
            ),
            ("a silent restart is seen by the reconnect", "send 0, show 0, restart, show", {}, {"restarts": 1}),
            (
                "a reconnect without replays is another incarnation",
                "send 0, show 0, epoch, restart, show, epoch",
                ALONE,
                {"restarts": 1},
            ),
            ("dropped last before a silence", "send 0, drop 1, show 0 1", SOON, {}),
            (
                "away for long",
                "send 0, show 0, state connected, stop, show, still unheard, state away, restart, send 1, show 1",
                AWAY,
                {},
            ),
            ("heard", "reason unheard, send 0, show 0, reason none", {**ALONE, "read": {"block_size": 4}}, {}),
            ("idle, with replays", "reason none", {"read": {"block_size": 4}}, {}),
            ("a loss counts until a clear", UNTIL_CLEARED, {"buffer_steps": 1}, {"losses": 1}),
            ("a loss without replays counts until a clear", UNTIL_CLEARED, ALONE, {"losses": 1}),
            (
                "a loss counts until a restart",
                "send 0, lose 1, send 2, reason lost, count 0, send 3, show 3, reason none",
                ALONE,
                {},
            ),
            ("an unreadable batch is a loss", "send 0, reason none, garble, reason lost", {}, {"undecodable": 1}),
            ("joined late", "send 0..4, read, show 3 4, reason lost", {"buffer_steps": 2}, {}),
            ("counts from one", "send 0, show 0, reason none", {**ALONE, "first_seq": 1}, {}),
            ("cut off", "send 0, reason none, stop, reason unheard, state away, show 0", {}, {}),
            (
                "a connection was lost, the engine went on",
                "send 0, show 0, restart, count 7, wait_for_readers, show, send 8, show 8, reason lost",
                ALONE,
                {},
            ),
        )
    ],
)
async def test_the_bridge_shows_what_its_engine_holds_or_says_that_it_does_not(
    script: str, opening: dict[str, Any], counters: dict[str, int]
) -> None:
    counted, _ = await Play.follow(script, **opening)
    assert {name: counted[name] for name in counters} == counters


async def test_pages_expire_on_time_while_the_bridge_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    async def busy(_: EngineConnection) -> None:
        await asyncio.sleep(0.3)  # longer than the rest of the time until the pages expire

    monkeypatch.setattr(EngineConnection, "_tidy_up", busy)
    async with bridged(replay=False, settings={"bridge_away_s": 0.2}) as (engine, bridge):
        engine.send(store(0))
        await bridge.shows(pages(0))
        await asyncio.to_thread(engine.stop)
        await bridge.shows(set())


@pytest.mark.parametrize("layout", ["old", "new"])
async def test_a_gap_is_closed_by_a_replay_whatever_its_layout(layout: str) -> None:
    counted, asked = await Play.follow("send 0, show 0, drop 1 -0, send 3, show 1 3", layout=layout)
    assert (counted["gaps"], counted["losses"], counted["restarts"]) == (1, 0, 0)
    assert asked[-1] == 0  # the last one applied: its content shows that the engine did not restart


async def test_children_of_pages_from_before_a_loss_are_still_named() -> None:
    tokens = list(range(12))
    async with bridged(replay=False) as (engine, bridge):
        engine.send(payload(stored([1, 2], tokens[:8])))
        await bridge.shows(on(GPU, names_of(tokens[:8])))
        engine.send(store(7), "lost")
        engine.send(payload(stored([3], tokens[8:], parent=2), stored([2], [], 0, medium="CPU")))
        await bridge.shows(on(GPU, names_of(tokens)[2:]) | on(CPU, names_of(tokens)[1:2]))
        assert bridge.counters()["losses"] == 1


async def test_the_log_counts_what_a_bridge_missed_and_left_out() -> None:
    async with bridged(replay=False) as (engine, bridge):
        engine.send(store(0))
        await bridge.shows(pages(0))
        engine.send(payload(stored([20, 21], list(range(8)), parent=99)))
        await bridge.degrades("pages left out")
        assert bridge.view().degraded_reason == "pages left out: 2"
        engine.send(payload(cleared()))
        await bridge.degrades("")
        for number in (1, 2, 3):
            engine.send(store(number), "lost")
        engine.send(store(4))
        await bridge.degrades("batches lost")
        assert bridge.view().degraded_reason == "batches lost: 3"


@pytest.mark.parametrize("replay", [True, False])
async def test_another_block_size_after_a_restart_is_taken(replay: bool) -> None:
    async with bridged(replay=replay) as (engine, bridge):
        engine.send(store(0))
        await bridge.shows(pages(0))
        engine.restart()
        await asyncio.to_thread(engine.wait_for_readers)
        await bridge.shows(set())
        engine.send(payload(stored([1], [9] * 8, 8)))
        await bridge.shows(on(GPU, names_of([9] * 8, 8)))
        assert bridge.view().block_size == 8


async def test_hashes_outlive_a_lost_connection_and_end_when_the_engine_is_certainly_another() -> None:
    tokens = list(range(12))
    child = payload(stored([3], tokens[8:], parent=2))
    async with bridged(replay=False) as (engine, bridge):
        engine.send(payload(stored([1, 2], tokens[:8])))
        await bridge.shows(on(GPU, names_of(tokens[:8])))
        engine.restart()
        await asyncio.to_thread(engine.wait_for_readers)
        await bridge.shows(set())
        engine.seq = 7
        engine.send(child)
        await bridge.shows(on(GPU, names_of(tokens)[2:]))
        engine.seq = 0
        engine.send(child)
        await bridge.shows(set())
        await async_wait_until(lambda: bridge.counters()["unknown_parents"] == 1)


async def test_messages_that_are_none_are_counted_and_the_next_ones_taken() -> None:
    async with bridged() as (engine, bridge):
        for frames in ([b"one"], [b"", b"short", b""], [b"", b"\0" * 8, b"", b""]):
            engine.send_raw(*frames)
        engine.send(b"\xc1 no msgpack")
        engine.send(payload(stored([1], ["x"] * 4), ["Unknown"], stored([2], prompt(2))))
        await bridge.shows(pages(2))
        counters = bridge.counters()
        assert (counters["undecodable"], counters["bad_events"]) == (4, {"tokens": 1, "tag": 1})


async def test_batches_that_the_engines_own_replay_does_not_know_are_left_out_without_asking_for_each() -> None:
    async with bridged() as (engine, bridge):
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


async def test_a_replay_degrades_the_stream_until_all_of_the_past_is_applied() -> None:
    async with bridged() as (engine, bridge):
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
    async with bridged(read={"block_size": 4}) as (engine, bridge):
        engine.send(of_groups("full_attention", "mamba", "holographic"))
        await bridge.shows(pages(0))

        def reasons() -> list[str]:
            return [bridge.view(model=model).degraded_reason or "" for model in ("m", "m#mamba")]

        await async_wait_until(lambda: all("'holographic'" in reason for reason in reasons()))
        await async_wait_until(lambda: "attention group 2: 'holographic'" in caplog.text, what="the log line")


async def test_an_engine_that_comes_back_without_a_group_ends_its_stream() -> None:
    async with bridged(read={"block_size": 4}) as (engine, bridge):
        engine.send(of_groups("full_attention", "mamba"))
        await async_wait_until(lambda: bridge.view(model="m#mamba").pages == pages(0))
        await asyncio.to_thread(engine.restart)
        await asyncio.to_thread(engine.wait_for_readers)
        engine.send(of_groups("full_attention"))
        await async_wait_until(lambda: bridge.view(model="m#mamba").degraded_reason == CLOSED)
        await bridge.shows(pages(0))
        await bridge.degrades("")


async def test_an_engine_that_is_back_is_heard_once_its_replay_or_a_batch_reports_what_happened() -> None:
    async with bridged() as (engine, bridge):
        with ZmqEngine(replay=False) as other:
            await bridge.read(other, "other", block_size=4)
            for each, worker in ((engine, "w"), (other, "other")):
                each.send(store(0))
                await bridge.degrades("", worker)
            for each, worker in ((engine, "w"), (other, "other")):
                await asyncio.to_thread(each.restart)
                await asyncio.to_thread(each.wait_for_readers)
                await bridge.shows(set(), worker)
            await bridge.degrades("")
            assert bridge.view("other").degraded_reason == ENGINE_UNHEARD
            other.send(store(1))
            await bridge.shows(pages(1), "other")
            await bridge.degrades("", "other")


async def test_an_engine_whose_reading_task_failed_is_degraded_by_a_failure_put_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with bridged(replay=False) as (engine, bridge):
        engine.send(store(0))
        await bridge.degrades("")
        with monkeypatch.context() as patched:
            patched.setattr(EngineStream, "take_live", None)
            engine.send(store(1))
            await bridge.degrades(ENGINE_UNHEARD)


async def test_ranks_that_only_batches_name_share_the_degraded_reason_of_their_engine() -> None:
    async with bridged(replay=False) as (engine, bridge):
        engine.send(store(0, rank=3))
        await bridge.degrades("", rank=3)
        engine.send(store(1, rank=3), "lost")
        engine.send(store(2, rank=5))  # named for the first time after the loss
        await bridge.degrades(BATCHES_LOST, rank=3)
        await bridge.degrades(BATCHES_LOST, rank=5)
        await asyncio.to_thread(engine.stop)
        await bridge.degrades(ENGINE_UNHEARD, rank=3)


async def test_another_block_size_than_registered_is_logged_and_shown_to_routers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        async with bridged(read={"block_size": 16}) as (engine, bridge):
            engine.send(payload(stored([1, 2], prompt(1) + prompt(2))))
            await bridge.degrades("block size 4, registered with 16")
            await async_wait_until(lambda: "block size 4, registered with 16" in caplog.text, what="the log line")
            engine.send(payload(stored([3], [7] * 16, 16)))
            await bridge.shows(on(GPU, names_of([7] * 16, 16)))
            await bridge.degrades("")
            engine.send(payload(stored([4], prompt(4)), removed([3])))
            await bridge.shows(set())
            assert bridge.view().degraded_reason == ""  # that one page is left out is counted
            assert bridge.counters()["other_block_sizes"] == 3


@pytest.mark.timing("an engine must be read on time while others flood the bridge")
async def test_publishers_that_share_an_address_are_left_out_for_a_while_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sequence_check, "_QUIET_S", 3.0)
    async with bridged(replay=False) as (engine, bridge):
        for number in range(1, 101):
            for first in (100_000, 0):
                engine.seq = first + number
                engine.send(store(engine.seq))
        await async_wait_until(lambda: "several publishers" in (bridge.status().failure or ""))
        await async_wait_until(lambda: bridge.counters()["stale_batches"] > 150)
        assert bridge.counters()["restarts"] == 10
        await bridge.degrades(ENGINE_UNHEARD)
        assert bridge.view().pages == set()

        await async_wait_until(lambda: bridge.status().failure is None)
        engine.send(store(7))
        await bridge.shows(pages(7))


@pytest.mark.parametrize("replay", [False, True])
async def test_a_stream_goes_on_after_messages_so_large_that_few_may_wait(replay: bool) -> None:
    async with bridged(replay=replay) as (engine, bridge):
        for number in range(3):
            for size in (2**22, *[600_000] * 100, *[1] * 2000):
                engine.send(msgspec.msgpack.encode([1.0, [stored([], [], extra=" " * size)], 0]))
            engine.send(store(number))
            newest = pages(number)
            await async_wait_until(lambda: newest <= bridge.view().pages, 20, f"page {number}")  # noqa: B023
        assert bridge.counters()["reconnects"] == 0
