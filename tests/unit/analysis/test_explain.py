"""Every planted cause is found, whatever the other workers do."""

from __future__ import annotations

import msgspec
import pytest

from analysis.explain.explanation import explain
from api.asked_prompts import asked_prompt
from indexer.replay import Replay
from indexer.settings import IndexerSettings
from indexer.until import Until
from kv_events.streams import StreamId
from kvsight.cli.prompts import decode_query
from kvsight.schemas.explanations import CAUSES, WorkerExplanation
from tests.support.log.planted_causes import (
    MODEL,
    PLANTS,
    VICTIM,
    Scene,
    check_truth,
    planted,
    store_under_engine_names,
)

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


@pytest.mark.parametrize("number", range(5))
def test_a_moment_may_be_an_index_of_the_log(number: int) -> None:
    scene, truth = planted("evicted", 300 + number)
    assert truth.record is not None
    scene.until = Until(offset=truth.record + 1)
    check_truth(explanation_of(scene), truth)
    scene.until = Until(offset=truth.record)
    assert explanation_of(scene).findings[0].page != truth.page


@pytest.mark.parametrize("number", range(5))
def test_a_moment_may_be_positions_of_a_topic(number: int) -> None:
    scene, truth = planted("cleared", 310 + number)
    assert truth.record is not None
    offset = scene.records[truth.record].offset
    scene.until = Until(positions={0: offset})
    assert explanation_of(scene).cause == "held"
    scene.until = Until(positions={0: offset + 1})
    assert explanation_of(scene).cause == "cleared"


def test_a_prompt_of_hashes_is_explained() -> None:
    for name in ("evicted", "moved", "restarted", "lost_batch", "other_tenant", "hidden"):
        scene, truth = planted(name, 320)
        scene.body = {"model_name": MODEL, "seq_hashes": scene.hashes}
        check_truth(explanation_of(scene), truth)


def test_other_workers_are_not_changed_by_what_is_planted() -> None:
    scene, _ = planted("held", 330)
    body = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in scene.body.items()}
    found = explain(asked_prompt(*decode_query(body)), enumerate(scene.records))
    held = Replay().apply_all(scene.records)
    for worker in found.workers:
        view = held.namespaces.view(StreamId(MODEL, "default", worker.instance_id, worker.dp_rank))
        assert view is not None
        pages = {h for part in view.index.stream_pages(view.number) for h in part.hashes.tolist()}
        prefix = next((i for i, h in enumerate(scene.hashes) if h not in pages), len(scene.hashes))
        assert worker.held["external"] == prefix


def test_a_prompt_without_tokens_is_shorter_than_a_page() -> None:
    scene, _ = planted("held", 340)
    scene.body["token_ids"] = []
    assert explanation_of(scene).cause == "partial_page"


@pytest.mark.parametrize(("num_salts", "named"), [(10, True), (100, False)])
def test_the_search_for_rules_is_bounded(num_salts: int, named: bool) -> None:
    scene, truth = planted("unusual_seed", 340)
    records, scene.records, scene.now = scene.records, [], scene.now - 1000
    other = scene.stream("salted")
    for number in range(num_salts):
        store_under_engine_names(scene, other, scene.hashes_under(salt=f"salt {number}"))
    scene.records += records
    (finding,) = explanation_of(scene).findings
    assert finding.namespace == (truth.namespace if named else {})
