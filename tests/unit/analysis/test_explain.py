"""Every planted cause is found, whatever the other workers do."""

from __future__ import annotations

import msgspec
import pytest

from analysis.explain.explanation import explain
from api.asked_prompts import asked_prompt
from indexer.settings import IndexerSettings
from kvsight.cli.prompts import decode_query
from kvsight.schemas.explanations import CAUSES, WorkerExplanation
from tests.support.log.planted_causes import PLANTS, VICTIM, Scene, check_truth, planted

INSTANCES = 20


def explanation_of(scene: Scene) -> WorkerExplanation:
    """What `explain` finds for the victim."""
    body = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in scene.body.items()}
    found = explain(
        asked_prompt(*decode_query(body)), enumerate(scene.records), scene.until, IndexerSettings(**scene.settings)
    )
    (worker,) = (worker for worker in found.workers if worker.instance_id == VICTIM)
    return worker


@pytest.mark.parametrize("name", PLANTS)
def test_the_true_cause_is_found(name: str) -> None:
    for number in range(INSTANCES):
        scene, truth = planted(name, number)
        check_truth(explanation_of(scene), truth)


def test_every_cause_is_planted() -> None:
    found = set()
    for name in PLANTS:
        _, truth = planted(name, 0)
        found |= {truth.cause, *truth.also}
    assert found == set(CAUSES)
