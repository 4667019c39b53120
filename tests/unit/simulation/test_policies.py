"""Routing policies."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from kv_events.errors import InvalidValueError
from simulation import POLICIES, Request, create_policy


def _step(fleet, request: Request) -> int:
    fleet.advance(request.arrival_s)
    chosen: int = fleet.run.step(request)
    fleet.deliver(chosen)
    return chosen


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidValueError, match="random, round-robin, kv-aware"):
        create_policy("best", 8, 0)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_chooses_a_worker_there_is(name: str, make_fleet, prompts) -> None:
    fleet = make_fleet(name)
    assert {_step(fleet, prompts.request(50)) for _ in range(30)} == {0, 1, 2}


def test_random_repeats_itself_for_a_seed_only(make_fleet, prompts) -> None:
    router, request = make_fleet().run.router, prompts.request(50)
    one, again, other = (create_policy("random", 3, seed) for seed in (1, 1, 2))
    chosen = [one.choose(request, router) for _ in range(50)]
    assert chosen == [again.choose(request, router) for _ in range(50)]
    assert chosen != [other.choose(request, router) for _ in range(50)]


def test_round_robin_goes_around(make_fleet, prompts) -> None:
    fleet = make_fleet("round-robin")
    assert [_step(fleet, prompts.request(50)) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("name", ["random", "round-robin"])
def test_blind_policies_ask_nothing(name: str, make_fleet, prompts) -> None:
    fleet = make_fleet(name)
    _step(fleet, prompts.request(50))
    assert fleet.run.router.num_queries == 0


def test_kv_aware_returns_to_the_worker_that_holds_the_prompt(make_fleet, prompts) -> None:
    fleet = make_fleet()
    requests = [prompts.request(200) for _ in range(3)]
    homes = [_step(fleet, request) for request in requests]
    assert [_step(fleet, request) for request in requests * 2] == homes * 2


def test_kv_aware_spreads_prompts_that_share_nothing(make_fleet, prompts) -> None:
    fleet = make_fleet()
    loads = Counter(_step(fleet, prompts.request(200)) for _ in range(30))
    assert set(loads.values()) == {10}


def test_kv_aware_does_not_pile_a_popular_prefix_on_one_worker(make_fleet, prompts) -> None:
    fleet = make_fleet(capacity_tokens=2**16)
    prefix = prompts.tokens(64)
    requests = [Request(0.0, np.concatenate((prefix, prompts.tokens(400)))) for _ in range(60)]
    loads = Counter(_step(fleet, request) for request in requests)
    assert max(loads.values()) < 1.2 * 60 / 3


def test_kv_aware_forgets_load_in_time(make_fleet, prompts) -> None:
    fleet = make_fleet()
    busy = _step(fleet, prompts.request(500))
    prefix = prompts.tokens(16)
    fleet.run.workers[busy].serve(Request(0.0, prefix))
    fleet.deliver(busy)
    request = Request(600.0, np.concatenate((prefix, prompts.tokens(100))))
    assert _step(fleet, request) == busy
