"""Routing policies, the router that they ask, reports, and settings."""

import json
import math
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest

import selection.policies
from kv_events.errors import InvalidValueError
from kv_events.kafka.settings import KafkaSettings
from selection.candidates import Asked, Candidates, Choice
from simulation import (
    POLICIES,
    EngineSettings,
    PolicyReport,
    SimulationSettings,
    WorkerLoad,
    create_policy,
    simulate,
)
from simulation.run import TimedFleet


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_chooses_a_worker_there_is(name: str, make_fleet, prompts) -> None:
    fleet = make_fleet(name)
    assert {fleet.serve(prompts.request(50)) for _ in range(30)} == {0, 1, 2}


def test_random_repeats_itself_for_a_seed_only(make_fleet, prompts) -> None:
    router, request = make_fleet().run.router, prompts.request(50)
    one, again, other = (create_policy("random", seed) for seed in (1, 1, 2))
    chosen = [one(request, router, "1", 0.0) for _ in range(50)]
    assert chosen == [again(request, router, "1", 0.0) for _ in range(50)]
    assert chosen != [other(request, router, "1", 0.0) for _ in range(50)]


def test_round_robin_goes_around(make_fleet, prompts) -> None:
    fleet = make_fleet("round-robin")
    assert [fleet.serve(prompts.request(50)) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_a_request_is_booked_for_as_long_as_an_idle_engine_needs(make_fleet, prompts) -> None:
    """The others generate one token, so they end with their prefill, after a second."""
    speed = EngineSettings(prefill_s=1.0, decode_s=1.0, token_s=0, attention_s=0, context_s=0)
    fleet = make_fleet(workers=1, engine=speed)
    request = prompts.request(160)._replace(output_length=4)  # first token after 1 s, last one after 4 s
    fleet.serve(request)
    seen = []
    for now in (0.5, 1.5, 4.5):
        fleet.serve(prompts.request(16, now))
        loads = fleet.run.router.candidates(request, now)
        seen.append((*loads.prefill_tokens.tolist(), *loads.requests.tolist()))
    assert seen == [(176, 2), (16, 2), (16, 1)]


def test_a_policy_is_asked_with_what_the_index_and_the_book_know(
    make_fleet, prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rule in the table of `selection` decides here, too."""
    seen: list[tuple[Asked, Candidates]] = []

    class Last:
        def choose(self, asked: Asked, candidates: Candidates) -> Choice:
            seen.append((asked, deepcopy(candidates)))  # the columns are overwritten
            return Choice(2, np.zeros(3), "the last one")

    monkeypatch.setitem(selection.policies.POLICIES, "last", Last)
    fleet, request = make_fleet("session,last"), prompts.request(100)._replace(session="talk")
    assert [fleet.serve(request), fleet.serve(request)] == [2, 2]
    (first, before), (_, after) = seen
    assert (first.prompt_tokens, first.session, after.block_size) == (100, "talk", 16)
    assert before.held.tolist() == [[0] * 4] * 3
    assert after.held.tolist() == [[0] * 4, [0] * 4, [96] * 4]
    assert after.workers == ["worker-0", "worker-1", "worker-2"]
    assert after.prefill_tokens.tolist() == [0, 0, 100]
    assert after.decode_blocks.tolist() == [7, 7, 7], "its own pages, the incomplete one too"
    assert after.requests.tolist() == [0, 0, 1]
    assert after.pages.tolist() == [0, 0, 6]


def test_pages_of_earlier_choices_count_before_they_are_computed(make_fleet, prompts) -> None:
    fleet, request = make_fleet(), prompts.request(100)
    fleet.advance(0.0)
    chosen = fleet.run.route(request, 0.0)
    assert fleet.run.router.candidates(request, 1.9).predicted[chosen] == 96
    assert fleet.run.router.candidates(request, 2.1).predicted[chosen] == 0


@pytest.mark.parametrize(("delay_s", "known"), [(0.0, 1), (0.5, 1), (1.5, 0), (math.inf, 0)])
def test_a_replica_learns_after_a_delay_what_another_one_booked(make_fleet, prompts, delay_s, known) -> None:
    fleet = make_fleet(routers=2, booking_delay_s=delay_s)
    fleet.advance(0.0)
    chosen, first = fleet.run.route(prompts.request(64), 0.0), fleet.run.router
    fleet.run.route(prompts.request(64), 1.0)
    second = fleet.run.router
    assert second is not first
    booked = [router.candidates(prompts.request(64), 1.0).requests[chosen] for router in (first, second)]
    assert booked[0] == 1
    assert booked[1] in (known, known + 1)  # its own choice may be the same worker
    if known:
        assert booked[1] == 1, "it has chosen another one, because it knew"


def _serve(fleet: TimedFleet, worker: int, *requests) -> None:
    fleet.advance(0.0)
    for request in requests:
        fleet.run.workers[worker].serve(request)
    fleet.deliver(worker)


def test_reusable_are_tokens_of_whole_pages_by_worker(make_fleet, prompts) -> None:
    fleet, request = make_fleet(), prompts.request(100)
    assert fleet.run.router.reusable(request) == [0, 0, 0]
    _serve(fleet, 1, request)
    _serve(fleet, 2, request._replace(token_ids=request.token_ids[:40]))
    assert fleet.run.router.reusable(request) == [0, 96, 32]


def test_an_extra_key_is_part_of_the_question(make_fleet, prompts) -> None:
    fleet, request = make_fleet(), prompts.request(64)
    _serve(fleet, 0, request._replace(extra_key="tenant"))
    assert fleet.run.router.reusable(request) == [0, 0, 0]
    assert fleet.run.router.reusable(request._replace(extra_key="tenant")) == [64, 0, 0]


def test_a_worker_that_is_idle_for_minutes_still_counts(make_fleet, prompts) -> None:
    fleet, request = make_fleet(), prompts.request(64)
    _serve(fleet, 0, request)
    for minute in range(1, 4):
        fleet.advance(60.0 * minute)
    assert fleet.run.router.reusable(request) == [64, 0, 0]


def test_a_publishers_variables_are_not_the_fleets(make_fleet, prompts, monkeypatch) -> None:
    for name, value in {"TENANT": "t", "DP_RANK": "3", "MAX_STREAMS": "1"}.items():
        monkeypatch.setenv(f"KVSIGHT_{name}", value)
    fleet, request = make_fleet(), prompts.request(64)
    for worker in range(3):
        _serve(fleet, worker, request)
    assert fleet.run.router.reusable(request) == [64, 64, 64]


@pytest.fixture
def report() -> PolicyReport:
    busy = WorkerLoad("worker-0", 1900, 30_000_000, 6_000_000, cut_requests=1)
    idle = WorkerLoad("worker-1", 100, 10_000_000, 2_000_000, divergent_pages=3)
    return PolicyReport("round-robin", (busy, idle), queries=17, seconds=12.34)


def test_the_dictionary_is_json_with_workers_and_sums_over_them(report: PolicyReport) -> None:
    found = json.loads(json.dumps(report.to_dict()))
    assert [load["cut_requests"] for load in found.pop("workers")] == [1, 0]
    assert found == {
        "policy": "round-robin", "queries": 17, "seconds": 12.34, "requests": 2000, "prompt_tokens": 40_000_000,
        "found_tokens": 8_000_000, "found_share": 0.2, "imbalance": 1.9, "divergent_pages": 3, "divergent_answers": 0,
        "latency": None,
    }  # fmt: skip
    empty = PolicyReport("random", (WorkerLoad("worker-0"),), 0, 0.0)
    assert (empty.found_share, empty.imbalance) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("workers", {"workers": 0}),
        ("page_size", {"page_size": 0}),
        ("capacity_tokens", {"capacity_tokens": 100, "page_size": 64}),
        ("capacity_tokens", {"capacity_tokens": 0}),
        ("cache", {"cache": "best"}),
        ("routers", {"routers": 65}),
        ("booking_delay_s", {"booking_delay_s": math.nan}),
        ("speed", {"speed": 0.0}),
        ("ttft_slo_s", {"ttft_slo_s": math.inf}),
        ("itl_slo_s", {"itl_slo_s": -1.0}),
        ("host_ratio", {"cache": "hiradix", "host_ratio": 0.9}),
        ("disk_ratio", {"cache": "hiradix", "disk_ratio": 0.0}),
        ("groups", {"cache": "hiradix", "groups": True}),
        ("event_log_dir", {"kafka": KafkaSettings(kafka="localhost:9092"), "event_log_dir": Path("log")}),
    ],
)
def test_a_bad_setting_is_refused_by_name(field: str, values: dict[str, object]) -> None:
    with pytest.raises(InvalidValueError, match=field):
        SimulationSettings(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "value"), [("max_batch_tokens", 0), ("max_requests", 0), ("token_s", math.nan)])
def test_a_bad_speed_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(InvalidValueError, match=field):
        EngineSettings(**{field: value})  # type: ignore[arg-type]


def test_an_unknown_policy_is_refused_before_anything_runs() -> None:
    with pytest.raises(
        InvalidValueError, match="policy: got 'best', expected one of random, round-robin, overlap-load"
    ):
        simulate([], SimulationSettings(), ["random", "best"])
