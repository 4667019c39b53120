"""A running `EventPublisher`: tasks, threads, failing sinks, and the end."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from kv_events.codec import RemovedPages, StoredPages, decode_batch
from kv_events.log.memory import MemoryLog
from kv_events.schema import AllBlocksCleared, BlockRemoved, BlockStored, ResyncRequest, SnapshotBegin, SnapshotEnd
from publisher import (
    EventPublisher,
    OutRecord,
    PublisherSettings,
    PublisherStateError,
    SinkRejectedError,
    SinkUnavailableError,
    record_builder,
)
from publisher.change_queue import PageChanges
from publisher.drain import Drain
from publisher.ledger import LedgerCopy, resync_changes
from publisher.sinks import MemorySink
from tests.support.log.records import words
from tests.support.waiting import async_wait_until, wait_until

NUM_REFERENCES = 4
"""To an event of a list, a slice of which is iterated over."""


class FaultySink(MemorySink):
    """A memory sink that fails on demand."""

    def __init__(self, log: MemoryLog) -> None:
        super().__init__(log)
        self.error: Exception | None = None
        self.start_error: Exception | None = None
        self.num_attempts = 0

    async def start(self) -> None:
        if self.start_error is not None:
            raise self.start_error
        await super().start()

    async def send(self, records: Sequence[OutRecord]) -> None:
        self.num_attempts += 1
        if self.error is not None:
            raise self.error
        await super().send(records)


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


@pytest.fixture
def sink(log: MemoryLog) -> FaultySink:
    return FaultySink(log)


def make(sink: MemorySink, **settings: Any) -> EventPublisher:
    values = {
        "model": "m",
        "worker": "w",
        "block_size": 4,
        "linger_ms": 1,
        "ledger_pages": 10_000,
        "resync_min_interval_s": 0,
        "resync_jitter_s": 0,
        **settings,
    }
    return EventPublisher(PublisherSettings(**values), sink)


@pytest.fixture
async def publisher(sink: FaultySink) -> AsyncIterator[EventPublisher]:
    async with make(sink, queue_pages=100) as publisher:
        yield publisher


def stored(*names: int) -> BlockStored:
    return BlockStored(list(names), None, [], 4, sequence_hashes=words([name + 100 for name in names]))


def steps_of(log: MemoryLog) -> list[Any]:
    batches = [decode_batch(record.payload) for record in log.read(0, 10_000)]
    assert [batch.seq for batch in batches] == list(range(len(batches)))
    return [step for batch in batches for step in batch.steps]


def view_of(log: MemoryLog) -> set[int]:
    """Return the pages that a reader of the whole log holds, on any medium."""
    pages: set[int] = set()
    named: set[int] | None = None
    for step in steps_of(log):
        match step:
            case StoredPages():
                pages.update(step.hashes.tolist())
                if named is not None:
                    named.update(step.hashes.tolist())
            case RemovedPages():
                pages.difference_update(step.hashes.tolist())
            case SnapshotBegin():
                named = set()
            case SnapshotEnd():
                assert named is not None
                pages, named = named, None
    return pages


def reasons_of(log: MemoryLog) -> list[str]:
    return [step.reason for step in steps_of(log) if isinstance(step, SnapshotBegin)]


async def test_what_is_published_arrives_without_further_calls(publisher: EventPublisher, log: MemoryLog) -> None:
    await async_wait_until(lambda: log.next_offset == 1)
    publisher.publish([stored(1, 2)])
    await async_wait_until(lambda: view_of(log) == {101, 102})
    publisher.publish([BlockRemoved([1])])
    await async_wait_until(lambda: view_of(log) == {102})


async def test_a_caller_may_reuse_its_list_of_events(publisher: EventPublisher, log: MemoryLog) -> None:
    events: list[Any] = [stored(1)]
    publisher.publish(events)
    events[:] = [stored(2)]
    publisher.publish(events)
    events.clear()
    await async_wait_until(lambda: view_of(log) == {101, 102})


async def test_calls_of_every_size_keep_their_order(sink: FaultySink, log: MemoryLog) -> None:
    async with make(sink) as publisher:
        for _ in range(3):
            publisher.publish([stored(*range(1000))])
            publisher.publish([BlockRemoved([1, 2, 3])])
            publisher.publish([stored(2)])
            publisher.publish([AllBlocksCleared()])
            publisher.publish([stored(4), BlockRemoved([5])])
            publisher.publish([stored(*range(10, 1000)), BlockRemoved([*range(12, 1000)])])
        assert publisher.stats().pages["removed_unknown"] == 3
        publisher.check()
        await async_wait_until(lambda: view_of(log) == {104, 110, 111})


def test_an_engine_that_never_pauses_loses_nothing_and_few_events_are_kept(sink: FaultySink, log: MemoryLog) -> None:
    with make(sink, ledger_pages=100_000) as publisher:
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
    publisher = make(sink, heartbeat_s=60.0)
    publisher.publish([])
    async with publisher:
        await async_wait_until(lambda: log.next_offset == 1)
        publisher.publish([stored(1)])
        await async_wait_until(lambda: view_of(log) == {101})  # without a heartbeat


async def test_a_resync_after_an_overflow_does_not_wait_for_a_heartbeat(sink: FaultySink, log: MemoryLog) -> None:
    async with make(sink, queue_pages=2, heartbeat_s=60.0) as publisher:
        await async_wait_until(lambda: log.next_offset == 1)
        publisher.publish([stored(1), stored(2), stored(3), stored(4)])
        await async_wait_until(lambda: view_of(log) == {101, 102, 103, 104})
    assert len(reasons_of(log)) == 2


async def test_an_idle_publisher_sends_heartbeats(sink: FaultySink, log: MemoryLog) -> None:
    async with make(sink, heartbeat_s=0.02):
        await async_wait_until(lambda: log.next_offset >= 4)
    assert len(steps_of(log)) == 2


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
    async with make(sink) as publisher:
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
    async with make(sink, worker="one") as one, make(sink, worker="other") as other:
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
    async with make(sink, worker="one") as one:
        await async_wait_until(lambda: not one.stats().is_sink_available)
        await one.aclose(0.05)
        assert sink.outage.since is None


async def test_records_refused_permanently_lead_to_a_resync(
    publisher: EventPublisher, sink: FaultySink, log: MemoryLog
) -> None:
    await async_wait_until(lambda: log.next_offset == 1)
    sink.error = SinkRejectedError("too large")
    publisher.publish([stored(1)])
    await async_wait_until(lambda: publisher.stats().rejected_records >= 1)
    sink.error = None

    def resync_arrived() -> bool:
        batches = [decode_batch(record.payload) for record in log.read(0)]
        return any(SnapshotBegin("rejected") in batch.steps for batch in batches)

    await async_wait_until(resync_arrived)
    last = decode_batch(log.read(0)[-1].payload)
    assert last.digest.tolist()[0] == 1


async def test_a_failed_task_is_seen_and_the_engine_continues(
    sink: FaultySink, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = make(sink, queue_pages=10)
    sink.error = RuntimeError("a mistake in a sink")
    await publisher.start()
    await async_wait_until(lambda: publisher.stats().failure is not None)
    assert publisher.stats().failure == "RuntimeError('a mistake in a sink')"
    assert "publisher-drain:w: failed and starts again" in caplog.text
    for i in range(100):
        publisher.publish([stored(i)])
    report = await publisher.aclose(0.1)
    assert report.unflushed_pages == 100


async def test_a_failed_task_starts_again_and_everything_is_sent(sink: FaultySink, log: MemoryLog) -> None:
    async with make(sink) as publisher:
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


async def test_closing_sends_what_waits_and_refuses_what_comes_later(sink: FaultySink, log: MemoryLog) -> None:
    publisher = make(sink, linger_ms=60_000)
    await publisher.start()
    await async_wait_until(lambda: log.next_offset == 1)
    publisher.publish([stored(1, 2, 3)])
    assert await publisher.aclose() == (3, 0, 0)
    assert view_of(log) == {101, 102, 103}
    publisher.publish([stored(4)])
    assert publisher.stats().rejected_events == {"closed": 1}


async def test_closing_ends_in_time_and_reports_what_was_not_sent(
    sink: FaultySink, log: MemoryLog, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = make(sink, batch_pages=2, inflight_batches=1)
    await publisher.start()
    await async_wait_until(lambda: log.next_offset == 1)
    sink.error = SinkUnavailableError("away")
    publisher.publish([stored(1, 2, 3)])
    await async_wait_until(lambda: publisher.stats().in_flight == 2)
    began = time.monotonic()
    report = await publisher.aclose(deadline_s=0.1)
    assert time.monotonic() - began < 5
    assert report == (0, 3, 1)
    assert "closed without sending all" in caplog.text


async def test_a_publisher_never_started_reports_what_it_holds_back(sink: FaultySink) -> None:
    publisher = make(sink)
    publisher.publish([stored(1, 2)])
    assert (await publisher.aclose()).unflushed_pages > 0


async def test_starting_twice_is_refused(publisher: EventPublisher) -> None:
    with pytest.raises(PublisherStateError, match="publisher w was already started"):
        await publisher.start()
    with pytest.raises(PublisherStateError):
        publisher.start_in_thread()
    with pytest.raises(PublisherStateError, match="use aclose"):
        publisher.close()


def test_an_engine_without_a_loop_gets_a_thread(sink: FaultySink, log: MemoryLog) -> None:
    with make(sink) as publisher:
        publisher.publish([stored(1)])
        wait_until(lambda: view_of(log) == {101})
        assert "publisher:w" in [thread.name for thread in threading.enumerate()]
    wait_until(lambda: "publisher:w" not in [thread.name for thread in threading.enumerate()])


def test_a_thread_that_cannot_start_is_an_error(sink: FaultySink, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Drain) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(Drain, "start", fail)
    publisher = make(sink)
    with pytest.raises(PublisherStateError, match=r"publisher w: .*too many open files"):
        publisher.start_in_thread()
    assert "publisher:w" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(PublisherStateError, match="not started in a thread"):
        publisher.close()


async def test_the_event_loop_does_not_wait_for_a_resync_to_be_put_in_order(
    sink: FaultySink, log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()

    def slow(held: LedgerCopy) -> PageChanges:
        assert may_go_on.wait(10)
        return resync_changes(held)

    monkeypatch.setattr(record_builder, "resync_changes", slow)
    async with make(sink) as publisher:
        publisher.publish([stored(1)])
        await async_wait_until(lambda: publisher.stats().resyncs == 1)
        assert log.next_offset == 0
        may_go_on.set()
        await async_wait_until(lambda: view_of(log) == {101})


async def test_closing_while_a_resync_is_made_reports_all_of_it(
    sink: FaultySink, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_making, may_go_on = threading.Event(), threading.Event()

    def slow(held: LedgerCopy) -> PageChanges:
        is_making.set()
        assert may_go_on.wait(10)
        return resync_changes(held)

    monkeypatch.setattr(record_builder, "resync_changes", slow)
    publisher = make(sink)
    publisher.publish([stored(1, 2)])
    await publisher.start()
    await async_wait_until(is_making.is_set)
    closing = asyncio.ensure_future(publisher.aclose(deadline_s=0))
    asyncio.get_running_loop().call_later(0.05, may_go_on.set)
    assert await closing == (0, 2, 0)


def test_many_threads_may_publish_at_once(sink: FaultySink, log: MemoryLog) -> None:
    publisher = make(sink, queue_pages=10_000)

    def work(first: int) -> None:
        for i in range(first, first + 200):
            publisher.publish([stored(i)])
            if i % 2:
                publisher.publish([BlockRemoved([i])])

    publisher.start_in_thread()
    threads = [threading.Thread(target=work, args=(1000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report = publisher.close(deadline_s=10)
    assert (report.unflushed_pages, report.unflushed_batches) == (0, 0)
    publisher.check()
    assert view_of(log) == {1000 * i + j + 100 for i in range(4) for j in range(0, 200, 2)}


def test_publishing_after_the_thread_ended_is_harmless(sink: FaultySink, caplog: pytest.LogCaptureFixture) -> None:
    publisher = make(sink)
    publisher.start_in_thread()
    publisher.close()
    with caplog.at_level(logging.ERROR):
        publisher.publish([stored(1)])
        publisher.request_resync("operator")
    assert caplog.records == []
