"""Marks of a log: what a publisher says about its engine, and the changes of a worker stream."""

from pathlib import Path

from analysis.markers import search
from indexer.replay import Timeline
from tests.support.log.late_log import write_log
from tests.support.log.records import Stream, stored

START = 1_700_000_000.0
REASONS = ["", "", "batches lost: 1", "batches lost: 4", "engine not heard", "engine not heard"]


def test_a_degraded_reason_is_one_mark_and_a_new_epoch_in_silence_is_no_restart(tmp_path: Path) -> None:
    """A bridge that does not hear its engine for long begins an epoch without pages."""
    engine = Stream("w")
    records = [engine.batch(stored((0, [1])), now=START)]
    records += [engine.batch(now=START + second, degraded_reason=reason) for second, reason in enumerate(REASONS, 1)]
    engine.restart()
    records += [engine.batch(now=START + 7 + second, degraded_reason="engine not heard") for second in range(2)]
    (found,) = search(Timeline(write_log(tmp_path, records)), 0)
    marks = [(mark.index, mark.text) for mark in found.marks if mark.kind == "degraded"]
    assert marks == [
        (3, "w: its publisher reports: batches lost: 1."),
        (5, "w: its publisher reports: engine not heard."),
    ]
    stale = [(change.index, change.change.event, change.change.reason) for change in found.changes]
    assert stale[-1] == (3, "is stale", "batches lost: 1")
