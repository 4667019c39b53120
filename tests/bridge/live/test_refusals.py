"""What a bridge cannot read: pages that may be gone are dropped, and what is left out is counted and logged."""

import logging
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from bridge.metrics import BridgeMetrics
from kv_events.schema import BATCHES_LOST
from tests.rigs.bridge import GPU, bridged, on
from tests.support.engines.event_payloads import names_of, payload, removed, stored
from tests.support.waiting import async_wait_until

ONE, TWO, THREE = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]
TOO_LONG = "x" * 2000
LAST = payload(stored([9], [9] * 4))


def page(tokens: list[int]) -> set[tuple[int, int]]:
    return on(GPU, names_of(tokens))


@pytest.mark.parametrize(
    "event",
    [
        ["BlockRemoved", ["ab"], "GPU"],
        ["BlockRemoved", [1, None], "GPU"],
        ["BlockRemoved", [1], 5],
        {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "group_idx": -1},
        {"block_hashes": [1], "type": "BlockRemoved", "medium": b"GPU"},
        removed([1], TOO_LONG),
        ["BlocksEvicted", [1]],
        {"event_type": "removed", "seq_hashes": "all"},
        {"event_type": "evicted", "seq_hashes": [1]},
    ],
    ids=str,
)
async def test_pages_are_dropped_when_a_removal_cannot_be_read(event: Any) -> None:
    async with bridged() as (engine, bridge):
        engine.send(payload(stored([1], ONE)))
        await bridge.shows(page(ONE))
        engine.send(payload(event, stored([2], TWO)))
        await bridge.shows(page(TWO))
        await bridge.degrades(BATCHES_LOST)
        assert bridge.counters()["losses"] == 1


@pytest.mark.parametrize(
    "event",
    [
        ["BlockStored", ["ab"], None, TWO, 4],
        {"type": "BlockStored", "block_hashes": [3], "token_ids": "none"},
        stored([3], TWO, medium=TOO_LONG),
        {"event_type": "stored", "seq_hashes": "all"},
    ],
    ids=str,
)
async def test_a_store_that_cannot_be_read_costs_nothing_else(event: Any) -> None:
    async with bridged() as (engine, bridge):
        engine.send(payload(stored([1], ONE)))
        engine.send(payload(event, stored([2], THREE)))
        await bridge.shows(page(ONE) | page(THREE))
        assert bridge.counters()["bad_events"].total() == 1
        assert bridge.view().degraded_reason == ""


async def test_what_was_to_follow_a_break_in_a_batch_is_taken_for_removals() -> None:
    async with bridged() as (engine, bridge):
        engine.send(payload(stored([1], ONE)))
        await bridge.shows(page(ONE))
        whole = msgspec.msgpack.encode([1.0, [["BlockStored", [2], None, TWO, 4], ["BlockRemoved", [1], "GPU"]], 0])
        engine.send(whole[:-12])
        await bridge.shows(set())
        await bridge.degrades(BATCHES_LOST)


@pytest.mark.parametrize(
    "bad", [stored([2], TWO, medium=TOO_LONG), stored([2], TWO, lora_name=TOO_LONG)], ids=["m", "l"]
)
@pytest.mark.parametrize("order", [1, -1])
async def test_a_removal_beside_a_store_that_cannot_be_taken_is_taken(bad: Any, order: int) -> None:
    async with bridged() as (engine, bridge):
        engine.send(payload(stored([1, 3], ONE + THREE)))
        await bridge.shows(on(GPU, names_of(ONE + THREE)))
        engine.send(payload(*[bad, removed([3])][::order]))
        await bridge.shows(page(ONE))
        await async_wait_until(lambda: bridge.counters()["bad_events"] == {"field": 1})
        assert bridge.counters()["losses"] == 0


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (stored([1], ONE, medium="FLOPPY"), "pages on medium 'FLOPPY' left out"),
        (stored([1], ONE, parent=77), "stored pages left out: parent_block_hash is not known"),
        (stored([1], ONE * 2, 8), "pages of block_size 8 left out, the stream's is 4"),
        ({"event_type": "stored", "model_name": "other"}, "events of (model_name, tenant_id) ('other', None) left out"),
        (["Unknown"], "is left out: tag"),
    ],
)
async def test_every_kind_of_refusal_is_reported(event: Any, words: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with bridged(read={"block_size": 4}) as (engine, bridge):
            for _ in range(3):
                engine.send(payload(event))
            engine.send_raw(b"", b"short", b"")
            engine.send(LAST)
            await bridge.shows(on(GPU, names_of([9] * 4)))
    assert caplog.text.count(words) == 1
    assert "engine default/m/w/0: " in caplog.text
    assert "a message is left out: 3 frames of [0, 5, 0] bytes" in caplog.text


async def test_metrics_show_whether_what_is_read_gets_out() -> None:
    async with bridged() as (engine, bridge):
        engine.send(LAST)
        await bridge.shows(on(GPU, names_of([9] * 4)))
        registry = CollectorRegistry()
        registry.register(BridgeMetrics(bridge.fleet.status))
        text = generate_latest(registry).decode()
    labels = '{dp_rank="0",model="m",tenant="default",worker="w"}'
    shown = {
        "bridge_pages": 1,
        "bridge_failed": 0,
        "publisher_sink_available": 1,
        "publisher_rejected_records_total": 0,
    }
    for name, value in shown.items():
        assert f"kvsight_{name}{labels} {value:.1f}" in text
    assert f"kvsight_publisher_queued_pages{labels}" in text
