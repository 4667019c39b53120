"""The consumer: load, seek, catch up, request resyncs, forget, save."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from indexer.applier import Applier, DeadLetters
from indexer.consumer import Consumer, ConsumerStateError
from indexer.freshness import NO_HEARTBEAT
from indexer.namespaces import Namespaces
from indexer.scores import stream_scores
from indexer.settings import IndexerSettings
from indexer.slices import Slices
from indexer.snapshots.base import FolderStore
from indexer.snapshots.image import unpack
from indexer.sources.base import Source
from indexer.sources.file import FileSource
from indexer.sources.memory import MemorySource
from indexer.views import LATE_S, View, ViewState
from kv_events.errors import RecordRejectedError
from kv_events.log.event_log import EventLogReader
from kv_events.log.memory import MemoryLog
from kv_events.records import Channel, LogRecord
from kv_events.schema import ResyncRequest
from tests.support.log.late_log import write_log
from tests.support.log.plain_log import flip, segments
from tests.support.log.records import Stream, removed, stored
from tests.support.waiting import async_wait_until

SETTINGS = IndexerSettings(max_pages=100_000, resync_retry_s=0.2)


def new_consumer(
    log: MemoryLog,
    folder: Path | None = None,
    settings: IndexerSettings = SETTINGS,
    ahead_s: float = 0.0,
    source: Source | None = None,
    dead_letters: Path | None = None,
) -> Consumer:
    """source: in place of the log. ahead_s: of the consumer's clock. folder: of the snapshots."""
    store = FolderStore(folder) if folder else None
    applier = Applier(Namespaces(settings), DeadLetters(dead_letters))
    return Consumer(source or MemorySource(log), applier, settings, store, lambda: time.time() + ahead_s)


def put(log: MemoryLog, record: LogRecord) -> None:
    log.append(record.key, record.payload, record.timestamp_ms)


def put_chain(log: MemoryLog, stream: Stream, num_batches: int, num_pages: int) -> None:
    """Let a stream store a chain, in batches of some pages."""
    for first in range(1, num_batches * num_pages, num_pages):
        put(log, stream.batch(stored((first - 1, list(range(first, first + num_pages))))))


def view_of(consumer: Consumer, stream: Stream) -> View:
    view = consumer.namespaces.view(stream.id)
    assert view is not None
    return view


async def caught_up(consumer: Consumer, log: MemoryLog) -> None:
    progress = consumer.progress
    await async_wait_until(lambda: consumer.ready and progress.positions.get(0, 0) == log.next_offset, what="the end")


@asynccontextmanager
async def reading(log: MemoryLog, *args: Any, **more: Any) -> AsyncIterator[Consumer]:
    """Run a consumer, see `new_consumer`, that has read the log. It leaves a snapshot of what it has read."""
    consumer = new_consumer(log, *args, **more)
    async with consumer.running():
        await caught_up(consumer, log)
        yield consumer


class SlowProbes(MemorySource):
    """A source that measures its ends at once and returns them later."""

    def __init__(self, log: MemoryLog) -> None:
        super().__init__(log)
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.num_waiting = 0

    async def ends(self) -> Mapping[int, int]:
        ends = await super().ends()
        self.num_waiting += 1
        await self.may_answer.wait()
        self.num_waiting -= 1
        return ends


async def test_records_are_applied_while_the_log_is_slow_to_say_where_it_ends() -> None:
    log, stream = MemoryLog(), Stream()
    put(log, stream.batch(stored((0, [1]))))
    source = SlowProbes(log)
    async with reading(log, source=source) as consumer:
        source.may_answer.clear()
        await async_wait_until(lambda: source.num_waiting == 1, what="a probe")
        for i in range(1, 20):
            put(log, stream.batch(stored((i, [i + 1]))))
            await caught_up(consumer, log)
        source.may_answer.set()  # with ends before the newest records
        await async_wait_until(lambda: source.num_waiting == 0, what="its answer")
        source.may_answer.clear()
        await async_wait_until(lambda: source.num_waiting == 1, what="the next probe")
        view = view_of(consumer, stream)
        assert (view.state, consumer.failure, consumer.lag()) == (ViewState.LIVE, None, 0)


async def test_a_restart_loads_the_snapshot_and_reads_only_what_came_since(tmp_path: Path) -> None:
    log, stream = MemoryLog(), Stream()
    for i in range(20):
        put(log, stream.batch(stored((i, [i + 1])), stored((0, [i + 1]), tier=i % 4)))
    async with reading(log, tmp_path):
        pass
    put(log, stream.batch(stored((20, [21]))))
    async with reading(log, tmp_path) as second:
        assert second.applier.records == 1
        view = view_of(second, stream)
        assert (view.state, sum(view.num_pages)) == (ViewState.LIVE, len(stream.held))
        view.index.check()


async def test_a_view_that_was_heard_long_before_the_restart_is_live_from_the_next_record_on(tmp_path: Path) -> None:
    log, stream = MemoryLog(), Stream()
    put(log, stream.batch(stored((0, [1]))))
    async with reading(log, tmp_path):
        pass
    async with reading(log, tmp_path, ahead_s=LATE_S + 1) as second:
        view = view_of(second, stream)
        assert (second.freshness.state(view), second.freshness.reason(view)) == (ViewState.STALE, NO_HEARTBEAT)
        put(log, stream.batch(stored((1, [2])), now=time.time() + LATE_S + 1))
        await caught_up(second, log)
        assert second.freshness.state(view) is ViewState.LIVE


async def test_a_damaged_snapshot_is_a_cold_start(tmp_path: Path) -> None:
    log, stream = MemoryLog(), Stream()
    put(log, stream.batch(stored((0, [1]))))
    async with reading(log, tmp_path):
        pass
    flip(tmp_path / "views.kvsnap", -1)
    async with reading(log, tmp_path) as second:
        assert second.applier.records == 1


async def test_a_stale_view_asks_its_publisher_and_is_mended() -> None:
    log, requests, stream = MemoryLog(), list[ResyncRequest](), Stream()
    log.listen(requests.append)
    put(log, stream.batch(stored((0, [1, 2]))))
    async with reading(log) as consumer:
        stream.batch(stored((2, [3])))  # lost
        put(log, stream.batch(stored((3, [4]))))
        await async_wait_until(lambda: bool(requests), what="a resync request")
        assert (requests[0].stream, requests[0].epoch, requests[0].reason) == (stream.id.key, 1, "gap")
        put(log, stream.resync())
        view = view_of(consumer, stream)
        await async_wait_until(lambda: view.state is ViewState.LIVE, what="a live view")
        assert view.num_pages[0] == 4


async def test_a_silent_worker_expires_then_is_forgotten() -> None:
    log, stream, other = MemoryLog(), Stream("silent"), Stream("alive")
    settings = IndexerSettings(max_pages=1000, worker_ttl_s=0.6, forget_after_s=1.5)
    consumer = new_consumer(log, settings=settings)
    async with consumer.running():
        put(log, stream.batch(stored((0, [1]))))
        put(log, other.batch(stored((0, [1]))))
        await caught_up(consumer, log)
        view = view_of(consumer, stream)

        def expired() -> bool:
            put(log, other.batch())
            return consumer.freshness.state(view) is ViewState.EXPIRED

        await async_wait_until(expired, what="expiry")
        (namespace,) = consumer.namespaces
        found = stream_scores(namespace, np.array([1], np.uint64), consumer.freshness)
        assert [s.worker for s in found] == ["alive"]

        def forgotten() -> bool:
            put(log, other.batch())
            return consumer.namespaces.view(stream.id) is None

        await async_wait_until(forgotten, what="the worker to be forgotten")
        assert namespace.index.num_pages == 1


async def test_queries_get_through_while_a_large_backlog_is_applied() -> None:
    log, turns = MemoryLog(), 0
    for worker in range(8):
        put_chain(log, Stream(f"w{worker}"), 12, 8000)
    consumer = new_consumer(log)
    async with consumer.running():
        while not consumer.ready:
            await asyncio.sleep(0)
            turns += 1
        assert consumer.applier.records == 96
    assert turns > 8


class BrokenSource(MemorySource):
    """A source with a bug that can be repaired."""

    is_broken = False

    async def fetch(self) -> Sequence[LogRecord]:
        if self.is_broken:
            raise ZeroDivisionError
        return await super().fetch()


async def test_a_loop_that_fails_reports_it_and_starts_again() -> None:
    log, stream = MemoryLog(), Stream()
    put(log, stream.batch(stored((0, [1]))))
    source = BrokenSource(log)
    async with reading(log, source=source) as consumer:
        source.is_broken = True
        await async_wait_until(lambda: consumer.failure is not None, what="the failure")
        assert (isinstance(consumer.failure, ZeroDivisionError), consumer.ready) == (True, False)
        put(log, stream.batch(stored((1, [2]))))
        source.is_broken = False
        await caught_up(consumer, log)
        view = view_of(consumer, stream)
        assert (view.state, view.num_pages[0], consumer.applier.records) == (ViewState.LIVE, 2, 2)


async def test_a_record_that_causes_an_error_is_a_dead_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    log, stream, other = MemoryLog(), Stream("w0"), Stream("w1")
    put(log, stream.batch(stored((0, [1]))))
    async with reading(log) as consumer:
        view = view_of(consumer, stream)
        with monkeypatch.context() as patch:
            patch.setattr(view.index, "store", lambda *_: 1 / 0)
            put(log, stream.batch(stored((0, [2]))))
            await caught_up(consumer, log)
        assert (view.state, view.stale_reason) == (ViewState.STALE, "internal error")
        assert consumer.applier.dead_letters.counts == {"internal": 1}
        put(log, other.batch(stored((0, [1]))))
        put(log, stream.resync())
        await caught_up(consumer, log)
        assert {view.state for view in consumer.namespaces.views} == {ViewState.LIVE}


async def test_a_consumer_runs_once() -> None:
    log, stream = MemoryLog(), Stream()
    consumer = new_consumer(log)
    async with consumer.running():
        with pytest.raises(ConsumerStateError, match="already run"):
            async with consumer.running():
                pass
        put_chain(log, stream, 2, 10)
        await caught_up(consumer, log)
        assert view_of(consumer, stream).num_pages[0] == 20
    with pytest.raises(ConsumerStateError, match="already run"):
        async with consumer.running():
            pass


async def test_a_stop_in_the_middle_of_a_backlog_saves_whole_records_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.consumer.Slices", lambda: Slices(0.0))  # pause after every slice
    log, stream = MemoryLog(), Stream()
    put_chain(log, stream, 6, 30_000)
    settings = IndexerSettings(max_pages=500_000)
    first = new_consumer(log, tmp_path, settings)
    async with first.running():
        await async_wait_until(lambda: first.namespaces.view(stream.id) is not None, what="the first slice")
    assert (tmp_path / "views.kvsnap").is_file()
    async with reading(log, tmp_path, settings) as second:
        view = view_of(second, stream)
        assert (view.state, view.num_pages[0]) == (ViewState.LIVE, 180_000)


async def test_snapshots_taken_during_a_backlog_hold_whole_records_only(tmp_path: Path) -> None:
    log, stream = MemoryLog(), Stream()
    settings = IndexerSettings(max_pages=500_000, snapshot_interval_s=0.001)
    put_chain(log, stream, 8, 30_000)
    consumer = new_consumer(log, tmp_path, settings)
    seen = set()
    async with consumer.running():
        while not consumer.ready:
            await asyncio.sleep(0)
            if consumer.snapshot_counts.written not in seen and (tmp_path / "views.kvsnap").is_file():
                seen.add(consumer.snapshot_counts.written)
                saved = unpack((tmp_path / "views.kvsnap").read_bytes(), settings)
                assert all(view.num_pages[0] == 30_000 * saved.positions[0] for view in saved.namespaces.views)


async def test_a_recreated_log_is_read_from_its_beginning(tmp_path: Path) -> None:
    old, stream = MemoryLog(), Stream()
    for i in range(20):
        put(old, stream.batch(stored((0, [i + 1]))))
    async with reading(old, tmp_path):
        pass
    recreated = MemoryLog()
    stream.restart()
    put(recreated, stream.batch(stored((0, [77]))))
    async with reading(recreated, tmp_path) as second:
        view = view_of(second, stream)
        assert (view.epoch, view.state, view.num_pages[0]) == (2, ViewState.LIVE, 1)


@pytest.mark.parametrize(
    ("key", "payload", "reason"),
    [(b"key", b"\xc1 not a batch", "msgpack"), (b"k" * 70_000, bytes(1_050_000), "record_size")],
)
async def test_dead_letters_of_any_size_are_kept_and_never_fatal(
    tmp_path: Path, key: bytes, payload: bytes, reason: str
) -> None:
    log, stream = MemoryLog(), Stream()
    log.append(key, payload, 5)
    put(log, stream.batch(stored((0, [1]))))
    async with reading(log, dead_letters=tmp_path / "dead") as consumer:
        assert (consumer.failure, consumer.applier.dead_letters.counts) == (None, {reason: 1})
    ((_, kept),) = EventLogReader(tmp_path / "dead").read()
    assert (kept.key, kept.payload, kept.timestamp_ms) == (key[:200], payload[:1_000_000], 5)


def test_a_full_folder_of_dead_letters_gets_no_more_also_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("indexer.applier._MAX_FOLDER_BYTES", 500)
    for begun in range(2):
        letters = DeadLetters(tmp_path)
        for offset in range(50):
            letters.put(LogRecord(0, offset, 5, b"key", b""), RecordRejectedError("msgpack", "empty"))
        letters.close()
        assert letters.counts == {"msgpack": 50}
        assert caplog.messages.count("the dead-letter folder is full; further records are only counted") == begun + 1
    assert sum(path.stat().st_size for path in segments(tmp_path)) in range(400, 501)
    assert [kept.offset for _, kept in EventLogReader(tmp_path).read()] == [*range(12)]


async def test_an_operators_resync_reaches_a_busy_stream() -> None:
    log, requests, stream = MemoryLog(), list[ResyncRequest](), Stream()
    log.listen(requests.append)
    put(log, stream.batch(stored((0, [1]))))
    async with reading(log) as consumer:
        view = view_of(consumer, stream)
        consumer.resyncs.demand(view)
        assert view.state is ViewState.LIVE

        def is_asked() -> bool:
            put(log, stream.batch())
            return bool(requests)

        await async_wait_until(is_asked, what="the operator's request")
        assert requests[0].reason == "operator"


async def test_a_damaged_segment_of_a_followed_log_is_skipped(tmp_path: Path) -> None:
    stream = Stream()
    write_log(tmp_path, (stream.batch(stored((0, [i + 1]))) for i in range(20)), 1000)
    flip(segments(tmp_path)[1], 40)
    consumer = new_consumer(MemoryLog(), source=FileSource(tmp_path))
    async with consumer.running():
        await async_wait_until(lambda: consumer.ready, what="ready")
        view = view_of(consumer, stream)
        assert (view.counters.gaps, view.num_pages[0] > 10) == (1, True)


async def test_records_of_other_channels_change_no_view_and_count_as_read(tmp_path: Path) -> None:
    stream, decision = Stream(), LogRecord(0, 0, 1, b"router", b"anything", Channel.DECISIONS)
    write_log(tmp_path, (decision, stream.batch(stored((0, [1, 2]))), decision, stream.batch(removed([2])), decision))
    consumer = new_consumer(MemoryLog(), source=FileSource(tmp_path))
    async with consumer.running():
        await async_wait_until(lambda: consumer.ready, what="ready")
    view = view_of(consumer, stream)
    assert (consumer.progress.positions, view.num_pages[0], view.state) == ({0: 5}, 1, ViewState.LIVE)
    assert (consumer.applier.records, consumer.applier.dead_letters.counts) == (2, {})
