"""Admission, gaps, restarts, digests and resyncs of one worker stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.applier import Applier, DeadLetters
from indexer.freshness import Freshness
from indexer.namespaces import Namespaces
from indexer.settings import IndexerSettings
from indexer.views import LATE_S, View, ViewState
from kv_events.records import LogRecord
from kv_events.schema import AllBlocksCleared, SnapshotBegin, SnapshotEnd
from tests.support.effort import num_examples
from tests.support.log.records import Stream, removed, stored


@pytest.fixture
def applier() -> Applier:
    return Applier(Namespaces(IndexerSettings(max_pages=10_000)), DeadLetters())


def apply(applier: Applier, *records: LogRecord) -> None:
    for record in records:
        for _ in applier.apply(record, record.timestamp_ms / 1000):
            pass


def view_of(applier: Applier, stream: Stream) -> View:
    view = applier.namespaces.view(stream.id)
    assert view is not None
    return view


def held(view: View) -> set[tuple[int, int]]:
    return {
        (int(page), tier)
        for part in view.index.stream_pages(view.number)
        for page, mask in zip(part.hashes, part.tiers, strict=True)
        for tier in range(4)
        if mask >> tier & 1
    }


Script = Callable[[Stream], Sequence[LogRecord | None]]
"""What a publisher sends, in this order. None: the log does not have it."""


def lost(_record: LogRecord) -> LogRecord | None:
    return None


def restart(stream: Stream) -> LogRecord | None:
    stream.restart()
    return None


def delayed_over_a_restart(stream: Stream) -> list[LogRecord]:
    late = stream.batch(stored((0, [1])))
    stream.restart()
    return [stream.batch(stored((0, [2]))), late]


# fmt: off
SCRIPTS: dict[str, tuple[Script, str, set[int], dict[str, int]]] = {
    "from the beginning": (
        lambda s: [s.batch(stored((0, [1, 2, 3]))), s.batch(removed([3])), s.batch()],
        "", {1, 2}, {"pages_stored": 3, "pages_removed": 1}),
    "every batch twice": (
        lambda s: [s.batch(stored((0, [1]))), s.batch(removed([1]))] * 2,
        "", set(), {"duplicate_batches": 2, "pages_stored": 1, "pages_removed": 1}),
    "lost pages": (
        lambda s: [s.batch(stored((0, [1, 2]))), lost(s.batch(stored((2, [3])))), s.batch(stored((3, [4])))],
        "gap", {1, 2, 4}, {"gaps": 1, "digest_mismatches": 1}),
    "a lost heartbeat": (
        lambda s: [s.batch(stored((0, [1]))), lost(s.batch()), s.batch()],
        "", {1}, {"gaps": 1}),
    "a wrong digest": (
        lambda s: [s.batch(stored((0, [1]))), s.batch(digest=bytes(64))],
        "digest", {1}, {"digest_mismatches": 1}),
    "live events inside a resync": (
        lambda s: [s.batch(stored((0, [1, 2]))), s.batch(SnapshotBegin(), stored((0, [1, 2]))),
                   s.batch(removed([2]), stored((0, [9]))), s.batch(SnapshotEnd())],
        "", {1, 9}, {"resyncs": 1, "known_stores": 2}),
    "a gap inside a resync, which then sweeps nothing": (
        lambda s: [s.batch(stored((0, [1, 2, 3]))), s.batch(SnapshotBegin()),
                   lost(s.batch(stored((0, [1, 2, 3])))), s.batch(SnapshotEnd())],
        "", {1, 2, 3}, {"resyncs": 0, "gaps": 1}),
    "a restart that begins with a snapshot": (
        lambda s: [s.batch(stored((0, [1, 2]))), restart(s),
                   s.batch(SnapshotBegin(), stored((0, [1, 7])), SnapshotEnd())],
        "", {1, 7}, {"restarts": 1, "resyncs": 1, "clears": 1}),
    "a restart without a snapshot": (
        lambda s: [s.batch(stored((0, [1, 2]))), restart(s), s.batch(stored((0, [5])))],
        "", {5}, {"restarts": 1, "clears": 2}),
    "a batch of an older incarnation": (
        delayed_over_a_restart,
        "", {2}, {"old_epoch_batches": 1}),
    "a log that begins in mid-stream": (
        lambda s: [lost(s.batch(stored((0, [1])))), s.batch(stored((1, [2])))],
        "gap", {2}, {"gaps": 1}),
}
# fmt: on


@pytest.mark.parametrize(("script", "reason", "pages", "counts"), SCRIPTS.values(), ids=SCRIPTS)
def test_a_view_after_what_a_publisher_sent_and_after_a_resync(
    applier: Applier, script: Script, reason: str, pages: set[int], counts: dict[str, int]
) -> None:
    stream = Stream()
    apply(applier, *filter(None, script(stream)))
    view = view_of(applier, stream)
    assert (view.state, view.stale_reason) == (ViewState.STALE if reason else ViewState.LIVE, reason)
    assert held(view) == {(page, 0) for page in pages}
    assert {name: getattr(view.counters, name) for name in counts} == counts
    assert (view.epoch, view.next_seq) == (stream.epoch, stream.seq)
    apply(applier, stream.resync())
    assert (view.state, view.stale_reason, held(view)) == (ViewState.LIVE, "", stream.held)


def test_scores_do_not_dip_during_a_resync_and_unnamed_pages_go_at_its_end(applier: Applier) -> None:
    stream = Stream()
    apply(applier, stream.batch(stored((0, [1, 2, 3]))))
    view = view_of(applier, stream)
    stream.held = set()
    apply(applier, stream.batch(SnapshotBegin("lost"), stored((0, [1]))))
    assert (view.state, held(view)) == (ViewState.SYNCING, {(1, 0), (2, 0), (3, 0)})
    apply(applier, stream.batch(stored((1, [2]), tier=1), SnapshotEnd()))
    assert (view.state, held(view)) == (ViewState.LIVE, {(1, 0), (2, 1)})


def test_a_clear_forgets_every_tier_and_leaves_other_workers_alone(applier: Applier) -> None:
    one, other = Stream("one"), Stream("other")
    apply(applier, one.batch(stored((0, [1, 2])), stored((0, [1]), tier=2)), other.batch(stored((0, [1, 2]))))
    apply(applier, one.batch(AllBlocksCleared()))
    assert held(view_of(applier, one)) == set()
    assert held(view_of(applier, other)) == other.held
    assert view_of(applier, one).state is ViewState.LIVE


def test_a_record_that_breaks_the_contract_is_counted_and_touches_no_other_worker(
    applier: Applier, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = Stream("one"), Stream("other")
    apply(applier, other.batch(stored((0, [1]))), LogRecord(0, 7, 0, b"k", b"\xc1garbage"))
    apply(applier, one.batch(stored((0, [2]))))
    assert dict(applier.dead_letters.counts) == {"msgpack": 1}
    assert "record 0/7 rejected: msgpack" in caplog.text
    assert view_of(applier, other).state is view_of(applier, one).state is ViewState.LIVE


def test_bounds_on_streams_and_namespaces_make_dead_letters() -> None:
    settings = IndexerSettings(max_pages=100, max_streams=1, max_namespaces=1)
    applier = Applier(Namespaces(settings), DeadLetters())
    apply(applier, Stream("a").batch(), Stream("b").batch(), Stream("a", model="other").batch())
    assert dict(applier.dead_letters.counts) == {"index_full": 2}
    assert len(applier.namespaces.views) == 1


def test_a_worker_that_changes_its_block_size_moves_to_another_namespace(applier: Applier) -> None:
    small, large = Stream(block_size=4), Stream(block_size=8)
    large.epoch = 2
    apply(applier, small.batch(stored((0, [1]))), large.batch(stored((0, [2]))))
    assert [n.key.block_size for n in applier.namespaces] == [8]
    assert held(view_of(applier, large)) == {(2, 0)}


def test_a_late_batch_with_an_old_block_size_changes_nothing(applier: Applier) -> None:
    small, large = Stream(block_size=4), Stream(block_size=8)
    large.epoch = 2
    late, later = small.batch(stored((0, [1]))), small.batch(stored((1, [2])))
    apply(applier, late, large.batch(stored((0, [5]))), late, later, large.batch(stored((5, [6]))))
    view = view_of(applier, large)
    assert (view.epoch, view.state, held(view)) == (2, ViewState.LIVE, {(5, 0), (6, 0)})
    assert dict(applier.dead_letters.counts) == {"block_size": 2}


@pytest.mark.parametrize(("ttl_s", "silence_s"), [(10.0, LATE_S), (2.0, 2.0)])
def test_a_smaller_epoch_is_believed_when_the_larger_one_misses_two_heartbeats(
    applier: Applier, ttl_s: float, silence_s: float
) -> None:
    applier.freshness = Freshness(ttl_s, now=0.0)
    large, small = Stream(), Stream()
    large.epoch = 9
    apply(applier, large.batch(stored((0, [1])), now=100.0), small.batch(stored((0, [2])), now=100.0 + silence_s))
    view = view_of(applier, large)
    assert (view.epoch, held(view)) == (9, {(1, 0)})
    small.restart()
    small.epoch = 1
    apply(applier, small.batch(stored((0, [3])), now=100.1 + silence_s))
    assert (view.epoch, view.state, held(view)) == (1, ViewState.LIVE, {(3, 0)})


@pytest.mark.parametrize(("ttl_s", "outage_s"), [(10.0, 3.0), (10.0, 400.0), (60.0, 20.0)])
def test_a_smaller_epoch_is_not_believed_after_an_outage_before_two_heartbeats_are_missing(
    applier: Applier, ttl_s: float, outage_s: float
) -> None:
    applier.freshness = Freshness(ttl_s, now=0.0)
    large, small = Stream(), Stream()
    large.epoch = 9
    apply(applier, large.batch(now=100.0))
    end = 102.0 + outage_s
    for now in (100.0, 101.0, 102.0, end):
        applier.freshness.note_log_read(now)
    apply(applier, small.batch(now=end + LATE_S))
    view = view_of(applier, large)
    assert view.epoch == 9
    apply(applier, small.batch(now=end + LATE_S + 0.1))
    assert view.epoch == 1


def test_a_batch_that_arrives_twice_is_applied_once_however_late_it_is(applier: Applier) -> None:
    applier.freshness = Freshness(ttl_s=10.0, now=0.0)
    stream = Stream()
    apply(applier, stream.batch(stored((0, [1])), now=100.0))
    late = stream.batch(stored((1, [2])), now=101.0)
    for tick in (160.0, 160.1):
        for _ in applier.apply(late, tick):
            pass
    view = view_of(applier, stream)
    assert (view.counters.duplicate_batches, view.counters.gaps, view.state) == (1, 0, ViewState.LIVE)


def test_forgetting_the_last_view_frees_the_namespace(applier: Applier) -> None:
    stream = Stream()
    apply(applier, stream.batch(stored((0, [1]))))
    for _ in applier.namespaces.forget(stream.id):
        pass
    assert (list(applier.namespaces), applier.namespaces.views) == ([], [])


def test_silence_expires_a_worker_only_while_the_note_log_read(applier: Applier) -> None:
    stream = Stream()
    apply(applier, stream.batch(now=100.0))
    view, freshness = view_of(applier, stream), Freshness(ttl_s=10.0, now=100.0)
    for now in (102.0, 104.0):
        freshness.note_log_read(now)
    assert freshness.state(view) is ViewState.LIVE
    for now in (106.0, 108.0, 110.0, 112.0):
        freshness.note_log_read(now)
    assert freshness.state(view) is ViewState.EXPIRED
    apply(applier, stream.batch(now=113.0))
    assert freshness.state(view) is ViewState.LIVE


def test_an_outage_of_the_log_expires_no_worker_and_leaves_time_to_be_heard_again(applier: Applier) -> None:
    stream = Stream()
    apply(applier, stream.batch(now=100.0))
    view, freshness = view_of(applier, stream), Freshness(ttl_s=10.0, now=100.0)
    freshness.note_log_read(500.0)  # back after 400 s
    assert (freshness.state(view), freshness.reason(view)) == (ViewState.STALE, "no heartbeat")
    for now in range(502, 513, 2):
        freshness.note_log_read(now)
    assert freshness.state(view) is ViewState.EXPIRED


def test_a_view_without_two_heartbeats_is_stale_although_the_log_is_not_read(applier: Applier) -> None:
    stream, now = Stream(), 100.0
    apply(applier, stream.batch(now=100.0))
    view, freshness = view_of(applier, stream), Freshness(ttl_s=10.0, now=100.0, clock=lambda: now)
    now = 104.0
    assert (freshness.state(view), freshness.reason(view)) == (ViewState.LIVE, "")
    now = 105.0
    assert (freshness.state(view), freshness.reason(view)) == (ViewState.STALE, "no heartbeat")
    now = 500.0
    assert freshness.state(view) is ViewState.STALE
    apply(applier, stream.batch(now=499.0))
    assert (freshness.state(view), freshness.reason(view)) == (ViewState.LIVE, "")


EVENTS = st.one_of(
    st.builds(
        lambda h, t: stored((0, h), tier=t), st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(0, 3)
    ),
    st.builds(lambda h, t: removed(h, tier=t), st.lists(st.integers(1, 30), max_size=5), st.integers(0, 3)),
    st.just(AllBlocksCleared()),
)
FATES = st.sampled_from(["keep", "keep", "keep", "lose", "twice", "restart"])


@settings(max_examples=num_examples(150))
@given(st.lists(st.tuples(FATES, st.lists(EVENTS, max_size=3)), max_size=25))
def test_a_live_view_is_right_and_one_resync_mends_any_other(steps: list[tuple[str, list[object]]]) -> None:
    applier = Applier(Namespaces(IndexerSettings(max_pages=1000)), DeadLetters())
    stream = Stream()
    for fate, events in steps:
        if fate == "restart":
            stream.restart()
        record = stream.batch(*events)  # type: ignore[arg-type]
        if fate != "lose":
            apply(applier, *([record] * (2 if fate == "twice" else 1)))
        view = applier.namespaces.view(stream.id)
        if view is not None and view.state is ViewState.LIVE and view.epoch == stream.epoch:
            assert fate == "lose" or held(view) == stream.held
    apply(applier, stream.resync())
    view = view_of(applier, stream)
    assert (view.state, held(view)) == (ViewState.LIVE, stream.held)
    view.index.check()


def test_the_worker_for_which_all_holder_sets_are_widened_joins_in_slices(applier: Applier) -> None:
    random = np.random.default_rng(1)
    streams = [Stream(f"w{i}") for i in range(65)]
    for stream in streams[:64]:
        pages = 1 + np.flatnonzero(random.random(10_000) < 0.1)
        apply(applier, stream.batch(stored((0, pages.tolist()))))
    joining = streams[64].batch(stored((0, [1, 2])))
    assert sum(1 for _ in applier.apply(joining, 0.0)) >= 5
    for stream in streams:
        view = view_of(applier, stream)
        assert (view.state, held(view)) == (ViewState.LIVE, stream.held)
    view.index.check()


def test_a_large_event_is_applied_in_slices_and_right(applier: Applier) -> None:
    stream = Stream()
    record = stream.batch(stored((0, list(range(1, 9001))), (0, list(range(20_001, 20_801)))))
    assert sum(1 for _ in applier.apply(record, 0.0)) == 5
    view = view_of(applier, stream)
    assert (view.state, view.num_pages[0]) == (ViewState.LIVE, 9800)
    parents = {
        int(h): int(p) for part in view.index.stream_pages(0) for h, p in zip(part.hashes, part.parents, strict=True)
    }
    assert (parents[1], parents[9000], parents[20_001], parents[20_002]) == (0, 8999, 0, 20_001)
    assert np.count_nonzero(list(parents.values())) == 9798
