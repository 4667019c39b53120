"""`kvsight explain`: a table and sentences in 80 columns, JSON, and one line for what cannot be explained."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from kv_events.http.explanations import Explanation
from kv_events.log.event_log import EventLogWriter
from kv_events.log.format import list_segments
from kvsight.cli.main import app
from tests.support.log.planted_causes import VICTIM, Scene, check_truth, planted


def written(folder: Path, scene: Scene) -> list[str]:
    """The arguments that explain a scene, whose log and query are written to files."""
    with EventLogWriter(folder / "run.log") as writer:
        for record in scene.records:
            writer.append(record)
    prompt = folder / "prompt.json"
    prompt.write_text(json.dumps(scene.body))
    at = [] if scene.until is None else ["--at", f"@{scene.until.time_s}"]
    return ["explain", str(folder / "run.log"), "--prompt", str(prompt), *at]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})


@pytest.mark.parametrize("name", ["evicted", "not_known_yet", "other_block_size"])
def test_the_true_cause_is_printed(name: str, tmp_path: Path) -> None:
    scene, truth = planted(name, 200)
    arguments = written(tmp_path, scene)
    result = run(*arguments, "--json", "--worker", VICTIM)
    assert result.exit_code == 0, result.stderr
    (worker,) = msgspec.json.decode(result.stdout, type=Explanation).workers
    check_truth(worker, truth)
    table, _, sentences = run(*arguments).stdout.partition("\n\n")
    assert max(map(len, table.splitlines())) <= 80
    (row,) = (line for line in table.splitlines() if line.startswith(VICTIM))
    assert truth.cause.replace("_", " ") in row
    assert worker.findings[0].text in sentences


def test_the_sound_part_of_a_damaged_log_is_explained(tmp_path: Path) -> None:
    scene, truth = planted("evicted", 204)
    arguments = written(tmp_path, scene)
    (segment,) = list_segments(tmp_path / "run.log")
    data = bytearray(segment.path.read_bytes())
    data[100] ^= 0xFF  # inside the first record, which is noise
    segment.path.write_bytes(data)
    result = run(*arguments, "--worker", VICTIM, "--json")
    assert result.exit_code == 1
    assert "damaged: " in result.stderr
    assert msgspec.json.decode(result.stdout, type=Explanation).workers[0].cause == truth.cause
