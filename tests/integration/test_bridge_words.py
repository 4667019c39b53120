"""What a bridge leaves out is said in the log, with field and value, and its publishers' health in metrics."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from bridge.metrics import BridgeMetrics
from tests.support.bridge.rig import GPU, LiveBridge, on
from tests.support.engines.event_payloads import names_of, payload, stored
from tests.support.engines.zmq_engine import ZmqEngine

TOKENS = [1, 2, 3, 4]
LAST = payload(stored([9], [9] * 4))


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (stored([1], TOKENS, medium="FLOPPY"), "pages on medium 'FLOPPY' left out"),
        (stored([1], TOKENS, parent=77), "stored pages left out: parent_block_hash is not known"),
        (stored([1], TOKENS * 2, 8), "pages of block_size 8 left out, the stream's is 4"),
        ({"event_type": "stored", "model_name": "other"}, "events of (model_name, tenant_id) ('other', None) left out"),
        (["Unknown"], "is left out: tag"),
    ],
)
async def test_every_kind_of_refusal_is_reported(event: Any, words: str, caplog: pytest.LogCaptureFixture) -> None:
    with ZmqEngine() as engine, caplog.at_level(logging.WARNING):
        async with LiveBridge() as bridge:
            await bridge.read(engine, block_size=4)
            for _ in range(3):
                engine.send(payload(event))
            engine.send(LAST)
            await bridge.shows(on(GPU, names_of([9] * 4)))
    assert caplog.text.count(words) == 1
    assert "engine default/m/w/0: " in caplog.text


async def test_a_message_of_wrong_frames_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with ZmqEngine() as engine, caplog.at_level(logging.WARNING):
        async with LiveBridge() as bridge:
            await bridge.read(engine)
            engine.send_raw(b"", b"short", b"")
            engine.send(LAST)
            await bridge.shows(on(GPU, names_of([9] * 4)))
    assert "a message is left out: 3 frames of [0, 5, 0] bytes" in caplog.text


async def test_metrics_show_whether_what_is_read_gets_out() -> None:
    with ZmqEngine() as engine:
        async with LiveBridge() as bridge:
            await bridge.read(engine)
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
