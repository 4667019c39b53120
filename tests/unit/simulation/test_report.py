"""The report of a run about a policy."""

from __future__ import annotations

import json

import pytest

from simulation import PolicyReport, WorkerLoad


@pytest.fixture
def report() -> PolicyReport:
    busy = WorkerLoad("worker-0", 1900, 30_000_000, 6_000_000, cut_requests=1)
    idle = WorkerLoad("worker-1", 100, 10_000_000, 2_000_000, divergent_pages=3)
    return PolicyReport("round-robin", (busy, idle), queries=17, seconds=12.34)


def test_sums_are_over_all_workers(report: PolicyReport) -> None:
    assert (report.requests, report.prompt_tokens, report.found_tokens) == (2000, 40_000_000, 8_000_000)
    assert report.divergent_pages == 3


def test_shares_are_of_the_whole(report: PolicyReport) -> None:
    assert report.found_share == 0.2
    assert report.imbalance == 1.9


def test_a_run_without_requests_has_shares_of_zero() -> None:
    report = PolicyReport("random", (WorkerLoad("worker-0"),), 0, 0.0)
    assert (report.found_share, report.imbalance) == (0.0, 0.0)


def test_the_dictionary_is_json_with_sums_and_workers(report: PolicyReport) -> None:
    found = json.loads(json.dumps(report.to_dict()))
    assert found["policy"] == "round-robin"
    assert found["found_share"] == 0.2
    assert found["workers"][0]["cut_requests"] == 1
    assert found["workers"][1]["divergent_pages"] == 3
