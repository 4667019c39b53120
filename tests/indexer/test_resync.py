"""Whose publisher is asked for a resync, and when; and the life of workers as log lines."""

import logging
from collections import Counter

import pytest

from indexer.slices import run_at_once
from indexer.views import ViewState
from indexer.worker_log import WorkerLog
from kv_events.schema import CLOSED
from tests.rigs.views import Views
from tests.support.log.records import Stream, removed, stored


@pytest.fixture
def views() -> Views:
    return Views(max_pages=1000, max_namespaces=200, resync_rate_per_s=5.0)


def add_strangers(views: Views) -> list[Stream]:
    """Let 30 unknown workers and 70 unknown models appear with a batch from the middle of a stream."""
    strangers = [Stream(f"stranger-{i}") for i in range(30)] + [Stream("w", model=f"model-{i}") for i in range(70)]
    for stranger in strangers:
        stranger.batch()  # was never seen
        views.read_now(stranger.batch(stored((0, [1])), digest=bytes(64)))
    return strangers


def workers_with_a_gap(views: Views, num_workers: int = 6) -> list[Stream]:
    workers = [Stream(f"worker-{i}") for i in range(num_workers)]
    for worker in workers:
        views.read_now(worker.resync())
        worker.batch(stored((0, [2])))  # lost
        views.read_now(worker.batch())
    return workers


def test_workers_that_have_answered_before_do_not_wait_for_strangers(views: Views) -> None:
    strangers = add_strangers(views)
    views.planned_within(3.0)
    workers = workers_with_a_gap(views)
    asked = views.planned_within(2.0)
    assert {worker.id.key for worker in workers} <= set(asked)
    assert {stranger.id.key for stranger in strangers} & set(asked)


def test_a_new_worker_is_asked_although_known_ones_are_broken_for_ever(views: Views) -> None:
    workers = workers_with_a_gap(views, 100)
    new = Stream("new")
    new.batch()
    views.read_now(new.batch(stored((0, [1])), digest=bytes(64)))
    asked = views.planned_within(2.0)
    assert new.id.key in asked
    assert len({worker.id.key for worker in workers} & set(asked)) >= 8


def test_streams_that_do_not_answer_are_asked_less_and_less_and_not_at_all_once_silent(views: Views) -> None:
    (stream,) = workers_with_a_gap(views, 1)
    asked = []
    for _ in range(60):
        views.read_now(stream.batch())  # heartbeats
        asked.append(len(views.planned_within(1.0)))
    assert 4 <= sum(asked) <= 6
    assert sum(asked[:10]) >= 3
    views.planned_within(views.settings.worker_ttl_s)
    assert views.planned_within(200.0) == []


def test_among_equals_those_asked_least_come_first(views: Views) -> None:
    add_strangers(views)
    asked: Counter[str] = Counter()
    for _ in range(3):
        for view in views.applier.namespaces.views:
            view.last_batch_tick = views.now  # every stranger goes on sending
        asked.update(views.planned_within(9.0))
    assert max(asked.values()) <= 2
    assert len(asked) == 100


def test_many_stale_streams_are_asked_one_after_another() -> None:
    views = Views(resync_rate_per_s=10.0)
    for number in range(50):
        stream = Stream(f"w{number}")
        stream.batch()  # lost
        views.read_now(stream.batch(digest=b"\1" * 64))
    asked = views.planned_within(2)
    assert 12 <= len(asked) == len(set(asked)) <= 30


def test_each_request_of_an_operator_is_sent_once_and_at_the_same_rate() -> None:
    views = Views(resync_rate_per_s=10.0)
    streams = [Stream(f"w{number}") for number in range(30)]
    for stream in streams:
        views.read_now(stream.resync())
        views.planner.demand(views.view(stream))
    first = views.planned_within(1)
    assert 8 <= len(first) <= 22
    asked = first + views.planned_within(3)
    assert sorted(asked) == sorted(stream.id.key for stream in streams)
    assert views.planner.requested["operator"] == 30


def test_views_that_do_not_fit_are_not_asked_for() -> None:
    views, stream = Views(max_pages=10), Stream()
    views.read_now(stream.batch(stored((0, list(range(1, 21))))))
    assert views.shown(stream) == (ViewState.STALE, "index full")
    views.read_now(stream.batch())
    assert views.planned_within(5) == []
    views.read_now(stream.batch(removed(list(range(1, 21)))))
    assert views.view(stream).state is ViewState.LIVE


# --- log lines ------------------------------------------------------------------------------------------------------


class Watched(Views):
    """Views whose changes are logged."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        super().__init__(1000.0, follows_silence=True, max_pages=1000)
        caplog.set_level(logging.INFO, "indexer.worker_log")
        self._caplog = caplog
        self._log = WorkerLog(self.freshness)
        self.applier.on_applied.append(lambda view, _batch: self._log.note(view))
        self.look()

    def look(self) -> None:
        self.now += 1.0
        run_at_once(self._log.look(self.applier.namespaces.views, self.now))

    def lines(self) -> list[str]:
        """Return the lines since the last call, without the beginning of the stream's key."""
        self.look()
        lines = [record.getMessage().removeprefix("default/m/") for record in self._caplog.records]
        self._caplog.clear()
        return lines


@pytest.fixture
def watched(caplog: pytest.LogCaptureFixture) -> Watched:
    watched = Watched(caplog)
    assert watched.lines() == ["0 worker streams known"]
    return watched


def test_each_change_of_a_workers_life_is_one_line(watched: Watched) -> None:
    stream = Stream()
    stream.clock = lambda: watched.now
    watched.read_now(stream.batch(stored((0, [1]))))
    assert watched.lines() == ["w0/0 joined"]
    stream.batch(stored((0, [2])))  # lost
    watched.read_now(stream.batch())
    assert watched.lines() == ["w0/0 is stale: gap"]
    watched.read_now(stream.resync(), stream.batch())
    assert watched.lines() == ["w0/0 is live again"]
    stream.restart()
    watched.read_now(stream.batch())
    assert watched.lines() == ["w0/0 restarted"]
    watched.wait(12, 1)
    assert watched.lines() == ["w0/0 expired: silent for 11 s"]
    watched.read_now(stream.batch())
    assert watched.lines() == ["w0/0 came back"]
    watched.read_now(stream.batch(degraded_reason=CLOSED))
    assert watched.lines() == ["w0/0 left: closed"]
    assert watched.lines() == []


def test_a_line_has_the_facts_as_fields(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    watched.read_now(Stream("w7").batch())
    watched.look()
    (line,) = caplog.records
    facts = vars(line)
    assert (facts["event"], facts["worker"], facts["model"], facts["state"]) == ("joined", "w7", "m", "live")


def test_many_changes_at_once_are_one_line(watched: Watched) -> None:
    streams = [Stream(f"w{i}") for i in range(2000)]
    watched.read_now(*(stream.batch() for stream in streams))
    assert watched.lines() == ["2000 changes of worker streams: 2000 joined"]
    watched.wait(12, 1)
    assert watched.lines() == ["2000 changes of worker streams: 2000 expired"]
