"""Every planted cause is found, whatever the other workers do."""

from pathlib import Path

import msgspec
import pytest

from analysis.explain.asked_prompt import AskedPrompt
from analysis.explain.explanation import explain
from indexer.replay import Replay, Timeline, open_beginning
from indexer.settings import IndexerSettings
from kv_events.http.explanations import CAUSES, Explanation, Finding, WorkerExplanation
from kv_events.log.moments import LogMoment
from kv_events.log.reader import scan_log
from kv_events.streams import StreamId
from kvsight.cli.shared.prompts import decode_query
from tests.support.log.late_log import write_late_log, write_log
from tests.support.log.planted_causes import PLANTS, check_truth, planted, store_under_engine_names
from tests.support.log.planted_scene import MODEL, VICTIM, Scene
from tests.support.log.view_facts import held_pages

INSTANCES = 20


def explanation_of(scene: Scene) -> WorkerExplanation:
    """What `explain` finds for the victim."""
    views = Replay(IndexerSettings(**scene.settings))
    return victim(explain(prompt_of(scene), enumerate(scene.records), scene.until, views))


def prompt_of(scene: Scene) -> AskedPrompt:
    body = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in scene.body.items()}
    return AskedPrompt(*decode_query(body, Path("prompt.json")))


def late_explanation(scene: Scene, begin: int, folder: Path) -> WorkerExplanation:
    """What `explain` finds for the victim in a log without the records before `begin`."""
    settings = IndexerSettings(**scene.settings)
    write_late_log(folder, scene.records, begin, settings)
    beginning = open_beginning(folder, settings)
    assert (beginning.fault, beginning.warning) == ("", "")
    return victim(explain(prompt_of(scene), Timeline(folder, settings).records(), scene.until, beginning.views))


def victim(found: Explanation) -> WorkerExplanation:
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
    scene.until = LogMoment(index=truth.record + 1)
    check_truth(explanation_of(scene), truth)
    scene.until = LogMoment(index=truth.record)
    assert explanation_of(scene).findings[0].page != truth.page


@pytest.mark.parametrize("number", range(5))
def test_a_moment_may_be_positions_of_a_topic(number: int) -> None:
    scene, truth = planted("cleared", 310 + number)
    assert truth.record is not None
    offset = scene.records[truth.record].offset
    scene.until = LogMoment(offsets={0: offset})
    assert explanation_of(scene).cause == "held"
    scene.until = LogMoment(offsets={0: offset + 1})
    assert explanation_of(scene).cause == "cleared"


def test_a_prompt_of_hashes_is_explained() -> None:
    for name in ("evicted", "moved", "restarted", "lost_batch", "other_tenant", "hidden"):
        scene, truth = planted(name, 320)
        scene.body = {"model_name": MODEL, "seq_hashes": scene.hashes}
        check_truth(explanation_of(scene), truth)


def test_other_workers_are_not_changed_by_what_is_planted() -> None:
    scene, _ = planted("held", 330)
    found = explain(prompt_of(scene), enumerate(scene.records))
    held = Replay().apply_all(scene.records)
    for worker in found.workers:
        view = held.namespaces.view(StreamId(MODEL, "default", worker.instance_id, worker.dp_rank))
        assert view is not None
        pages = held_pages(view)
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


@pytest.mark.parametrize("name", PLANTS)
def test_a_log_that_begins_late_is_explained_from_its_key_frame(name: str, tmp_path: Path) -> None:
    """What the rest of the log shows is explained as from the whole one; nothing else is called a loss."""
    for number in range(3):
        scene, _ = planted(name, 400 + number)
        whole = explanation_of(scene)
        before = [index for index, each in enumerate(scene.records) if scene.until is None or scene.until.takes(each)]
        begin = int(scene.random.integers(0, before[-1] + 1))
        late = late_explanation(scene, begin, tmp_path / str(number))
        assert (late.held, late.state, late.state_reason) == (whole.held, whole.state, whole.state_reason)
        evidence = [each.batch.index for finding in whole.findings for each in finding.evidence]
        if evidence and all(index is not None and index >= begin for index in evidence):
            assert [without_text(each) for each in late.findings] == [without_text(each) for each in whole.findings]
        assert late.cause == whole.cause or late.cause in ("never_stored", "stale", "expired"), late.findings[0].text
        assert all(each.batch.index is not None for finding in late.findings for each in finding.evidence)


def test_what_was_held_before_the_log_is_named_so(tmp_path: Path) -> None:
    scene, truth = planted("evicted", 7)
    assert truth.record is not None
    late = late_explanation(scene, truth.record, tmp_path)
    assert (late.cause, late.findings[0].page) == ("evicted", truth.page)
    assert [each.what for each in late.findings[0].evidence] == ["removed"]
    assert (
        f"Page {truth.page} of {scene.num_pages} was stored before the log begins and evicted" in late.findings[0].text
    )
    late = late_explanation(scene, truth.record + 1, tmp_path / "later")
    assert (late.cause, late.findings[0].page) == ("never_stored", truth.page)
    assert "when the log begins" in late.findings[0].text


def without_text(finding: Finding) -> Finding:
    return msgspec.structs.replace(finding, text="")


@pytest.mark.parametrize("name", PLANTS)
def test_a_log_read_as_chunks_gives_the_same_answer_as_its_records(name: str, tmp_path: Path) -> None:
    for number in range(3):
        scene, truth = planted(name, 100 + number)
        write_log(tmp_path / str(number), scene.records)
        chunks = list(scan_log(tmp_path / str(number), lambda error: pytest.fail(str(error))))
        found = explain(prompt_of(scene), chunks, scene.until, Replay(IndexerSettings(**scene.settings)))
        expected = explain(
            prompt_of(scene), enumerate(scene.records), scene.until, Replay(IndexerSettings(**scene.settings))
        )
        assert found == expected
        assert truth.cause in {worker.cause for worker in found.workers}
