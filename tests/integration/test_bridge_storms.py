"""Several publishers on one address: the bridge stops following their apparent restarts."""

from __future__ import annotations

import pytest

from bridge.stream import sequence_check
from kv_events.schema import ENGINE_UNHEARD
from tests.support.bridge.rig import GPU, LiveBridge, on
from tests.support.engines.event_payloads import names_of, payload, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.waiting import async_wait_until

pytestmark = pytest.mark.timing("an engine must be read on time while others flood the bridge")

OTHER = 100_000


def store(number: int) -> bytes:
    """Return a batch that stores one page."""
    return payload(stored([number], [1000 + number] * 4))


async def test_publishers_that_share_an_address_are_left_out_for_a_while_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sequence_check, "_QUIET_S", 3.0)
    with ZmqEngine(replay=False) as engine:
        async with LiveBridge(bridge_idle_check_s=30.0) as bridge:
            await bridge.read(engine)
            for number in range(1, 101):
                for first in (OTHER, 0):
                    engine.seq = first + number
                    engine.send(store(engine.seq))
            await async_wait_until(lambda: "several publishers" in (bridge.status().failure or ""))
            await async_wait_until(lambda: bridge.counters()["stale_batches"] > 150)
            assert bridge.counters()["restarts"] == 10
            await bridge.degrades(ENGINE_UNHEARD)
            assert bridge.view().pages == set()

            await async_wait_until(lambda: bridge.status().failure is None)
            engine.send(store(7))
            await bridge.shows(on(GPU, names_of([1007] * 4)))
