"""A running `EventPublisher`: tasks, threads, failing sinks, and the end."""

import asyncio
import logging
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kv_events.codec import decode_batch
from kv_events.log.memory import MemoryLog
from kv_events.schema import AllBlocksCleared, BlockRemoved, BlockStored, ResyncRequest, SnapshotBegin
from publisher import EventPublisher, OutRecord, SinkRejectedError, SinkUnavailableError
from publisher.kernels.events import PageEvents
from publisher.sinks.memory import MemorySink
from tests.models.stream_reader import StreamReader
from tests.rigs.publisher import FaultySink, make_running, steps_of, stored, view_of
from tests.support.log.records import words
from tests.support.waiting import async_wait_until

NUM_REFERENCES = 4
"""To an event of a list, a slice of which is iterated over."""


def reasons_of(log: MemoryLog) -> list[str]:
    return StreamReader().read_all(log.read(0, 10_000)).resyncs


async def test_a_caller_may_reuse_its_list_of_events(publisher: EventPublisher, log: MemoryLog) -> None:
    events: list[Any] = [stored(1)]
    publisher.publish(events)
    events[:] = [stored(2)]
    publisher.publish(events)
    events.clear()
    await async_wait_until(lambda: view_of(log) == {101, 102})


async def test_calls_of_every_size_keep_their_order(sink: FaultySink, log: MemoryLog) -> None:
    async with make_running(sink) as publisher:
        for _ in range(3):
            publisher.publish([stored(*range(1000))])
            publisher.publish([BlockRemoved([1, 2, 3])])
            publisher.publish([stored(2)])
            publisher.publish([AllBlocksCleared()])
            publisher.publish([stored(4), BlockRemoved([5])])
            publisher.publish([stored(*range(10, 1000)), BlockRemoved([*range(12, 1000)])])
            publisher.publish([stored(6)])
            publisher.publish_columns(PageEvents.removed(np.array([6], np.uint64), 0), None)
        assert publisher.stats().pages["removed_unknown"] == 3
        publisher.check()
        await async_wait_until(lambda: view_of(log) == {104, 110, 111})


def test_an_engine_that_never_pauses_loses_nothing_and_few_events_are_kept(sink: FaultySink, log: MemoryLog) -> None:
    with make_running(sink, ledger_pages=100_000) as publisher:
        events = [stored(i) for i in range(5000)]
        most = 0
        for i, event in enumerate(events):
            publisher.publish([event])
            if i % 100 == 99:
                most = max(most, sum(sys.getrefcount(each) for each in events[: i + 1]) - NUM_REFERENCES * (i + 1))
        assert 0 <= most <= 100
        publisher.check()
    assert view_of(log) == set(range(100, 5100))


async def test_invalid_events_of_a_running_publisher_are_counted(publisher: EventPublisher, log: MemoryLog) -> None:
    publisher.publish([stored(1), BlockStored([2], None, [], 8, sequence_hashes=words([102])), stored(3)])
    publisher.publish([5])  # type: ignore[list-item]
    publisher.publish(7)  # type: ignore[arg-type]
    publisher.publish([BlockRemoved(9)])  # type: ignore[arg-type]
    assert publisher.stats().rejected_events == {"block_size": 1, "type": 2}
    await async_wait_until(lambda: view_of(log) == {101, 103})
    await async_wait_until(lambda: "internal error" in reasons_of(log))


async def test_tasks_bear_the_workers_name(publisher: EventPublisher, log: MemoryLog) -> None:
    await async_wait_until(lambda: log.next_offset == 1)
    names = {task.get_name() for task in asyncio.all_tasks()}
    assert {"publisher-drain:w", "publisher-control:w"} <= names


async def test_events_from_before_the_start_do_not_delay_later_ones(sink: FaultySink, log: MemoryLog) -> None:
    publisher = make_running(sink, heartbeat_s=60.0)
    publisher.publish([])
    async with publisher:
        await async_wait_until(lambda: log.next_offset == 1)
        publisher.publish([stored(1)])
        await async_wait_until(lambda: view_of(log) == {101})  # without a heartbeat


async def test_a_resync_after_an_overflow_does_not_wait_for_a_heartbeat(sink: FaultySink, log: MemoryLog) -> None:
    async with make_running(sink, queue_pages=2, heartbeat_s=60.0) as publisher:
        await async_wait_until(lambda: log.next_offset == 1)
        publisher.publish([stored(1), stored(2), stored(3), stored(4)])
        await async_wait_until(lambda: view_of(log) == {101, 102, 103, 104})
    assert len(reasons_of(log)) == 2


async def test_an_idle_publisher_sends_heartbeats(sink: FaultySink, log: MemoryLog) -> None:
    async with make_running(sink, heartbeat_s=0.02):
        await async_wait_until(lambda: log.next_offset >= 4)
    assert len(steps_of(log.read(0))) == 2


async def test_a_sink_that_is_away_costs_the_engine_nothing_and_the_view_is_right_afterwards(
    publisher: EventPublisher, sink: FaultySink, log: MemoryLog
) -> None:
    await async_wait_until(lambda: log.next_offset == 1)
    sink.error = SinkUnavailableError("away")
    publisher.publish([stored(1)])
    await async_wait_until(lambda: sink.num_attempts >= 3)
    assert not publisher.stats().is_sink_available
    for i in range(2, 500):
        publisher.publish([stored(i)])
    publisher.publish([BlockRemoved([1])])
    assert publisher.stats().is_broken
    sink.error = None
    await async_wait_until(lambda: view_of(log) == set(range(102, 600)))
    assert reasons_of(log) == ["start", "overflow"]
    assert publisher.stats().is_sink_available


async def test_a_sink_that_is_away_at_the_start_is_tried_again(sink: FaultySink, log: MemoryLog) -> None:
    sink.start_error = SinkUnavailableError("not there yet")
    async with make_running(sink) as publisher:
        publisher.publish([stored(1)])
        await async_wait_until(lambda: not publisher.stats().is_sink_available)
        sink.start_error = None
        await async_wait_until(lambda: view_of(log) == {101})


class WaitingSink(MemorySink):
    """A memory sink whose `send` waits during an outage, as a Kafka producer does."""

    def __init__(self, log: MemoryLog) -> None:
        super().__init__(log)
        self.is_there = asyncio.Event()

    async def send(self, records: Sequence[OutRecord]) -> None:
        await self.is_there.wait()
        await super().send(records)


async def test_an_outage_is_two_lines_however_many_publishers_share_the_sink(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("publisher.drain._SLOW_S", 0.05)
    sink = WaitingSink(log)
    async with make_running(sink, worker="one") as one, make_running(sink, worker="other") as other:
        for publisher in (one, other):
            publisher.publish([stored(1)])
            await async_wait_until(lambda p=publisher: not p.stats().is_sink_available)  # type: ignore[misc]
        sink.is_there.set()
        for publisher in (one, other):
            await async_wait_until(lambda p=publisher: p.stats().is_sink_available)  # type: ignore[misc]
    down, up = (record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    assert re.match(r"the log in memory takes no records since \S+Z: nothing was confirmed for", down)
    assert re.match(r"the log in memory takes records again after \d\.\d s", up)


async def test_a_publisher_that_closes_during_an_outage_does_not_keep_it_open_for_others(log: MemoryLog) -> None:
    sink = FaultySink(log)
    sink.error = SinkUnavailableError("away")
    async with make_running(sink, worker="one") as one:
        await async_wait_until(lambda: not one.stats().is_sink_available)
        await one.aclose(0.05)
        assert sink.outage.since is None


async def test_a_change_of_the_degraded_reason_wakes_a_publisher_that_has_nothing_to_say(
    sink: FaultySink, log: MemoryLog
) -> None:
    async with make_running(sink, heartbeat_s=1000) as publisher:
        await async_wait_until(lambda: log.next_offset == 1)
        await asyncio.to_thread(publisher.set_degraded_reason, "batches lost")
        await async_wait_until(lambda: log.next_offset == 2)
    assert decode_batch(log.read(1)[0].payload).degraded_reason == "batches lost"


async def test_records_refused_permanently_lead_to_a_resync(
    publisher: EventPublisher, sink: FaultySink, log: MemoryLog
) -> None:
    await async_wait_until(lambda: log.next_offset == 1)
    sink.error = SinkRejectedError("too large")
    publisher.publish([stored(1)])
    await async_wait_until(lambda: publisher.stats().rejected_records >= 1)
    sink.error = None
    await async_wait_until(lambda: SnapshotBegin("rejected") in steps_of(log.read(0)))
    last = decode_batch(log.read(0)[-1].payload)
    assert last.digest.tolist()[0] == 1


async def test_a_failed_task_is_seen_and_the_engine_continues(
    sink: FaultySink, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = make_running(sink, queue_pages=10)
    sink.error = RuntimeError("a mistake in a sink")
    await publisher.start()
    await async_wait_until(lambda: publisher.stats().failure is not None)
    assert publisher.stats().failure == "RuntimeError('a mistake in a sink')"
    await async_wait_until(lambda: "publisher-drain:w: failed and starts again" in caplog.text, what="the log line")
    for i in range(100):
        publisher.publish([stored(i)])
    report = await publisher.aclose(0.1)
    assert report.unflushed_pages == 100


async def test_a_failed_task_starts_again_and_everything_is_sent(sink: FaultySink, log: MemoryLog) -> None:
    async with make_running(sink) as publisher:
        await async_wait_until(lambda: log.next_offset == 1)
        sink.error = RuntimeError("a mistake in a sink")
        publisher.publish([stored(1)])
        await async_wait_until(lambda: publisher.stats().failure is not None)
        sink.error = None
        await async_wait_until(lambda: log.next_offset >= 2)
        resync = decode_batch(log.read(0)[1].payload)
        assert resync.steps[0] == SnapshotBegin("internal error")
        assert resync.steps[1].hashes.tolist() == [101]  # type: ignore[union-attr]
        await async_wait_until(lambda: publisher.stats().failure is None)
        log.request(ResyncRequest(publisher.stream.key, publisher.epoch, "gap"))
        await async_wait_until(lambda: publisher.stats().resyncs == 3)


async def test_requests_on_the_control_channel_lead_to_a_resync(publisher: EventPublisher, log: MemoryLog) -> None:
    publisher.publish([stored(1)])
    await async_wait_until(lambda: log.next_offset >= 1)
    log.request(ResyncRequest(publisher.stream.key, publisher.epoch - 1, "old"))
    log.request(ResyncRequest(publisher.stream.key, publisher.epoch, "gap"))
    await async_wait_until(lambda: "gap" in reasons_of(log))
    assert "old" not in reasons_of(log)
