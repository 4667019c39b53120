"""The start and the end of a publisher, in an event loop and on a thread."""

import asyncio
import logging
import threading
import time

import numpy as np
import pytest

from kv_events.log.memory import MemoryLog
from kv_events.schema import BlockRemoved
from publisher import EventPublisher, PublisherStateError, SinkUnavailableError, record_builder
from publisher.drain import Drain
from publisher.kernels.changes import PageChanges
from publisher.kernels.events import PageEvents
from publisher.ledger import LedgerCopy, resync_changes
from tests.rigs.publisher import FaultySink, make_running, stored, view_of
from tests.support.waiting import async_wait_until, wait_until


async def test_closing_sends_what_waits_and_refuses_what_comes_later(sink: FaultySink, log: MemoryLog) -> None:
    publisher = make_running(sink, linger_ms=60_000)
    await publisher.start()
    await async_wait_until(lambda: log.next_offset == 1)
    publisher.publish([stored(1, 2, 3)])
    assert await publisher.aclose() == (3, 0, 0)
    assert view_of(log) == {101, 102, 103}
    publisher.publish([stored(4)])
    publisher.publish_columns(PageEvents.removed(np.array([1], np.uint64), 0), None)
    assert publisher.stats().rejected_events == {"closed": 2}
    assert publisher.stats().pages["held"] == 3


async def test_closing_ends_in_time_and_reports_what_was_not_sent(
    sink: FaultySink, log: MemoryLog, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("publisher.drain._MAX_IN_FLIGHT", 1)
    publisher = make_running(sink, batch_pages=2)
    await publisher.start()
    await async_wait_until(lambda: log.next_offset == 1)
    sink.error = SinkUnavailableError("away")
    publisher.publish([stored(1, 2, 3)])
    await async_wait_until(lambda: publisher.stats().in_flight == 2)
    began = time.monotonic()
    report = await publisher.aclose(deadline_s=0.1)
    assert time.monotonic() - began < 30
    assert report == (0, 3, 1)
    assert "closed without sending all" in caplog.text


async def test_a_publisher_never_started_reports_what_it_holds_back(sink: FaultySink) -> None:
    publisher = make_running(sink)
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
    with make_running(sink) as publisher:
        publisher.publish([stored(1)])
        wait_until(lambda: view_of(log) == {101})
        assert "publisher:w" in [thread.name for thread in threading.enumerate()]
    wait_until(lambda: "publisher:w" not in [thread.name for thread in threading.enumerate()])


def test_a_thread_that_cannot_start_is_an_error(sink: FaultySink, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Drain) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(Drain, "start", fail)
    publisher = make_running(sink)
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
    async with make_running(sink) as publisher:
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
    publisher = make_running(sink)
    publisher.publish([stored(1, 2)])
    await publisher.start()
    await async_wait_until(is_making.is_set)
    closing = asyncio.ensure_future(publisher.aclose(deadline_s=0))
    asyncio.get_running_loop().call_later(0.05, may_go_on.set)
    assert await closing == (0, 2, 0)


def test_many_threads_may_publish_at_once(sink: FaultySink, log: MemoryLog) -> None:
    publisher = make_running(sink, queue_pages=10_000)

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
    publisher = make_running(sink)
    publisher.start_in_thread()
    publisher.close()
    with caplog.at_level(logging.ERROR):
        publisher.publish([stored(1)])
        publisher.request_resync("operator")
    assert caplog.records == []
