"""Which batches of one worker stream are applied, and its view after gaps, restarts and resyncs."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.position import Admission, Position
from indexer.slices import run_at_once
from indexer.views import ViewState
from kv_events.records import LogRecord
from kv_events.schema import AllBlocksCleared, SnapshotBegin, SnapshotEnd
from tests.rigs.views import Views, held
from tests.support.effort import num_examples
from tests.support.log.records import Stream, removed, stored
from tests.support.log.view_facts import held_pages

AT_5 = Position(epoch=10, next_seq=5)
AFTER_A_GAP = Position(epoch=10, next_seq=900, first_missing=5)


@pytest.mark.parametrize(
    ("position", "epoch", "seq", "is_silent", "admission", "after"),
    [
        (Position(), 10, 0, False, Admission.NEW_EPOCH, Position(10, 1)),
        (Position(), 10, 7, False, Admission.NEW_EPOCH_LATE, Position(10, 8, 0)),
        (AT_5, 10, 5, False, Admission.NEXT, Position(10, 6)),
        (AT_5, 10, 4, False, Admission.DUPLICATE, AT_5),
        (AT_5, 10, 899, False, Admission.GAP, AFTER_A_GAP),
        (AT_5, 10, 2**63 - 1, False, Admission.GAP, Position(10, 2**63, 5)),
        (AT_5, 11, 0, False, Admission.NEW_EPOCH, Position(11, 1)),
        (AT_5, 11, 3, False, Admission.NEW_EPOCH_LATE, Position(11, 4, 0)),
        (AT_5, 9, 0, False, Admission.OLD_EPOCH, AT_5),
        (AT_5, 9, 3, False, Admission.OLD_EPOCH, AT_5),
        (AFTER_A_GAP, 10, 900, False, Admission.NEXT, Position(10, 901, 5)),
        (AFTER_A_GAP, 10, 1000, False, Admission.GAP, Position(10, 1001, 5)),
        (AFTER_A_GAP, 10, 5, False, Admission.STEP_BACK, Position(10, 6, 5)),
        (AFTER_A_GAP, 10, 4, False, Admission.DUPLICATE, AFTER_A_GAP),
        (AFTER_A_GAP._replace(first_missing=None), 10, 5, False, Admission.DUPLICATE, Position(10, 900)),
        # silence: any sender is followed
        (AT_5, 9, 0, True, Admission.NEW_EPOCH, Position(9, 1)),
        (AT_5, 9, 3, True, Admission.NEW_EPOCH_LATE, Position(9, 4, 0)),
        (AT_5, 10, 5, True, Admission.NEXT, Position(10, 6)),
        (AT_5, 10, 2, True, Admission.STEP_BACK, Position(10, 3, 2)),
        (AFTER_A_GAP, 10, 2, True, Admission.STEP_BACK, Position(10, 3, 2)),
    ],
)
def test_the_verdict_on_a_batch(
    position: Position, epoch: int, seq: int, is_silent: bool, admission: Admission, after: Position
) -> None:
    assert position.after(epoch, seq, is_silent=is_silent) == (admission, after)


BATCHES = st.tuples(st.integers(0, 4), st.integers(0, 6), st.booleans())


@settings(max_examples=num_examples(300))
@given(st.lists(BATCHES, max_size=30), BATCHES)
def test_no_position_shuts_out_a_publisher(past: list[tuple[int, int, bool]], living: tuple[int, int, bool]) -> None:
    position = Position()
    for epoch, seq, is_silent in past:
        position = position.after(epoch, seq, is_silent=is_silent)[1]
    epoch, first, _ = living
    admission, position = position.after(epoch, first, is_silent=True)
    assert admission.is_applied
    for seq in range(first + 1, first + 5):
        admission, position = position.after(epoch, seq, is_silent=False)
        assert admission is Admission.NEXT


# --- views ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def views() -> Views:
    return Views()


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
    views: Views, script: Script, reason: str, pages: set[int], counts: dict[str, int]
) -> None:
    stream = Stream()
    views.read(*filter(None, script(stream)))
    view = views.view(stream)
    assert (view.state, view.stale_reason) == (ViewState.STALE if reason else ViewState.LIVE, reason)
    assert held(view) == {(page, 0) for page in pages}
    assert {name: getattr(view.counters, name) for name in counts} == counts
    assert (view.epoch, view.next_seq) == (stream.epoch, stream.seq)
    views.read(stream.resync())
    assert (view.state, view.stale_reason, held(view)) == (ViewState.LIVE, "", stream.held)


def test_scores_do_not_dip_during_a_resync_and_unnamed_pages_go_at_its_end(views: Views) -> None:
    stream = Stream()
    views.read(stream.batch(stored((0, [1, 2, 3]))))
    view = views.view(stream)
    stream.held = set()
    views.read(stream.batch(SnapshotBegin("lost"), stored((0, [1]))))
    assert (view.state, held(view)) == (ViewState.SYNCING, {(1, 0), (2, 0), (3, 0)})
    views.read(stream.batch(stored((1, [2]), tier=1), SnapshotEnd()))
    assert (view.state, held(view)) == (ViewState.LIVE, {(1, 0), (2, 1)})


def test_a_record_that_breaks_the_contract_is_counted_and_touches_no_other_worker(
    views: Views, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = Stream("one"), Stream("other")
    views.read(other.batch(stored((0, [1]))), LogRecord(0, 7, 0, b"k", b"\xc1garbage"))
    views.read(one.batch(stored((0, [2]))))
    assert dict(views.applier.dead_letters.counts) == {"msgpack": 1}
    assert "record 0/7 rejected: msgpack" in caplog.text
    assert views.view(other).state is views.view(one).state is ViewState.LIVE


def test_bounds_on_streams_and_namespaces_make_dead_letters() -> None:
    views = Views(max_pages=100, max_streams=1, max_namespaces=1)
    views.read(Stream("a").batch(), Stream("b").batch(), Stream("a", model="other").batch())
    assert dict(views.applier.dead_letters.counts) == {"index_full": 2}
    assert len(views.applier.namespaces.views) == 1


def test_a_worker_that_changes_its_block_size_moves_to_another_namespace(views: Views) -> None:
    small, large = Stream(block_size=4), Stream(block_size=8)
    large.epoch = 2
    views.read(small.batch(stored((0, [1]))), large.batch(stored((0, [2]))))
    assert [n.key.block_size for n in views.applier.namespaces] == [8]
    assert held(views.view(large)) == {(2, 0)}


def test_a_late_batch_with_an_old_block_size_changes_nothing(views: Views) -> None:
    small, large = Stream(block_size=4), Stream(block_size=8)
    large.epoch = 2
    late, later = small.batch(stored((0, [1]))), small.batch(stored((1, [2])))
    views.read(late, large.batch(stored((0, [5]))), late, later, large.batch(stored((5, [6]))))
    view = views.view(large)
    assert (view.epoch, view.state, held(view)) == (2, ViewState.LIVE, {(5, 0), (6, 0)})
    assert dict(views.applier.dead_letters.counts) == {"block_size": 2}


def test_a_batch_that_arrives_twice_is_applied_once_however_late_it_is() -> None:
    views, stream = Views(follows_silence=True), Stream()
    views.read(stream.batch(stored((0, [1])), now=100.0))
    late = stream.batch(stored((1, [2])), now=101.0)
    for tick in (160.0, 160.1):
        views.read(late, at=tick)
    view = views.view(stream)
    assert (view.counters.duplicate_batches, view.counters.gaps, view.state) == (1, 0, ViewState.LIVE)


def test_forgetting_the_last_view_frees_the_namespace(views: Views) -> None:
    stream = Stream()
    views.read(stream.batch(stored((0, [1]))))
    run_at_once(views.applier.namespaces.forget(stream.id))
    assert (list(views.applier.namespaces), views.applier.namespaces.views) == ([], [])


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
    views, stream = Views(), Stream()
    for fate, events in steps:
        if fate == "restart":
            stream.restart()
        record = stream.batch(*events)  # type: ignore[arg-type]
        if fate != "lose":
            views.read(*([record] * (2 if fate == "twice" else 1)))
        view = views.applier.namespaces.view(stream.id)
        if view is not None and view.state is ViewState.LIVE and view.epoch == stream.epoch:
            assert fate == "lose" or held(view) == stream.held
    views.read(stream.resync())
    view = views.view(stream)
    assert (view.state, held(view)) == (ViewState.LIVE, stream.held)
    view.index.check()


def test_the_worker_for_which_all_holder_sets_are_widened_joins_in_slices(views: Views) -> None:
    random = np.random.default_rng(1)
    streams = [Stream(f"w{i}") for i in range(65)]
    for stream in streams[:64]:
        pages = 1 + np.flatnonzero(random.random(10_000) < 0.1)
        views.read(stream.batch(stored((0, pages.tolist()))))
    joining = streams[64].batch(stored((0, [1, 2])))
    assert sum(1 for _ in views.applier.apply(joining, 0.0)) >= 5
    for stream in streams:
        view = views.view(stream)
        assert (view.state, held(view)) == (ViewState.LIVE, stream.held)
    view.index.check()


def test_a_large_event_is_applied_in_slices_and_right(views: Views) -> None:
    stream = Stream()
    record = stream.batch(stored((0, list(range(1, 9001))), (0, list(range(20_001, 20_801)))))
    assert sum(1 for _ in views.applier.apply(record, 0.0)) == 5
    view = views.view(stream)
    assert (view.state, view.num_pages[0]) == (ViewState.LIVE, 9800)
    parents = {page: parent for page, (parent, _) in held_pages(view).items()}
    assert (parents[1], parents[9000], parents[20_001], parents[20_002]) == (0, 8999, 0, 20_001)
    assert np.count_nonzero(list(parents.values())) == 9798
