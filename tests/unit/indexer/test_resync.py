"""`ResyncPlanner`: whose publisher is asked, and when."""

from __future__ import annotations

from collections import Counter

import pytest

from indexer.applier import Applier, DeadLetters
from indexer.freshness import Freshness
from indexer.namespaces import Namespaces
from indexer.resync import ResyncPlanner
from indexer.settings import IndexerSettings
from kv_events.records import LogRecord
from tests.support.log.records import Stream, stored

SETTINGS = IndexerSettings(max_pages=1000, max_namespaces=200, resync_rate_per_s=5.0)


class Router:
    """An indexer whose clock the test advances."""

    def __init__(self) -> None:
        self.now = 0.0
        self.applier = Applier(Namespaces(SETTINGS), DeadLetters())
        self.freshness = Freshness(SETTINGS.worker_ttl_s, 0.0)
        self.planner = ResyncPlanner(SETTINGS, self.freshness, seed=1)

    def read(self, record: LogRecord) -> None:
        list(self.applier.apply(record, self.now))

    def plan_for(self, seconds: float) -> list[str]:
        """Return the streams that are asked during this time."""
        asked = []
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            self.freshness.note_log_read(self.now)
            asked += [request.stream for request in self.planner.plan(self.applier.namespaces, self.now)]
        return asked


@pytest.fixture
def router() -> Router:
    return Router()


def add_strangers(router: Router) -> list[Stream]:
    """Let 30 unknown workers and 70 unknown models appear with a batch from the middle of a stream."""
    strangers = [Stream(f"stranger-{i}") for i in range(30)] + [Stream("w", model=f"model-{i}") for i in range(70)]
    for stranger in strangers:
        stranger.batch()  # was never seen
        router.read(stranger.batch(stored((0, [1])), digest=bytes(64)))
    return strangers


def workers_with_a_gap(router: Router, num_workers: int = 6) -> list[Stream]:
    workers = [Stream(f"worker-{i}") for i in range(num_workers)]
    for worker in workers:
        router.read(worker.resync())
        worker.batch(stored((0, [2])))  # lost
        router.read(worker.batch())
    return workers


def test_workers_that_have_answered_before_do_not_wait_for_strangers(router: Router) -> None:
    strangers = add_strangers(router)
    router.plan_for(3.0)
    workers = workers_with_a_gap(router)
    asked = router.plan_for(2.0)
    assert {worker.id.key for worker in workers} <= set(asked)
    assert {stranger.id.key for stranger in strangers} & set(asked)


def test_a_new_worker_is_asked_although_known_ones_are_broken_for_ever(router: Router) -> None:
    workers = workers_with_a_gap(router, 100)
    new = Stream("new")
    new.batch()
    router.read(new.batch(stored((0, [1])), digest=bytes(64)))
    asked = router.plan_for(2.0)
    assert new.id.key in asked
    assert len({worker.id.key for worker in workers} & set(asked)) >= 8


def test_streams_that_do_not_answer_are_asked_less_and_less_and_not_at_all_once_silent(router: Router) -> None:
    (stream,) = workers_with_a_gap(router, 1)
    asked = []
    for _ in range(60):
        router.read(stream.batch())  # heartbeats
        asked.append(len(router.plan_for(1.0)))
    assert 4 <= sum(asked) <= 6
    assert sum(asked[:10]) >= 3
    router.plan_for(SETTINGS.worker_ttl_s)
    assert router.plan_for(200.0) == []


def test_among_equals_those_asked_least_come_first(router: Router) -> None:
    add_strangers(router)
    asked: Counter[str] = Counter()
    for _ in range(3):
        for view in router.applier.namespaces.views:
            view.last_batch_tick = router.now  # every stranger goes on sending
        asked.update(router.plan_for(9.0))
    assert max(asked.values()) <= 2
    assert len(asked) == 100
