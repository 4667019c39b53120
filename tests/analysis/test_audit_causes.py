"""Faults of routers and of bridges, planted in a log: what an audit says about each."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from analysis.audit.audit import audit_log
from analysis.audit.curves import RESTART, AuditCurves
from analysis.audit.report import AuditReport
from kv_events.decisions import VERSION, Candidate, Decision, Outcome, encode_decision
from kv_events.records import Channel, LogRecord
from tests.support.commands import kvsight
from tests.support.log.late_log import write_log
from tests.support.log.records import Stream, stored, words

START = 1_700_000_000.0
PAGES = list(range(1, 17))
"""Of a prompt of 64 tokens."""


def request(
    number: int, at: float, worker: str, predicted: int, candidates: Sequence[Candidate], rank: int | None = None
) -> list[LogRecord]:
    """A decision for the prompt, and the outcome that was predicted."""
    name = f"r{number}"
    decision = Decision(
        VERSION, name, at, "m", "default", 4, 64, words(PAGES), worker, rank, predicted, tuple(candidates)
    )
    records = (decision, Outcome(VERSION, name, at + 0.5, predicted))
    return [
        LogRecord(0, 0, int(at * 1000), name.encode(), encode_decision(each), Channel.DECISIONS) for each in records
    ]


def audited(folder: Path, *records: LogRecord) -> tuple[AuditReport, dict[str, str]]:
    """The report, and its findings by kind."""
    write_log(folder, list(records))
    report = audit_log(folder)
    return report, {each.kind: each.text for each in report.findings}


def beats(*streams: Stream, seconds: range) -> list[LogRecord]:
    return [each.batch(now=START + second) for second in seconds for each in streams]


def test_a_choice_against_the_scores_is_no_choice_by_load(tmp_path: Path) -> None:
    engines = Stream("engine-0"), Stream("engine-1")
    records = [engines[0].batch(now=START), engines[1].batch(stored((0, PAGES)), now=START)]
    for number in range(12):
        offered = Candidate("engine-0", None, 0, 0.0), Candidate("engine-1", None, 64, 64.0)
        records += request(number, START + 1 + number, "engine-0", 0, offered)
    _, found = audited(tmp_path, *records)
    assert "load" not in found
    assert "chose against its own scores (12 requests)" in found["chose against its own scores"]
    assert "engine-1 scored 64, the chosen engine-0 0" in found["chose against its own scores"]
    assert "engine-1 scored 64, the chosen engine-0 0" in kvsight("audit", tmp_path).stdout


def test_a_mistyped_worker_is_named(tmp_path: Path) -> None:
    """Of a worker that is heard later, only the beginning is unknown."""
    engines = Stream("engine-0"), Stream("other")
    records = [engines[0].batch(stored((0, PAGES)), now=START)]
    for number in range(3):
        records += request(number, START + 1 + number, "engin-0", 64, [Candidate("engine-0", None, 64, 64.0)])
    records += [*request(3, START + 4, "other", 0, []), engines[1].batch(now=START + 5)]
    report, found = audited(tmp_path, *records)
    text = "3 requests went to engin-0, of which the log has no batch; the nearest name is engine-0"
    assert (report.findings[0].kind, found["unknown worker"]) == ("unknown worker", text)


def test_the_wrong_rank_of_the_right_worker_is_named(tmp_path: Path) -> None:
    ranks = Stream("engine-0"), Stream("engine-0", dp_rank=1)
    records = [ranks[0].batch(now=START), ranks[1].batch(stored((0, PAGES)), now=START)]
    offered = Candidate("engine-0", 0, 0, 0.0), Candidate("engine-0", 1, 64, 64.0)
    records += request(1, START + 1, "engine-0", 0, offered, rank=0)
    _, found = audited(tmp_path, *records)
    assert "engine-0 rank 1 scored 64, the chosen engine-0 rank 0 0" in found["wrong rank"]


def test_ties_that_all_go_to_one_worker_are_a_fault(tmp_path: Path) -> None:
    engines = [Stream(f"engine-{number}") for number in range(3)]
    offered = [Candidate(each.id.worker, None, 0, 1.5) for each in engines]
    records = beats(*engines, seconds=range(2))
    even = [*records]
    for number in range(30):
        records += request(number, START + 1, "engine-0", 0, offered)
        even += request(number, START + 1, f"engine-{number % 3}", 0, offered)
    _, found = audited(tmp_path / "one", *records)
    assert "30 requests had several workers with the same best score, and all of them went to engine-0" in found["ties"]
    assert "ties" not in audited(tmp_path / "even", *even)[1]


def test_a_router_clock_that_is_behind_is_measured(tmp_path: Path) -> None:
    engine = Stream("engine-0")
    records = [engine.batch(now=START), engine.batch(stored((0, PAGES)), now=START + 10)]
    for number in range(4):
        records += request(number, START + 7, "engine-0", 64, [Candidate("engine-0", None, 64, 64.0)])
    report, found = audited(tmp_path, *records)
    assert report.funnel is not None
    assert (report.funnel.held_by_chosen, report.funnel.predicted, report.funnel.delivered) == (0, 256, 256)
    assert "4 requests reused pages that were stored 3.0 s after the choice" in found["router's clock"]


def test_what_a_bridge_reports_is_counted(tmp_path: Path) -> None:
    """One engine lost batches on the way to its bridge, one is not heard, one is sound."""
    lossy, dead, sound = Stream("lossy"), Stream("dead"), Stream("sound")
    records = beats(lossy, dead, sound, seconds=range(3))
    for second in range(3, 13):
        lost = f"batches lost: {second - 2}"
        records.append(lossy.batch(now=START + second, degraded_reason=lost))
        records.append(dead.batch(now=START + second, degraded_reason="engine not heard"))
        records.append(sound.batch(now=START + second))
    report, found = audited(tmp_path, *records)
    by_worker = {each.worker: each for each in report.streams}
    assert (by_worker["lossy"].lost_batches, by_worker["lossy"].not_live_s) == (10, 9.0)
    assert (by_worker["dead"].lost_batches, by_worker["dead"].not_live_s) == (0, 9.0)
    assert by_worker["sound"].not_live_s == 0.0
    assert '"batches lost" (10 batches) for 9.0 s. The first is default/m/lossy/0' in found["batches lost"]
    assert '1 of 3 streams reported "engine not heard" for 9.0 s' in found["engine not heard"]
    assert "2023-11-14T22:13:23.000Z" in found["engine not heard"]
    series = AuditCurves()
    audit_log(tmp_path, series=series)
    assert {(mark.stream, mark.kind) for mark in series.marks} == {
        ("default/m/lossy/0", "stale"), ("default/m/dead/0", "stale"),
    }  # fmt: skip


def test_the_streams_that_restarted_are_named(tmp_path: Path) -> None:
    calm, restless = Stream("calm"), Stream("restless")
    records = beats(calm, restless, seconds=range(2))
    for second in range(2, 5):
        restless.restart()
        records += beats(calm, restless, seconds=range(second, second + 1))
    _, found = audited(tmp_path, *records)
    assert found["restart"] == "1 stream restarted, and lost their pages: default/m/restless/0 3 times"


def test_a_stream_whose_engine_is_heard_at_once_has_no_fault(tmp_path: Path) -> None:
    engine = Stream("w")
    records = [engine.batch(now=START, degraded_reason="engine not heard"), engine.batch(stored((0, [1])), now=START)]
    report = audit_log(write_log(tmp_path, [*records, engine.batch(now=START + 10)]))
    assert [each.text for each in report.findings if each.kind == "engine not heard"] == []


@pytest.mark.parametrize(("reasons", "times"), [(["engine not heard"] * 2, 0), (["engine not heard", ""], 1)])
def test_an_engine_that_is_not_heard_again_has_not_restarted(tmp_path: Path, reasons: list[str], times: int) -> None:
    """A bridge gives up the pages of an engine that it misses: it begins an epoch without them."""
    dead = Stream("dead")
    records = [dead.batch(stored((0, [1]))), dead.batch(now=START, degraded_reason="engine not heard")]
    dead.restart()
    records += [dead.batch(now=START + number, degraded_reason=each) for number, each in enumerate(reasons, 1)]
    report, found = audited(tmp_path, *records)
    assert ("restart" in found, report.streams[0].restarts) == (times > 0, times)
    series = AuditCurves()
    audit_log(tmp_path, series=series)
    assert sum(mark.kind == RESTART for mark in series.marks) == times


def test_a_reason_that_comes_and_goes_counts_its_batches_again(tmp_path: Path) -> None:
    engine, lost = Stream("w"), "batches lost: {}".format
    reasons = enumerate(("", lost(3), "engine not heard", lost(3), lost(5), "", lost(2)))
    report, _ = audited(tmp_path, *(engine.batch(now=START + at, degraded_reason=reason) for at, reason in reasons))
    (stream,) = report.streams
    assert (stream.engine_losses, stream.degraded["batches lost"].times, stream.not_live_s) == (7, 3, 4.0)
