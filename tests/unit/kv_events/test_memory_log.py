"""The log in memory: bounds, order, waiting across threads."""

from __future__ import annotations

import threading

import pytest

from kv_events.errors import InvalidValueError
from kv_events.log.memory import LogTruncatedError, MemoryLog
from kv_events.schema import ResyncRequest


def test_records_come_back_in_order_with_their_offsets() -> None:
    log = MemoryLog()
    assert [log.append(b"k", bytes([i]), i) for i in range(5)] == [0, 1, 2, 3, 4]
    assert [(r.offset, r.payload, r.timestamp_ms) for r in log.read(2)] == [(2, b"\2", 2), (3, b"\3", 3), (4, b"\4", 4)]
    assert [r.offset for r in log.read(0, max_records=2)] == [0, 1]
    assert list(log.read(5)) == []


def test_beyond_its_capacity_the_oldest_records_go_and_readers_get_an_error() -> None:
    log = MemoryLog(capacity_bytes=100)
    for _ in range(20):
        log.append(b"k", bytes(10), 0)
    assert (log.first_offset, log.next_offset) == (10, 20)
    with pytest.raises(LogTruncatedError, match="offset 3 was dropped; the log begins at 10"):
        log.read(3)


def test_a_record_larger_than_the_capacity_is_kept_alone() -> None:
    log = MemoryLog(capacity_bytes=5)
    log.append(b"k", b"ab", 0)
    log.append(b"k", bytes(10), 0)
    assert [len(r.payload) for r in log.read(log.first_offset)] == [10]


def test_a_capacity_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="capacity_bytes: got 0"):
        MemoryLog(capacity_bytes=0)


async def test_a_record_of_another_thread_wakes_a_reader() -> None:
    log = MemoryLog()
    watch = log.watch()
    writer = threading.Timer(0.05, lambda: log.append(b"k", b"v", 0))
    writer.start()
    assert await watch.wait(10.0)
    assert not await watch.wait(0.01)
    watch.close()
    writer.join()


def test_requests_reach_every_listener_until_it_stops() -> None:
    log = MemoryLog()
    heard: list[str] = []
    stop = log.listen(lambda request: heard.append(f"one {request.reason}"))
    log.listen(lambda request: heard.append(f"two {request.reason}"))
    log.request(ResyncRequest("s", 1, "a"))
    stop()
    log.request(ResyncRequest("s", 1, "b"))
    assert heard == ["one a", "two a", "two b"]


def test_a_log_that_is_read_once_keeps_only_what_was_not_read() -> None:
    log = MemoryLog(is_read_once=True)
    for number in range(5):
        log.append(b"k", bytes([number]), 0)
    first = log.read(0, max_records=3)
    assert [record.offset for record in first] == [0, 1, 2]
    assert log.first_offset == 0  # until the reader continues, it may read the same records again
    assert [record.offset for record in log.read(3)] == [3, 4]
    assert (log.first_offset, log.next_offset) == (3, 5)
    assert list(log.read(5)) == []
    assert (log.first_offset, log.next_offset) == (5, 5)
    assert log.append(b"k", b"v", 0) == 5
    with pytest.raises(LogTruncatedError, match="offset 4 was dropped; the log begins at 5"):
        log.read(4)
