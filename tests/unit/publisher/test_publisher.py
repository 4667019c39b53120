"""`EventPublisher` without tasks: the published records, their times, and what readers can verify with them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from kv_events.codec import DecodedBatch, RemovedPages, StoredPages, decode_batch, encode_event
from kv_events.hashing import namespace_seed, sequence_hashes
from kv_events.limits import MAX_RECORD_BYTES
from kv_events.log.memory import MemoryLog
from kv_events.schema import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ResyncRequest,
    SnapshotBegin,
    SnapshotEnd,
    StorageMedium,
)
from publisher import EventPublisher, OutRecord, PublisherSettings
from publisher.event_columns import PageEvents
from publisher.sinks import MemorySink
from tests.support.log.records import words

NOW = 1_700_000_000.0


def make(**settings: Any) -> EventPublisher:
    """Return a publisher that has sent its first, empty resync."""
    values = {"model": "m", "worker": "w", "block_size": 4, "resync_jitter_s": 0, "ledger_pages": 10_000, **settings}
    publisher = EventPublisher(PublisherSettings(**values), MemorySink(MemoryLog()))
    (first,) = publisher.take_records(NOW)
    assert steps_of([first]) == [SnapshotBegin("start"), SnapshotEnd()]
    return publisher


def stored(*names: int, parent: int | None = None, **fields: Any) -> BlockStored:
    """Return a store of pages whose sequence hashes are their block hashes plus 100."""
    values = {"sequence_hashes": words([name + 100 for name in names]), **fields}
    return BlockStored(list(names), parent, [], 4, **values)


def batches_of(records: list[OutRecord]) -> list[DecodedBatch]:
    return [decode_batch(record.payload) for record in records]


def num_pages(steps: Iterable[Any]) -> int:
    """Count the pages in steps that store or remove."""
    return sum(len(step.hashes) for step in steps)


def steps_of(records: list[OutRecord]) -> list[Any]:
    return [step for batch in batches_of(records) for step in batch.steps]


def drain(publisher: EventPublisher, now: float = NOW) -> list[Any]:
    return steps_of(publisher.take_records(now, force=True))


def test_every_epoch_begins_with_a_resync_numbered_zero() -> None:
    publisher = make()
    publisher.publish([stored(1)])
    (batch,) = batches_of(publisher.take_records(NOW, force=True))
    assert (batch.seq, batch.epoch, batch.stream) == (1, publisher.epoch, publisher.stream)
    assert batch.timestamp == NOW


def test_events_wait_for_company_until_the_linger_time_is_over() -> None:
    publisher = make(linger_ms=10)
    publisher.publish([stored(1)])
    assert publisher.take_records(NOW) == []
    publisher.publish([stored(2, parent=1)])
    assert publisher.take_records(NOW + 0.009) == []
    (step,) = steps_of(publisher.take_records(NOW + 0.011))
    assert step.hashes.tolist() == [101, 102]


def test_the_first_event_after_a_pause_does_not_wait() -> None:
    publisher = make(linger_ms=10)
    publisher.publish([stored(1)])
    (step,) = steps_of(publisher.take_records(NOW + 0.011))
    assert step.hashes.tolist() == [101]
    publisher.publish([stored(2)])
    assert publisher.take_records(NOW + 0.012) == []


def test_a_full_batch_does_not_wait() -> None:
    publisher = make(linger_ms=10_000, batch_pages=4)
    publisher.publish([stored(*range(10))])
    assert [len(step.hashes) for step in steps_of(publisher.take_records(NOW))] == [4, 4]
    assert [len(step.hashes) for step in drain(publisher)] == [2]


def test_every_batch_of_a_large_event_carries_the_digest_after_its_last_page() -> None:
    publisher = make(batch_pages=3)
    publisher.publish([stored(*range(1, 9)), BlockRemoved([1, 2, 3])])
    counts = [batch.digest.tolist()[0] for batch in batches_of(publisher.take_records(NOW, force=True))]
    assert counts == [3, 6, 7, 5]


def test_pages_of_one_prompt_stored_one_by_one_travel_as_one_chain() -> None:
    publisher = make()
    publisher.publish([stored(1), stored(2, parent=1), stored(3, parent=2)])
    publisher.publish([stored(4, parent=3)])
    (step,) = drain(publisher)
    assert step.hashes.tolist() == [101, 102, 103, 104]
    assert step.parents.tolist() == [0]


def test_a_child_names_its_parent_by_the_sequence_hash() -> None:
    publisher = make()
    publisher.publish([stored(1, 2)])
    drain(publisher)
    publisher.publish([stored(7, parent=2)])
    (step,) = drain(publisher)
    assert step.parents.tolist() == [102]


def test_an_unknown_parent_is_counted_and_harmless() -> None:
    publisher = make()
    publisher.publish([stored(7, parent=2)])
    (step,) = drain(publisher)
    assert step.parents.tolist() == [0]
    assert publisher.stats().pages["parent_unknown"] == 1


def test_what_changes_nothing_is_counted_and_not_published() -> None:
    publisher = make()
    publisher.publish([stored(1), stored(1), BlockRemoved([9]), BlockRemoved([1], StorageMedium.DISK)])
    assert len(drain(publisher)) == 1
    pages = publisher.stats().pages
    assert (pages["stored"], pages["stored_again"], pages["removed_unknown"]) == (1, 1, 2)


def test_equal_block_hashes_of_two_namespaces_are_two_pages() -> None:
    publisher = make()
    publisher.publish([stored(1), stored(1, extra_key="x", sequence_hashes=words([555])), BlockRemoved([1])])
    steps = drain(publisher)
    assert [step.hashes.tolist() for step in steps] == [[101, 555], [101]]
    assert publisher.stats().pages["held"] == 1


def test_a_page_under_two_block_hashes_leaves_with_the_last_of_them() -> None:
    publisher = make()
    publisher.publish([stored(1), stored(2, sequence_hashes=words([101]))])
    publisher.publish([BlockRemoved([1])])
    assert [step.hashes.tolist() for step in drain(publisher)] == [[101]]
    publisher.publish([BlockRemoved([2])])
    (step,) = drain(publisher)
    assert isinstance(step, RemovedPages)
    publisher.check()


def test_pages_without_sequence_hashes_are_named_from_their_tokens() -> None:
    publisher = make()
    tokens = np.arange(12, dtype=np.uint32)
    names = sequence_hashes(tokens, 4, namespace_seed(cache_salt="salt")).tolist()
    first = BlockStored([1, 2], None, tokens[:8].tolist(), 4, extra_key="salt")
    second = BlockStored([3], 2, tokens[8:].tolist(), 4, extra_key="salt")
    orphan = BlockStored([4], 77, tokens[8:].tolist(), 4, extra_key="salt")
    publisher.publish([first, second, orphan])
    (step,) = drain(publisher)
    assert step.hashes.tolist() == names
    assert publisher.stats().rejected_events == {"unidentified": 1}


def test_a_full_ledger_drops_the_page_from_the_stream_too() -> None:
    publisher = make(ledger_pages=2)
    publisher.publish([stored(1, 2, 3)])
    (batch,) = batches_of(publisher.take_records(NOW, force=True))
    (step,) = batch.steps
    assert isinstance(step, StoredPages)
    assert step.hashes.tolist() == [101, 102]
    assert batch.digest.tolist()[0] == 2
    assert publisher.stats().pages["ledger_full"] == 1


def test_a_clear_empties_the_view_and_the_ledger() -> None:
    publisher = make()
    publisher.publish([stored(1), AllBlocksCleared(), stored(2)])
    batch = batches_of(publisher.take_records(NOW, force=True))[0]
    assert [type(step) for step in batch.steps] == [StoredPages, AllBlocksCleared, StoredPages]
    assert batch.digest.tolist()[0] == 1
    publisher.check()


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (stored(5, medium="TAPE"), "medium"),
        (stored(5, extra_key=7), "type"),
        (BlockStored([5], None, [], 3, sequence_hashes=words([5])), "block_size"),
        (BlockStored("abc", None, [], 4), "type"),  # type: ignore[arg-type]
        (BlockStored([1.5], None, [], 4, sequence_hashes=words([1])), "type"),  # type: ignore[list-item]
        (BlockRemoved(None), "type"),  # type: ignore[arg-type]
        (BlockRemoved([2**64]), "hash_range"),
        (stored(5, parent="x", sequence_hashes=b""), "type"),  # type: ignore[arg-type]
        (stored(5, medium=np.zeros(2)), "medium"),
        ("BlockStored", "type"),
        (None, "type"),
    ],
)
def test_a_bad_event_is_dropped_and_counted_and_the_rest_continues(bad: Any, reason: str) -> None:
    publisher = make()
    publisher.publish([stored(1), bad, stored(2)])
    assert [h for step in drain(publisher) for h in step.hashes.tolist()] == [101, 102]
    assert publisher.stats().rejected_events == {reason: 1}
    publisher.check()


def test_bad_events_are_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    publisher = make()
    for _ in range(50):
        publisher.publish([None])  # type: ignore[list-item]
    assert [r.getMessage() for r in caplog.records] == ["publisher w: engine events dropped so far: {'type': 1}"]


def test_what_is_no_list_of_events_never_raises(caplog: pytest.LogCaptureFixture) -> None:
    publisher = make()
    with caplog.at_level(logging.CRITICAL):
        publisher.publish(None)  # type: ignore[arg-type]
    publisher.publish([stored(1)])
    steps = drain(publisher)
    assert steps[0] == SnapshotBegin("internal error")
    assert steps[1].hashes.tolist() == [101]


def test_an_overflow_leads_to_a_resync() -> None:
    publisher = make(queue_pages=10)
    publisher.publish([stored(*range(1, 9))])
    publisher.publish([stored(*range(20, 25))])
    publisher.publish([BlockRemoved([1])])
    stats = publisher.stats()
    assert (stats.queued, stats.dropped, stats.is_broken) == (0, 14, True)
    begin, pages, end = drain(publisher)
    assert (begin, end) == (SnapshotBegin("overflow"), SnapshotEnd())
    assert sorted(pages.hashes.tolist()) == [*range(102, 109), *range(120, 125)]
    assert not publisher.stats().is_broken


def test_the_bound_counts_what_was_taken_and_not_confirmed() -> None:
    publisher = make(queue_pages=10)
    publisher.publish([stored(*range(1, 9))])
    publisher.take_records(NOW, force=True)
    assert publisher.stats().in_flight == 8
    publisher.publish([stored(11, 12, 13)])
    assert publisher.stats().is_broken


def test_resyncs_after_overflows_are_rate_limited() -> None:
    publisher = make(queue_pages=2, resync_min_interval_s=5, heartbeat_s=100)
    publisher.publish([stored(1, 2, 3)])
    assert publisher.take_records(NOW + 4.9) == []
    assert steps_of(publisher.take_records(NOW + 5))[0] == SnapshotBegin("overflow")


def test_a_broken_streams_heartbeat_does_not_claim_to_be_right() -> None:
    publisher = make(queue_pages=2, resync_min_interval_s=50, heartbeat_s=1)
    publisher.publish([stored(1, 2, 3)])
    (batch,) = batches_of(publisher.take_records(NOW + 2))
    assert (batch.steps, batch.digest.tolist()[0]) == ([], 3)


def test_an_idle_stream_sends_heartbeats() -> None:
    publisher = make(heartbeat_s=2)
    publisher.publish([stored(1)])
    publisher.take_records(NOW, force=True)
    assert publisher.take_records(NOW + 1.9) == []
    (batch,) = batches_of(publisher.take_records(NOW + 2))
    assert (batch.steps, batch.digest.tolist()[0]) == ([], 1)


def test_a_heartbeat_never_runs_ahead_of_the_stream() -> None:
    publisher = make(heartbeat_s=1e-9, linger_ms=0, ledger_pages=64_000)
    events = [stored(*range(i, i + 16)) for i in range(0, 64_000, 16)]

    def publish_all() -> None:
        for event in events:
            publisher.publish([event])

    engine = threading.Thread(target=publish_all)
    engine.start()
    records: list[OutRecord] = []
    while engine.is_alive():
        records += publisher.take_records(time.time())
    for later_s in (1, 2):  # the rest, then at least one heartbeat
        records += publisher.take_records(time.time() + later_s)
    num_read = num_heartbeats = 0
    for batch in batches_of(records):
        num_read += num_pages(batch.steps)
        num_heartbeats += not batch.steps
        assert batch.digest.tolist()[0] == num_read
    assert num_heartbeats > 0


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_a_clock_that_was_set_holds_up_no_resync(step_s: float) -> None:
    publisher = make(queue_pages=2, resync_min_interval_s=5, heartbeat_s=100)
    publisher.publish([stored(1, 2, 3)])
    assert publisher.take_records(NOW + 1) == []
    now = NOW + 1 + step_s
    records = [publisher.take_records(now), publisher.take_records(now + 4)]
    assert SnapshotBegin("overflow") in steps_of([record for some in records for record in some])


def test_a_clock_that_went_back_holds_up_no_batch_and_no_heartbeat() -> None:
    publisher = make(linger_ms=10, heartbeat_s=2)
    publisher.publish([stored(1)])
    assert publisher.take_records(NOW) == []
    assert publisher.take_records(NOW - 3600) == []
    (step,) = steps_of(publisher.take_records(NOW - 3599.989))
    assert step.hashes.tolist() == [101]
    assert publisher.take_records(NOW - 7200) == []
    (heartbeat,) = batches_of(publisher.take_records(NOW - 7197.9))
    assert (heartbeat.steps, heartbeat.timestamp) == ([], NOW - 7197.9)


def test_resyncs_that_are_made_while_the_engine_publishes_equal_the_ledger() -> None:
    publisher = make(queue_pages=2_000_000, ledger_pages=30_000, batch_pages=30_000, batch_bytes=900_000)
    publisher.publish([stored(*range(start, start + 1000)) for start in range(0, 20_000, 1000)])
    is_over = threading.Event()

    def engine() -> None:
        random = np.random.default_rng(1)
        while not is_over.is_set():
            some = random.integers(0, 30_000, 50).tolist()
            publisher.publish([BlockRemoved(some), stored(*some[:40])])

    thread = threading.Thread(target=engine)
    thread.start()
    pages: set[int] = set()
    for _ in range(20):
        publisher.request_resync("test")
        for batch in batches_of(publisher._builder.take_records(NOW, force=True, max_records=3)):
            pages = read(batch, pages)
            assert batch.digest.tolist()[:4] == [len(pages), 0, 0, 0]
    is_over.set()
    thread.join()
    assert publisher.stats().dropped == 0


def test_a_million_pages_that_come_at_once_do_not_keep_the_drain_waiting() -> None:
    events, length = 10_000, 100
    total = events * length
    publisher = make(queue_pages=total, ledger_pages=total)
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


def read(batch: DecodedBatch, pages: set[int]) -> set[int]:
    """Return the pages that a reader holds after a batch. Each resync is in one batch here."""
    for step in batch.steps:
        if isinstance(step, StoredPages):
            pages |= set(step.hashes.tolist())
        elif isinstance(step, RemovedPages):
            pages -= set(step.hashes.tolist())
        elif isinstance(step, SnapshotBegin):
            pages = set()
    return pages


def test_a_large_resync_is_split_and_states_the_whole_digest() -> None:
    publisher = make(batch_pages=3)
    publisher.publish([stored(*range(1, 9), medium=m) for m in StorageMedium])
    drain(publisher)
    publisher.request_resync("operator")
    batches = batches_of(publisher.take_records(NOW, force=True))
    steps = [step for batch in batches for step in batch.steps]
    assert (steps[0], steps[-1]) == (SnapshotBegin("operator"), SnapshotEnd())
    assert num_pages(steps[1:-1]) == 32
    assert {tuple(batch.digest.tolist()[:4]) for batch in batches} == {(8, 8, 8, 8)}
    assert [batch.seq for batch in batches] == list(range(batches[0].seq, batches[0].seq + len(batches)))


def test_a_resync_is_begun_until_its_last_part_is_out() -> None:
    publisher = make(batch_pages=3)
    publisher.publish([stored(*range(1, 8))])
    publisher.request_resync("test")
    begun = []
    while records := publisher._builder.take_records(NOW, force=True, max_records=1):
        begun.append((steps_of(records), publisher.stats().is_resyncing))
    marks = [is_begun for steps, is_begun in begun if not isinstance(steps[-1], SnapshotEnd)]
    assert marks == [True, True]
    assert [is_begun for _, is_begun in begun] == [True, True, False]


def test_a_resync_of_shared_prefixes_has_one_chain_a_branch() -> None:
    publisher = make()
    publisher.publish([stored(1, 2, 3), stored(11, 12, parent=2), stored(21, 22, parent=2)])
    drain(publisher)
    publisher.request_resync("operator")
    _, pages, _ = drain(publisher)
    assert len(pages.parents) == 3


def test_requests_of_other_streams_and_incarnations_are_ignored() -> None:
    publisher = make()
    key, epoch = publisher.stream.key, publisher.epoch
    for request in (ResyncRequest(key, epoch - 1), ResyncRequest(key, epoch + 1), ResyncRequest("t/m/v/0", epoch)):
        assert not publisher._builder.answer(request)
    assert drain(publisher) == []
    assert publisher._builder.answer(ResyncRequest(key, epoch, "gap"))
    assert drain(publisher)[0] == SnapshotBegin("gap")


def test_many_requests_lead_to_one_resync_in_an_interval() -> None:
    publisher = make(resync_min_interval_s=5, heartbeat_s=100)
    request = ResyncRequest(publisher.stream.key, publisher.epoch, "gap")
    num_begun = 0
    for tenth in range(100):
        publisher._builder.answer(request)
        num_begun += SnapshotBegin("gap") in steps_of(publisher.take_records(NOW + tenth / 10))
    assert num_begun == 1


def test_tokens_travel_only_when_asked_for() -> None:
    event = BlockStored([1], None, [70_000, 1, 2, 3], 4, sequence_hashes=words([9]), extra_key="secret salt")
    plain, with_tokens = make(), make(with_tokens=True)
    for publisher in (plain, with_tokens):
        publisher.publish([event, event, stored(2)])
    (record,) = plain.take_records(NOW, force=True)
    assert b"secret" not in record.payload
    (record,) = with_tokens.take_records(NOW, force=True)
    assert np.array([70_000, 1, 2, 3], "<u4").tobytes() in record.payload
    assert b"secret salt" in record.payload
    assert len(batches_of([record])[0].steps) == 2


def test_records_with_tokens_keep_within_the_largest_record() -> None:
    publisher = make(with_tokens=True, block_size=1024, batch_bytes=900_000)
    for i in range(500):
        publisher.publish(
            [BlockStored([i], None, [2**31] * 1024, 1024, sequence_hashes=words([i]), extra_key=f"{i}" * 300)]
        )
    records = publisher.take_records(NOW, force=True)
    assert max(len(record.payload) for record in records) <= MAX_RECORD_BYTES
    assert sum(len(step.hashes) for step in steps_of(records)) == 500


def test_records_carry_the_streams_key_and_the_time() -> None:
    publisher = make()
    publisher.publish([stored(1)])
    (record,) = publisher.take_records(NOW, force=True)
    assert (record.key, record.timestamp_ms, record.num_pages) == (b"default/m/w/0", int(NOW * 1000), 1)


def test_snapshot_marks_are_what_readers_know() -> None:
    assert encode_event(SnapshotBegin("start")) in make_first_payload()


def make_first_payload() -> bytes:
    publisher = EventPublisher(PublisherSettings(model="m", worker="w", block_size=4), MemorySink(MemoryLog()))
    return publisher.take_records(NOW)[0].payload
