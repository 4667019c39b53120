"""When an `EventPublisher` without tasks makes records, up to when these state what the worker held, and why not."""

import threading
import time
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kv_events.codec import decode_batch
from kv_events.errors import InvalidValueError
from publisher import EventPublisher, OutRecord
from publisher.change_tracker import ChangeTracker
from publisher.publisher import next_epoch
from publisher.record_builder import RecordBuilder
from tests.rigs.publisher import (
    NOW,
    batches_of,
    make_begun,
    make_publisher,
    num_pages,
    publisher_settings,
    steps_of,
    stored,
)

# --- times ----------------------------------------------------------------------------------------------------------

TIMES: list[tuple[dict[str, Any], list[tuple[float, int, list[list[int]]]]]] = [
    # settings, and steps: seconds, page that is stored before (0: none), pages of each record that is due
    ({"linger_ms": 10}, [(0, 1, []), (0.009, 2, []), (0.011, 0, [[101, 102]])]),
    ({"linger_ms": 10}, [(0.011, 1, [[101]]), (0.012, 2, [])]),  # the first event after a pause does not wait
    ({"heartbeat_s": 2, "linger_ms": 0}, [(0, 1, [[101]]), (1.9, 0, []), (2, 0, [[]]), (3.9, 0, []), (4, 0, [[]])]),
    # the clock was set back, twice; what elapses after it counts
    (
        {"linger_ms": 10, "heartbeat_s": 2},
        [(0, 1, []), (-3600, 0, []), (-3599.989, 0, [[101]]), (-7200, 0, []), (-7197.9, 0, [[]])],
    ),
]


@pytest.mark.parametrize(("settings", "moments"), TIMES)
def test_records_are_due_after_their_time(settings: dict[str, Any], moments: list[Any]) -> None:
    publisher = make_begun(**settings)
    for seconds, page, due in moments:
        if page:
            publisher.publish([stored(page, parent=page - 1)])
        batches = batches_of(publisher.take_records(NOW + seconds))
        found = [[h for step in batch.steps for h in step.hashes.tolist()] for batch in batches]  # type: ignore[union-attr]
        assert found == due
        assert all(batch.timestamp == NOW + seconds for batch in batches)


def test_a_full_batch_does_not_wait() -> None:
    publisher = make_begun(linger_ms=10_000, batch_pages=4)
    publisher.publish([stored(*range(10))])
    assert [len(step.hashes) for step in steps_of(publisher.take_records(NOW))] == [4, 4]
    assert [len(step.hashes) for step in steps_of(publisher.take_records(NOW, force=True))] == [2]


def test_a_heartbeat_never_runs_ahead_of_the_stream() -> None:
    publisher = make_begun(heartbeat_s=1e-9, linger_ms=0, ledger_pages=64_000)
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


def make_builder(**settings: Any) -> tuple[ChangeTracker, RecordBuilder]:
    own = publisher_settings(**{"ledger_pages": 1000, "batch_pages": 10, **settings})
    tracker = ChangeTracker(own)
    return tracker, RecordBuilder(own, tracker, epoch=1)


def store(tracker: ChangeTracker, start: int, number: int) -> None:
    tracker.record([stored(*range(start, start + number))])


def times_of(records: list[OutRecord]) -> list[float]:
    return [batch.timestamp - NOW for batch in batches_of(records)]


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


def test_records_that_follow_an_outage_state_the_past_until_the_last_one() -> None:
    tracker, builder = make_builder(heartbeat_s=1000)
    assert times_of(builder.take_records(NOW, force=True)) == [0]
    store(tracker, 1, 30)
    # the changes came at any time since the last record
    assert times_of(builder.take_records(NOW + 30, force=True, max_records=2)) == [0, 0]
    store(tracker, 101, 20)
    assert times_of(builder.take_records(NOW + 31, force=True)) == [30, 30, 31]


def test_a_resync_has_the_time_of_its_beginning() -> None:
    tracker, builder = make_builder(heartbeat_s=1000)
    builder.take_records(NOW, force=True)
    store(tracker, 1, 30)
    builder.take_records(NOW + 1, force=True)
    builder.request_resync("test")
    assert len(builder.take_records(NOW + 10, force=True, max_records=1)) == 1
    store(tracker, 101, 20)
    # two parts of the resync, and the changes, which may be as old as it
    assert times_of(builder.take_records(NOW + 40, force=True)) == [10, 10, 10, 40]


def test_a_later_epoch_has_a_higher_number_whatever_the_clock_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    before = time.time_ns()
    first = next_epoch()
    assert before <= first <= time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: before - 10**12)
    assert next_epoch() == first + 1
    monkeypatch.setattr(time, "time_ns", lambda: first + 10**6)
    assert next_epoch() == first + 10**6


# --- degraded reasons -----------------------------------------------------------------------------------------------


def reasons(source: EventPublisher | RecordBuilder, seconds: float = 0) -> list[tuple[int, str]]:
    """Return (events, degraded reason) of the records that are due."""
    return [(len(batch.steps), batch.degraded_reason) for batch in batches_of(source.take_records(NOW + seconds))]


def test_every_record_states_the_degraded_reason_until_it_is_cleared() -> None:
    publisher = make_publisher(linger_ms=0)
    publisher.set_degraded_reason("batches lost")
    assert reasons(publisher) == [(2, "batches lost")]
    publisher.publish([stored(1)])
    assert reasons(publisher) == [(1, "batches lost")]
    assert reasons(publisher, 3) == [(0, "batches lost")]
    publisher.set_degraded_reason("")
    assert reasons(publisher, 3) == [(0, "")]


def test_a_change_of_the_reason_is_reported_at_once_and_once() -> None:
    publisher = make_begun()
    for degraded_reason in ("engine not heard", "batches lost", ""):
        publisher.set_degraded_reason(degraded_reason)
        assert reasons(publisher) == [(0, degraded_reason)]
        publisher.set_degraded_reason(degraded_reason)
        assert reasons(publisher) == []


def test_a_reason_that_changed_before_a_wait_is_due_at_once() -> None:
    _, builder = make_builder()
    builder.take_records(NOW)
    assert builder.seconds_until_due(NOW) > 0
    builder.degraded_reason = "batches lost"
    assert builder.seconds_until_due(NOW) == 0
    builder.take_records(NOW)
    assert builder.seconds_until_due(NOW) > 0


def test_a_degraded_reason_holds_for_all_changes_that_came_under_it() -> None:
    tracker, builder = make_builder(linger_ms=1000)
    builder.take_records(NOW)
    builder.degraded_reason = "replaying"
    assert reasons(builder, 0.1) == [(0, "replaying")]
    store(tracker, 1, 30)
    builder.degraded_reason = ""
    assert reasons(builder, 0.2) == [(1, "replaying"), (1, "replaying"), (1, "")]
    store(tracker, 101, 1)
    assert reasons(builder, 0.3) == []
    builder.degraded_reason = "batches lost"
    assert reasons(builder, 0.4) == [(1, "batches lost")]


def test_a_degraded_reason_that_readers_would_refuse_is_refused() -> None:
    publisher = make_begun()
    with pytest.raises(InvalidValueError, match="degraded_reason"):
        publisher.set_degraded_reason("x" * 257)
    assert reasons(publisher) == []
