"""The funnel of an audit equals what a simulation knows to be true."""

from pathlib import Path

import pytest

from analysis.audit.audit import audit_log
from analysis.audit.decision_audit import CHOSEN, DELIVERED, HELD, PREDICTED
from analysis.audit.report import Funnel, Loss
from simulation import SimulationSettings, WorkloadSettings, generate, simulate
from tests.support.effort import num_examples
from tests.support.log.deciding_fleet import DecidingFleet


def steps(funnel: Funnel) -> dict[str, int]:
    return {
        "prompts": funnel.prompt_tokens,
        HELD: funnel.held_in_fleet,
        CHOSEN: funnel.held_by_chosen,
        PREDICTED: funnel.predicted,
        DELIVERED: funnel.delivered,
    }


def tokens(losses: list[Loss]) -> dict[tuple[str, str], int]:
    return {(each.step, each.cause): each.tokens for each in losses}


@pytest.mark.random_cases
@pytest.mark.parametrize("seed", range(num_examples(20)))
def test_every_number_and_every_cause_is_the_true_one(tmp_path: Path, seed: int) -> None:
    fleet = DecidingFleet(tmp_path, seed)
    fleet.run(150)
    funnel = audit_log(tmp_path).funnel
    assert funnel is not None
    assert steps(funnel) == {step: fleet.steps[step] for step in steps(funnel)}
    assert tokens(funnel.losses) == +fleet.losses
    assert tokens(funnel.gains) == +fleet.gains
    for loss in (*funnel.losses, *funnel.gains):
        assert loss.share == loss.tokens / funnel.prompt_tokens
        assert len(loss.examples) == min(3, loss.requests)
        assert loss.examples[0].tokens == max(each.tokens for each in loss.examples)


def test_every_cause_occurs(tmp_path: Path) -> None:
    fleet = DecidingFleet(tmp_path, 1)
    fleet.run(600)
    causes = {cause for _, cause in +fleet.losses}
    assert causes == {
        "load", "router did not ask", "stale view", "evicted before arrival", "engine's own reason", "hash mismatch",
        "not computed before", "evicted before", "no whole page", "no outcome known",
    }  # fmt: skip


@pytest.mark.parametrize("policy", ["kv-aware", "random"])
def test_a_recorded_simulation_has_the_funnel_of_its_report(tmp_path: Path, policy: str) -> None:
    settings = SimulationSettings(workers=3, capacity_tokens=16_384, event_log_dir=tmp_path)
    (report,) = simulate(generate(WorkloadSettings(num_requests=120)), settings, [policy])
    funnel = audit_log(tmp_path / policy).funnel
    assert funnel is not None
    assert (funnel.requests, funnel.outcomes) == (120, 120)
    assert (funnel.prompt_tokens, funnel.delivered) == (report.prompt_tokens, report.found_tokens)
    if policy == "kv-aware":  # the events of each request are applied before the next one
        assert funnel.held_by_chosen == funnel.predicted == funnel.delivered
        assert {each.cause for each in funnel.losses if each.step != HELD} <= {"load"}
    else:
        assert funnel.predicted == 0
        assert {each.cause for each in funnel.losses if each.step != HELD} == {"router did not ask"}
