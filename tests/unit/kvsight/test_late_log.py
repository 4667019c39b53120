"""Commands on a log whose oldest files are deleted, with and without the key frame at its first record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvsight.cli.main import app
from tests.support.log.late_log import write_late_log
from tests.support.log.records import Stream, stored

PROMPT = list(range(1, 21))
WORKERS = ("w-0", "w-1")


@pytest.fixture
def late(tmp_path: Path) -> Path:
    """Two workers store a prompt page by page. The first half of the records is deleted."""
    streams = [Stream(name) for name in WORKERS]
    records = [
        stream.batch(stored((page - 1, [page])), now=1_700_000_000.0 + page) for page in PROMPT for stream in streams
    ]
    write_late_log(tmp_path / "log", records, len(PROMPT))
    (tmp_path / "prompt.json").write_text(json.dumps({"model_name": "m", "seq_hashes": [*PROMPT, 999]}))
    return tmp_path / "log"


def kvsight(*words: object) -> Result:
    return CliRunner().invoke(app, list(map(str, words)))


def explained(log: Path, rc: int = 0) -> tuple[list[dict[str, Any]], str]:
    done = kvsight("explain", log, "--prompt", log.parent / "prompt.json", "--json")
    assert done.exit_code == rc, done.output
    return json.loads(done.stdout)["workers"], done.stderr


def audited(log: Path, rc: int = 0) -> dict[str, Any]:
    done = kvsight("audit", log, "--json")
    assert done.exit_code == rc, done.output
    return dict(json.loads(done.stdout))


def test_explain_and_audit_agree_with_a_replay(late: Path) -> None:
    views = json.loads(kvsight("replay", late, "--json").stdout)
    assert [(view["worker"], view["state"], view["GPU"]) for view in views] == [(name, "live", 20) for name in WORKERS]
    workers, said = explained(late)
    assert "begins late" not in said
    assert [(each["state"], each["held"]["gpu"], each["cause"]) for each in workers] == [
        ("live", 20, "never_stored")
    ] * 2
    assert "was not held when the log begins, nor stored since" in workers[0]["findings"][0]["text"]
    report = audited(late)
    assert report["verdict"] == "No fault found: 2 streams, every batch arrived, every digest matches."
    assert [(each["gaps"], each["digest_mismatches"], each["pages_held"]) for each in report["streams"]] == [
        (0, 0, 20)
    ] * 2
    assert report["pages"]["stored"] == [20, 0, 0, 0]
    assert report["orphans"] == 0
    assert [(each["pages"], each["stores"], each["workers"]) for each in report["hottest"]] == [(20, 2, 2)]


def test_without_the_key_frame_one_line_says_that_the_log_begins_late(late: Path) -> None:
    (frame,) = late.glob(f"{len(PROMPT):020d}.kvframe")
    frame.unlink()
    for words in (
        ("replay", late),
        ("replay", late, "--at", len(PROMPT) + 2, "--diff", late),
        ("explain", late, "--prompt", late.parent / "prompt.json"),
    ):
        done = kvsight(*words)
        lines = [line for line in done.stderr.splitlines() if "begins late" in line]
        assert lines == list(dict.fromkeys(lines)) != [], done.output
        assert "the records before 20 are deleted" in lines[0]
    workers, _ = explained(late)
    assert [each["cause"] for each in workers] == ["before_the_log"] * 2
    report = audited(late)
    assert [each["kind"] for each in report["findings"]] == ["before the log"]
    assert [(each["gaps"], each["digest_mismatches"]) for each in report["streams"]] == [(0, 0)] * 2


def test_a_key_frame_that_cannot_be_used_is_named_with_exit_code_1(late: Path) -> None:
    (frame,) = late.glob(f"{len(PROMPT):020d}.kvframe")
    frame.write_bytes(frame.read_bytes()[:-1])
    workers, said = explained(late, rc=1)
    assert [each["cause"] for each in workers] == ["before_the_log"] * 2
    assert f"damaged: {frame}" in said
    assert "begins late" in said
    assert str(frame) in audited(late, rc=1)["damage"][0]
