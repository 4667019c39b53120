"""Resyncs of an `EventPublisher` without tasks: what begins them, and what they state."""

import threading

import numpy as np
import pytest

from kv_events.schema import BlockRemoved, ResyncRequest, SnapshotBegin, SnapshotEnd, StorageMedium
from publisher.kernels.events import PageEvents
from tests.models.stream_reader import StreamReader
from tests.rigs.publisher import NOW, batches_of, make_begun, make_publisher, num_pages, steps_of, stored


def test_an_overflow_leads_to_a_resync() -> None:
    publisher = make_begun(queue_pages=10)
    publisher.publish([stored(*range(1, 9))])
    publisher.publish([stored(*range(20, 25))])
    publisher.publish([BlockRemoved([1])])
    stats = publisher.stats()
    assert (stats.queued, stats.dropped, stats.is_broken) == (0, 14, True)
    begin, pages, end = steps_of(publisher.take_records(NOW, force=True))
    assert (begin, end) == (SnapshotBegin("overflow"), SnapshotEnd())
    assert sorted(pages.hashes.tolist()) == [*range(102, 109), *range(120, 125)]
    assert not publisher.stats().is_broken


def test_the_bound_counts_what_was_taken_and_not_confirmed() -> None:
    publisher = make_begun(queue_pages=10)
    publisher.publish([stored(*range(1, 9))])
    publisher.take_records(NOW, force=True)
    assert publisher.stats().in_flight == 8
    publisher.publish([stored(11, 12, 13)])
    assert publisher.stats().is_broken


def test_resyncs_after_overflows_are_rate_limited_and_heartbeats_until_then_claim_nothing() -> None:
    publisher = make_begun(queue_pages=2, resync_min_interval_s=5, heartbeat_s=2)
    publisher.publish([stored(1, 2, 3)])
    (batch,) = batches_of(publisher.take_records(NOW + 2))
    assert (batch.steps, batch.digest.tolist()[0]) == ([], 3)
    assert steps_of(publisher.take_records(NOW + 4.9)) == []
    assert steps_of(publisher.take_records(NOW + 5))[0] == SnapshotBegin("overflow")


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_a_clock_that_was_set_holds_up_no_resync(step_s: float) -> None:
    publisher = make_begun(queue_pages=2, resync_min_interval_s=5, heartbeat_s=100)
    publisher.publish([stored(1, 2, 3)])
    assert publisher.take_records(NOW + 1) == []
    now = NOW + 1 + step_s
    records = [*publisher.take_records(now), *publisher.take_records(now + 4)]
    assert SnapshotBegin("overflow") in steps_of(records)


def test_resyncs_that_are_made_while_the_engine_publishes_equal_the_ledger() -> None:
    publisher = make_publisher(queue_pages=2_000_000, ledger_pages=30_000, batch_pages=30_000, batch_bytes=900_000)
    publisher.publish([stored(*range(start, start + 1000)) for start in range(0, 20_000, 1000)])
    is_over = threading.Event()

    def engine() -> None:
        random = np.random.default_rng(1)
        while not is_over.is_set():
            some = random.integers(0, 30_000, 50).tolist()
            publisher.publish([BlockRemoved(some), stored(*some[:40])])

    thread = threading.Thread(target=engine)
    thread.start()
    reader = StreamReader()
    for _ in range(20):
        publisher.request_resync("test")
        for record in publisher._builder.take_records(NOW, force=True, max_records=3):
            batch = reader.read(record.payload)  # each resync is in one batch here
            assert batch.digest.tolist()[:4] == [len(reader.pages), 0, 0, 0]
    is_over.set()
    thread.join()
    assert publisher.stats().dropped == 0


def test_a_million_pages_that_come_at_once_do_not_keep_the_drain_waiting() -> None:
    events, length = 10_000, 100
    total = events * length
    publisher = make_begun(queue_pages=total, ledger_pages=total)
    names = np.arange(total, dtype=np.uint64)
    no_parents = np.zeros(events, np.uint64), np.zeros(events, np.uint8)
    columns = PageEvents(names, names, np.full(events, length), *no_parents).stored_on(0)
    engine = threading.Thread(target=publisher.publish_columns, args=(columns, None))
    engine.start()
    while not publisher._builder.take_records(NOW, max_records=1):  # without that bound, until all are taken
        pass
    assert publisher.stats().pages["stored"] < total
    engine.join()
    assert publisher.stats().pages["stored"] == total


def test_a_large_resync_is_split_and_states_the_whole_digest_and_lasts_until_its_end() -> None:
    publisher = make_begun(batch_pages=3)
    publisher.publish([stored(*range(1, 9), medium=m) for m in StorageMedium])
    publisher.take_records(NOW, force=True)
    publisher.request_resync("operator")
    records, is_resyncing = [], []
    while part := publisher._builder.take_records(NOW, force=True, max_records=1):
        records += part
        is_resyncing.append(publisher.stats().is_resyncing)
    batches, steps = batches_of(records), steps_of(records)
    assert (steps[0], steps[-1]) == (SnapshotBegin("operator"), SnapshotEnd())
    assert num_pages(steps[1:-1]) == 32
    assert {tuple(batch.digest.tolist()[:4]) for batch in batches} == {(8, 8, 8, 8)}
    assert [batch.seq for batch in batches] == list(range(batches[0].seq, batches[0].seq + len(batches)))
    assert is_resyncing == [*[True] * (len(batches) - 1), False]


def test_a_resync_of_shared_prefixes_has_one_chain_a_branch() -> None:
    publisher = make_begun()
    publisher.publish([stored(1, 2, 3), stored(11, 12, parent=2), stored(21, 22, parent=2)])
    publisher.take_records(NOW, force=True)
    publisher.request_resync("operator")
    _, pages, _ = steps_of(publisher.take_records(NOW, force=True))
    assert len(pages.parents) == 3


def test_requests_of_other_streams_and_incarnations_are_ignored() -> None:
    publisher = make_begun()
    key, epoch = publisher.stream.key, publisher.epoch
    for request in (ResyncRequest(key, epoch - 1), ResyncRequest(key, epoch + 1), ResyncRequest("t/m/v/0", epoch)):
        assert not publisher._builder.answer(request)
    assert publisher.take_records(NOW, force=True) == []
    assert publisher._builder.answer(ResyncRequest(key, epoch, "gap"))
    assert steps_of(publisher.take_records(NOW, force=True))[0] == SnapshotBegin("gap")


def test_many_requests_lead_to_one_resync_in_an_interval() -> None:
    publisher = make_begun(resync_min_interval_s=5, heartbeat_s=100)
    request = ResyncRequest(publisher.stream.key, publisher.epoch, "gap")
    num_begun = 0
    for tenth in range(100):
        publisher._builder.answer(request)
        num_begun += SnapshotBegin("gap") in steps_of(publisher.take_records(NOW + tenth / 10))
    assert num_begun == 1
