"""`kvsight replay --diff`: pages gained, lost and moved between two moments, two logs, or a log and a service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from analysis.diff import diff, holdings_of, holdings_of_dump
from indexer.replay import Timeline
from kv_events.errors import InvalidValueError
from kv_events.log.event_log import EventLogWriter
from kvsight.cli.main import app
from tests.support.log.records import Stream, removed, stored


def kvsight(*words: object) -> Result:
    return CliRunner().invoke(app, list(map(str, words)))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    streams = [Stream("engine-2"), Stream("engine-10")]
    with EventLogWriter(tmp_path / "run.log") as writer:
        writer.append(streams[0].batch(stored((0, [1, 2, 3])), stored((0, [2]), tier=1), now=1000))
        writer.append(streams[1].batch(stored((0, [1, 2])), now=1001))
        writer.append(streams[0].batch(removed([1, 2]), stored((0, [7, 8])), now=1002))
    return tmp_path / "run.log"


def test_two_moments_of_a_log_differ_by_pages_gained_lost_and_moved(log: Path) -> None:
    found = json.loads(kvsight("replay", log, "--at", 2, "--diff", log, "--json").stdout)
    changed = next(each for each in found if each["worker"] == "engine-2")
    assert (changed["before"], changed["after"]) == (3, 4)
    assert (changed["gained"], changed["lost"], changed["moved"]) == (2, 1, 1)
    assert (changed["gained_examples"], changed["lost_examples"]) == ([7, 8], [1])
    moved = {"sequence_hash": 2, "before": ["GPU", "CPU_PINNED"], "after": ["CPU_PINNED"]}
    assert changed["moved_examples"] == [moved]


def test_the_table_shows_the_workers_that_differ_with_examples(log: Path) -> None:
    done = kvsight("replay", log, "--at", 2, "--diff", log)
    assert done.stdout.splitlines() == [
        "worker    before  after  gained  lost  moved",
        "engine-2       3      4       2     1      1",
        "1 worker stream without a difference",
        "engine-2 gained, for example: 7, 8",
        "engine-2 lost, for example: 1",
        "engine-2 moved, for example: 2 (gpu+cpu -> cpu)",
    ]
    assert "after 2 records" in done.stderr
    assert kvsight("replay", log, "--diff", log).stdout == "no difference\n"


def test_two_logs_differ_by_the_workers_that_one_lacks(log: Path, tmp_path: Path) -> None:
    assert kvsight("log", "slice", log, tmp_path / "one", "--worker", "engine-2").exit_code == 0
    found = json.loads(kvsight("replay", tmp_path / "one", "--diff", log, "--json").stdout)
    assert [(each["worker"], each["gained"], each["lost"]) for each in found] == [
        ("engine-10", 2, 0),
        ("engine-2", 0, 0),
    ]


def test_a_dump_of_several_block_sizes_has_the_names_of_its_streams(log: Path) -> None:
    def part(block_size: int, worker: str, page: int, tier: str) -> dict[str, Any]:
        stored = {"parent_hash": None, "blocks": [{"block_hash": page}]}
        event = {"event_id": 0, "data": {"stored": stored}, "dp_rank": 0}
        return {"block_size": block_size, "events": [{"worker_id": worker, "storage_tier": tier, "event": event}]}

    dump = {"m:default:4": part(4, "engine-10", 1, "device"), "m:default:16": part(16, "x", 2**64 - 1, "disk")}
    found = diff(holdings_of(Timeline(log).at()), holdings_of_dump(dump))
    assert [(each.worker, each.gained, each.lost) for each in found] == [
        ("engine-10", 0, 1),
        ("engine-2", 0, 4),
        ("x", 1, 0),
    ]
    assert {(each.model, each.tenant) for each in found} == {("m", "default")}
    with pytest.raises(InvalidValueError, match="GET /dump"):
        holdings_of_dump({"m:default": {"block_size": 4, "events": [{}]}})
