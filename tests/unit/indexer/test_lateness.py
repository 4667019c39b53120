"""The lateness of batches, with clocks that differ and clocks that are set."""

from __future__ import annotations

import pytest

from indexer.applier import Applier, DeadLetters
from indexer.freshness import Freshness
from indexer.namespaces import Namespaces
from indexer.settings import IndexerSettings
from indexer.views import LATE_S, Lateness, ViewState
from tests.support.log.records import Stream, stored


class Heard:
    """A stream whose reader's clock shows 1000 at its tick 0."""

    def __init__(self) -> None:
        self.lateness = Lateness()

    def note(self, made_at: float, tick: float) -> None:
        self.lateness.note(made_at, 1000 + tick, tick)

    @property
    def is_delayed(self) -> bool:
        return self.lateness.is_delayed

    @property
    def seconds(self) -> float:
        return self.lateness.seconds


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


def test_a_view_is_live_only_when_it_tells_of_the_present() -> None:
    applier = Applier(Namespaces(IndexerSettings(max_pages=1000)), DeadLetters())
    freshness, stream = Freshness(10.0, 0.0), Stream()

    def state_after(page: int, made_at: float, tick: float) -> ViewState:
        for _ in applier.apply(stream.batch(stored((0, [page])), now=made_at), made_at, tick):
            pass
        freshness.note_log_read(tick)
        view = applier.namespaces.view(stream.id)
        assert view is not None
        state = freshness.state(view)
        assert freshness.reason(view) == ("" if state is ViewState.LIVE else "no heartbeat")
        return state

    assert state_after(1, 100.0, 0.0) is ViewState.LIVE
    assert state_after(2, 100.2, 20.0) is ViewState.STALE
    assert state_after(3, 120.0 - LATE_S, 20.1) is ViewState.STALE
    assert state_after(4, 120.1, 20.2) is ViewState.LIVE
