"""The degraded reasons that a publisher reports."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kv_events.codec import decode_batch
from kv_events.errors import InvalidValueError
from kv_events.log.memory import MemoryLog
from kv_events.schema import BlockStored
from publisher import EventPublisher, PublisherSettings
from publisher.change_tracker import ChangeTracker
from publisher.record_builder import RecordBuilder
from publisher.sinks import MemorySink
from tests.support.waiting import async_wait_until

NOW = 1_700_000_000.0


def make(log: MemoryLog, **settings: Any) -> EventPublisher:
    values = {"model": "m", "worker": "w", "block_size": 4, "ledger_pages": 10_000, **settings}
    return EventPublisher(PublisherSettings(**values), MemorySink(log))


def reasons_sent(publisher: EventPublisher, now: float = NOW) -> list[tuple[int, str]]:
    """Return (events, degraded_reason) of the records that are due."""
    batches = [decode_batch(record.payload) for record in publisher.take_records(now)]
    return [(len(batch.steps), batch.degraded_reason) for batch in batches]


def test_every_record_states_the_degraded_reason_until_it_is_cleared() -> None:
    publisher = make(MemoryLog(), linger_ms=0)
    publisher.set_degraded_reason("batches lost")
    assert reasons_sent(publisher) == [(2, "batches lost")]
    publisher.publish([BlockStored([1], None, [1, 2, 3, 4], 4)])
    assert reasons_sent(publisher) == [(1, "batches lost")]
    assert reasons_sent(publisher, NOW + 3) == [(0, "batches lost")]
    publisher.set_degraded_reason("")
    assert reasons_sent(publisher, NOW + 3) == [(0, "")]


def test_a_change_is_reported_at_once_and_once() -> None:
    publisher = make(MemoryLog())
    assert reasons_sent(publisher) == [(2, "")]
    for degraded_reason in ("engine not heard", "batches lost", ""):
        publisher.set_degraded_reason(degraded_reason)
        assert reasons_sent(publisher) == [(0, degraded_reason)]
        publisher.set_degraded_reason(degraded_reason)
        assert reasons_sent(publisher) == []


def test_a_change_that_comes_before_a_wait_leaves_nothing_to_wait_for() -> None:
    settings = PublisherSettings(model="m", worker="w", block_size=4, ledger_pages=10_000)
    builder = RecordBuilder(settings, ChangeTracker(settings), epoch=1)
    builder.take_records(NOW)
    assert builder.seconds_until_due(NOW) > 0
    builder.degraded_reason = "batches lost"
    assert builder.seconds_until_due(NOW) == 0
    builder.take_records(NOW)
    assert builder.seconds_until_due(NOW) > 0


async def test_a_change_wakes_a_publisher_that_has_nothing_to_say() -> None:
    log = MemoryLog()
    async with make(log, heartbeat_s=1000) as publisher:
        await async_wait_until(lambda: log.next_offset == 1)
        await asyncio.to_thread(publisher.set_degraded_reason, "batches lost")
        await async_wait_until(lambda: log.next_offset == 2)
    assert decode_batch(log.read(1)[0].payload).degraded_reason == "batches lost"


def test_a_degraded_reason_that_readers_would_refuse_is_refused() -> None:
    publisher = make(MemoryLog())
    with pytest.raises(InvalidValueError, match="degraded_reason"):
        publisher.set_degraded_reason("x" * 257)
    assert reasons_sent(publisher) == [(2, "")]
