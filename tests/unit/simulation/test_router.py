"""The information that a policy receives."""

from __future__ import annotations

from simulation.run import DirectFleet


def _serve(fleet: DirectFleet, worker: int, *requests) -> None:
    fleet.advance(0.0)
    for request in requests:
        fleet.run.workers[worker].serve(request)
    fleet.deliver(worker)


def test_before_any_event_no_worker_holds_anything(make_fleet, prompts) -> None:
    assert make_fleet().run.router.overlaps(prompts.request(64)) == [0, 0, 0]


def test_overlaps_are_tokens_of_whole_pages_by_worker(make_fleet, prompts) -> None:
    fleet, request = make_fleet(), prompts.request(100)
    _serve(fleet, 1, request)
    _serve(fleet, 2, request._replace(token_ids=request.token_ids[:40]))
    assert fleet.run.router.overlaps(request) == [0, 96, 32]


def test_an_extra_key_is_part_of_the_question(make_fleet, prompts) -> None:
    fleet, request = make_fleet(), prompts.request(64)
    _serve(fleet, 0, request._replace(extra_key="tenant"))
    assert fleet.run.router.overlaps(request) == [0, 0, 0]
    assert fleet.run.router.overlaps(request._replace(extra_key="tenant")) == [64, 0, 0]


def test_every_question_is_counted(make_fleet, prompts) -> None:
    router = make_fleet().run.router
    for _ in range(3):
        router.overlaps(prompts.request(64))
    assert router.num_queries == 3


def test_a_worker_that_is_idle_for_minutes_still_counts(make_fleet, prompts) -> None:
    fleet, request = make_fleet(), prompts.request(64)
    _serve(fleet, 0, request)
    for minute in range(1, 4):
        fleet.advance(60.0 * minute)
    assert fleet.run.router.overlaps(request) == [64, 0, 0]


def test_a_publishers_variables_are_not_the_fleets(make_fleet, prompts, monkeypatch) -> None:
    for name, value in {"TENANT": "t", "DP_RANK": "3", "MAX_STREAMS": "1"}.items():
        monkeypatch.setenv(f"KVSIGHT_{name}", value)
    fleet, request = make_fleet(), prompts.request(64)
    for worker in range(3):
        _serve(fleet, worker, request)
    assert fleet.run.router.overlaps(request) == [64, 64, 64]
