"""The time up to which a record tells what the worker held, while changes wait."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from kv_events.codec import decode_batch
from kv_events.schema import BlockStored
from publisher import PublisherSettings
from publisher.change_tracker import ChangeTracker
from publisher.record_builder import RecordBuilder

NOW = 1_700_000_000.0
_PAGES = 10


def make_builder(**settings: float) -> tuple[ChangeTracker, RecordBuilder]:
    own = PublisherSettings(
        **{"model": "m", "worker": "w", "block_size": 4, "ledger_pages": 1000, "batch_pages": _PAGES, **settings}  # type: ignore[arg-type]
    )
    tracker = ChangeTracker(own)
    return tracker, RecordBuilder(own, tracker, epoch=1)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=60))
def test_all_changes_before_a_records_time_are_in_records_and_the_time_never_goes_back(
    steps: list[tuple[int, int]],
) -> None:
    """steps: changes that arrive in a second, and most records that are taken after it."""
    tracker, builder = make_builder(batch_pages=2)
    builder.take_records(0, force=True)
    waiting, last, page = list[float](), 0.0, 1
    for second, (arriving, most) in enumerate(steps):
        waiting += [second + 0.5] * arriving
        store(tracker, page, arriving)
        page += arriving
        for record in builder.take_records(second + 1.0, force=True, max_records=most):
            as_of = decode_batch(record.payload).timestamp
            del waiting[: record.num_pages]
            assert last <= as_of <= second + 1.0
            assert not waiting or as_of <= waiting[0]
            last = as_of


def store(tracker: ChangeTracker, start: int, number: int) -> None:
    hashes = list(range(start, start + number))
    words = np.array(hashes, np.uint64).tobytes()
    tracker.record([BlockStored(hashes, None, [], 4, sequence_hashes=words)])


def test_records_that_follow_an_outage_tell_of_the_past_until_the_last_one() -> None:
    tracker, builder = make_builder(heartbeat_s=1000)

    def times(now: float, most: int | None = None) -> list[float]:
        records = builder.take_records(now, force=True, max_records=most)
        return [decode_batch(record.payload).timestamp - NOW for record in records]

    assert times(NOW) == [0]
    store(tracker, 1, 3 * _PAGES)
    assert times(NOW + 30, 2) == [0, 0]  # the changes came at any time since the last record
    store(tracker, 101, 2 * _PAGES)
    assert times(NOW + 31) == [30, 30, 31]


def test_a_resync_tells_of_its_beginning_and_the_changes_behind_it_of_theirs() -> None:
    tracker, builder = make_builder(heartbeat_s=1000)
    builder.take_records(NOW, force=True)
    store(tracker, 1, 3 * _PAGES)
    builder.take_records(NOW + 1, force=True)
    builder.request_resync("test")
    assert len(builder.take_records(NOW + 10, force=True, max_records=1)) == 1
    store(tracker, 101, 2 * _PAGES)
    times = [decode_batch(each.payload).timestamp - NOW for each in builder.take_records(NOW + 40, force=True)]
    assert times == [10, 10, 10, 40]  # two parts of the resync, and the changes, which may be as old as it


def test_a_degraded_reason_holds_for_all_changes_that_came_under_it() -> None:
    tracker, builder = make_builder(linger_ms=1000)

    def reasons(now: float) -> list[tuple[int, str]]:
        batches = [decode_batch(record.payload) for record in builder.take_records(now)]
        return [(len(batch.steps), batch.degraded_reason) for batch in batches]

    reasons(NOW)
    builder.degraded_reason = "replaying"
    assert reasons(NOW + 0.1) == [(0, "replaying")]
    store(tracker, 1, 3 * _PAGES)
    builder.degraded_reason = ""
    assert reasons(NOW + 0.2) == [(1, "replaying"), (1, "replaying"), (1, "")]
    store(tracker, 101, 1)
    assert reasons(NOW + 0.3) == []
    builder.degraded_reason = "batches lost"
    assert reasons(NOW + 0.4) == [(1, "batches lost")]
