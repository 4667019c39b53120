"""The time up to which a record tells what the worker held, while changes wait."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from kv_events.codec import decode_batch
from kv_events.schema import BlockStored
from publisher import PublisherSettings
from publisher.backlog import Backlog
from publisher.change_tracker import ChangeTracker
from publisher.record_builder import RecordBuilder

NOW = 1_700_000_000.0
_PAGES = 10


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8)), max_size=60))
def test_everything_before_the_time_has_been_taken_and_the_time_never_goes_back(steps: list[tuple[int, int]]) -> None:
    """steps: changes that arrive in a second, and changes that are taken after it."""
    backlog, waiting, last = Backlog(), list[float](), 0.0
    for second, (arriving, taken) in enumerate(steps):
        waiting += [second + 0.5] * arriving
        now = second + 1.0
        backlog.look(len(waiting), now)
        number = min(taken, len(waiting))
        del waiting[:number]
        if waiting:
            as_of = backlog.take(number)
            assert last <= as_of <= now
            assert as_of <= waiting[0]
        else:
            backlog.end(now)
            as_of = now
        last = as_of


def store(tracker: ChangeTracker, start: int, number: int) -> None:
    hashes = list(range(start, start + number))
    words = np.array(hashes, np.uint64).tobytes()
    tracker.record([BlockStored(hashes, None, [], 4, sequence_hashes=words)])


def test_records_that_follow_an_outage_tell_of_the_past_until_the_last_one() -> None:
    settings = PublisherSettings(
        model="m", worker="w", block_size=4, ledger_pages=1000, batch_pages=_PAGES, heartbeat_s=1000
    )
    tracker = ChangeTracker(settings)
    builder = RecordBuilder(settings, tracker, epoch=1)

    def times(now: float, most: int | None = None) -> list[float]:
        records = builder.take_records(now, force=True, max_records=most)
        return [decode_batch(record.payload).timestamp - NOW for record in records]

    assert times(NOW) == [0]
    store(tracker, 1, 3 * _PAGES)
    assert times(NOW + 30, 2) == [0, 0]  # the changes came at any time since the last record
    store(tracker, 101, 2 * _PAGES)
    assert times(NOW + 31) == [30, 30, 31]
