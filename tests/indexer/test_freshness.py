"""How fresh a view is: late batches, clocks that are set, silence, outages, and what publishers say of themselves."""

import pytest

from indexer.freshness import Freshness
from indexer.index import OverlapIndex
from indexer.kernels import views as column
from indexer.views import LATE_S, View, ViewState, make_columns
from kv_events.codec import decode_batch
from kv_events.schema import BATCHES_LOST, ENGINE_UNHEARD
from tests.rigs.views import Views, held
from tests.support.log.records import Stream, stored

LIVE, STALE = (ViewState.LIVE, ""), (ViewState.STALE, "no heartbeat")


class Heard:
    """A stream whose reader's clock shows 1000 at its tick 0."""

    def __init__(self) -> None:
        self.view = View(Stream().id, 4, OverlapIndex(64), 0, make_columns(1))

    def note(self, made_at: float, tick: float) -> None:
        batch = decode_batch(Stream().batch(now=made_at).payload)
        self.view.note_arrival(batch, 1000 + tick, tick)

    @property
    def is_delayed(self) -> bool:
        return self.seconds > LATE_S

    @property
    def seconds(self) -> float:
        return self.view.lateness[column.SECONDS]


@pytest.mark.parametrize("ahead_s", [0, 3600, -3600])
def test_batches_that_waited_for_the_end_of_an_outage_are_late(ahead_s: float) -> None:
    lateness = Heard()
    for second in range(10):
        lateness.note(1000 + ahead_s + second, second)
    assert not lateness.is_delayed
    shown = []
    for second in range(10, 40):  # all arrive within 0.3 s, 30 s after the first one was made
        lateness.note(1000 + ahead_s + second, 40 + (second - 10) / 100)
        shown.append(lateness.seconds)
    assert shown == pytest.approx([40 - second + (second - 10) / 100 for second in range(10, 40)], abs=0.1)
    lateness.note(1041 + ahead_s, 41)
    assert not lateness.is_delayed


def test_the_first_batches_after_a_restart_may_be_late() -> None:
    lateness = Heard()
    for tenth in range(100):  # all arrive at once, 10 s after the first one was made
        lateness.note(1000 + tenth / 10, 10 + tenth / 1000)
        assert lateness.is_delayed == (10 - tenth / 10 + tenth / 1000 > LATE_S)


@pytest.mark.parametrize("ahead_s", [10, -10])
def test_another_clock_of_a_new_stream_is_believed_after_some_seconds(ahead_s: float) -> None:
    lateness, verdicts = Heard(), []
    for tenth in range(50):
        lateness.note(1000 + ahead_s + tenth / 10, tenth / 10)
        verdicts.append(lateness.is_delayed)
    assert verdicts[0] == (ahead_s < 0)
    assert not any(verdicts[30:])


@pytest.mark.parametrize("step_s", [3600, -3600])
def test_a_clock_that_is_set_makes_no_batch_late(step_s: float) -> None:
    lateness = Heard()
    for second in range(10):
        lateness.note(1000 + second, second)
    for second in range(10, 20):
        lateness.note(1000 + second + step_s, second)
        assert not lateness.is_delayed


def test_a_clock_that_is_set_back_during_an_outage_is_believed_after_some_seconds() -> None:
    lateness = Heard()
    lateness.note(1000, 0)
    verdicts = []
    for tenth in range(50):
        lateness.note(1000 + 20 + tenth / 10, 30 + tenth / 10)  # 10 s behind from now on
        verdicts.append(lateness.is_delayed)
    assert verdicts[0]
    assert not verdicts[-1]


def test_a_reader_that_falls_behind_sees_it() -> None:
    lateness = Heard()
    for second in range(30):
        lateness.note(1000 + second / 2, second)  # it reads half as fast as the publisher writes
    assert lateness.is_delayed


def shown(views: Views, stream: Stream, freshness: Freshness | None = None) -> tuple[ViewState, str]:
    freshness, view = freshness or views.freshness, views.view(stream)
    return freshness.state(view), freshness.reason(view)


def test_a_view_is_live_only_when_it_tells_of_the_present() -> None:
    views, stream = Views(), Stream()
    for page, made_at, tick, expected in [
        (1, 100.0, 0.0, LIVE),
        (2, 100.2, 20.0, STALE),
        (3, 120.0 - LATE_S, 20.1, STALE),
        (4, 120.1, 20.2, LIVE),
    ]:
        views.read(stream.batch(stored((0, [page])), now=made_at), at=made_at, tick=tick)
        views.freshness.note_log_read(tick)
        assert shown(views, stream) == expected


@pytest.mark.parametrize("late_s", [0.1, 0.9, 3.0])
def test_a_view_is_live_no_longer_than_two_heartbeats_after_its_newest_batch_was_made(late_s: float) -> None:
    views, stream = Views(), Stream()
    for made_at, tick in ((100.0, 0.0), (102.0, 2.0 + late_s)):
        views.read(stream.batch(stored((0, [int(made_at)])), now=made_at), at=made_at, tick=tick)
    for tick, expected in ((2.0 + LATE_S - 0.01, LIVE), (2.0 + LATE_S + 0.01, STALE)):
        views.freshness.note_log_read(tick)
        assert shown(views, stream) == expected


# --- silence --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ttl_s", "silence_s"), [(10.0, LATE_S), (2.0, 2.0)])
def test_a_smaller_epoch_is_believed_when_the_larger_one_misses_two_heartbeats(ttl_s: float, silence_s: float) -> None:
    views, large, small = Views(follows_silence=True, worker_ttl_s=ttl_s), Stream(), Stream()
    large.epoch = 9
    views.read(large.batch(stored((0, [1])), now=100.0), small.batch(stored((0, [2])), now=100.0 + silence_s))
    view = views.view(large)
    assert (view.epoch, held(view)) == (9, {(1, 0)})
    small.restart()
    small.epoch = 1
    views.read(small.batch(stored((0, [3])), now=100.1 + silence_s))
    assert (view.epoch, view.state, held(view)) == (1, ViewState.LIVE, {(3, 0)})


@pytest.mark.parametrize(("ttl_s", "outage_s"), [(10.0, 3.0), (10.0, 400.0), (60.0, 20.0)])
def test_a_smaller_epoch_is_not_believed_after_an_outage_before_two_heartbeats_are_missing(
    ttl_s: float, outage_s: float
) -> None:
    views, large, small = Views(follows_silence=True, worker_ttl_s=ttl_s), Stream(), Stream()
    large.epoch = 9
    views.read(large.batch(now=100.0))
    end = 102.0 + outage_s
    for now in (100.0, 101.0, 102.0, end):
        views.freshness.note_log_read(now)
    views.read(small.batch(now=end + LATE_S))
    assert views.view(large).epoch == 9
    views.read(small.batch(now=end + LATE_S + 0.1))
    assert views.view(large).epoch == 1


def test_silence_expires_a_worker_only_while_the_log_is_read() -> None:
    views, stream = Views(100.0), Stream()
    views.read(stream.batch(now=100.0))
    views.wait(4, 2)
    assert views.shown(stream)[0] is ViewState.LIVE
    views.wait(8, 2)
    assert views.shown(stream)[0] is ViewState.EXPIRED
    views.read(stream.batch(now=113.0))
    assert views.shown(stream)[0] is ViewState.LIVE


def test_an_outage_of_the_log_expires_no_worker_and_leaves_time_to_be_heard_again() -> None:
    views, stream = Views(100.0), Stream()
    views.read(stream.batch(now=100.0))
    views.wait(400, 400)
    assert shown(views, stream) == STALE
    views.wait(12, 2)
    assert views.shown(stream)[0] is ViewState.EXPIRED


def test_a_view_without_two_heartbeats_is_stale_although_the_log_is_not_read() -> None:
    views, stream, times = Views(), Stream(), iter([104.0, 104.0, 105.0, 105.0, 500.0, 500.0, 500.0, 500.0])
    freshness = Freshness(ttl_s=10.0, now=100.0, clock=lambda: next(times))
    views.read(stream.batch(now=100.0))
    for expected in (LIVE, STALE, STALE):
        assert shown(views, stream, freshness) == expected
    views.read(stream.batch(now=499.0))
    assert shown(views, stream, freshness) == LIVE


# --- what publishers say of themselves ------------------------------------------------------------------------------


def test_a_degraded_view_is_stale_with_the_reason_and_no_resync_until_it_recovers() -> None:
    views, stream = Views(100.0), Stream()
    views.read(stream.batch(stored((0, [1])), now=100.0), stream.batch(now=101.0, degraded_reason=BATCHES_LOST))
    assert views.shown(stream) == (ViewState.STALE, BATCHES_LOST)
    assert views.planned_within(3) == []
    views.read(stream.batch(stored((0, [2])), now=103.0, degraded_reason=BATCHES_LOST))
    assert views.shown(stream) == (ViewState.STALE, BATCHES_LOST)
    views.read(stream.batch(now=104.0))
    assert views.shown(stream) == LIVE


def test_a_gap_in_a_degraded_stream_is_repaired() -> None:
    views, stream = Views(100.0), Stream()
    views.read(stream.batch(stored((0, [1])), now=100.0, degraded_reason=BATCHES_LOST))
    stream.batch(stored((0, [2])))  # lost
    views.read(stream.batch(now=101.0, degraded_reason=BATCHES_LOST))
    assert views.shown(stream) == (ViewState.STALE, "gap")
    assert views.planned_within(3)
    views.read(stream.resync(now=103.0))
    assert views.shown(stream) == LIVE


def test_a_view_ages_while_the_engine_is_not_heard_and_does_not_expire() -> None:
    views, stream = Views(100.0), Stream()
    views.read(stream.batch(stored((0, [1])), now=100.0))
    for beat in range(1, 8):
        views.read(stream.batch(now=100.0 + 5 * beat, degraded_reason=ENGINE_UNHEARD))
        views.wait(5, 5)
    assert views.view(stream).last_batch_at == 100.0
    assert views.shown(stream) == (ViewState.STALE, ENGINE_UNHEARD)
    views.read(stream.batch(now=136.0, degraded_reason=BATCHES_LOST))
    assert views.view(stream).last_batch_at == 136.0


def test_a_view_whose_engine_was_never_heard_is_as_old_as_its_stream_and_expires_with_it() -> None:
    views, stream = Views(100.0), Stream()
    views.read(*(stream.batch(now=now, degraded_reason=ENGINE_UNHEARD) for now in (100.0, 105.0)))
    assert views.view(stream).last_batch_at == 100.0
    views.wait(18, 2)
    assert views.shown(stream)[0] is ViewState.EXPIRED
