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


def one_line(result: Result) -> str:
    """The message of a command that failed because of its input."""
    assert result.stdout == ""
    assert result.exception is not None
    return str(result.exception)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--at", "@1"], "is before the start of the log"),
        (["--at", "@4000000000"], "is behind the end of the log"),
        (["--at", "999999"], "is behind the end of the log"),
        (["--at", "yesterday"], "--at: got"),
        (
            ["--worker", "nobody"],
            "worker 'nobody' is not in the log; model 'model-a', tenant 'default' has ",
        ),
    ],
)
def test_what_does_not_fit_the_log_is_one_line(change: list[str], message: str, tmp_path: Path) -> None:
    scene, _ = planted("held", 201)
    assert message in one_line(run(*written(tmp_path, scene), *change))


def test_a_prompt_that_fits_no_namespace_is_one_line(tmp_path: Path) -> None:
    scene, _ = planted("held", 202)
    scene.body = {"model_name": "other", "token_ids": [1, 2, 3]}
    message = one_line(run(*written(tmp_path, scene)))
    assert "no worker of the log serves model 'other', tenant 'default'; it has model 'model-a'" in message
    assert "\n" not in message


@pytest.mark.parametrize("body", ["[1, 2", '{"model_name": "m"}', '{"model_name": "m", "token_ids": ["x"]}', "[]"])
def test_a_file_that_is_no_query_is_one_line(body: str, tmp_path: Path) -> None:
    arguments = written(tmp_path, planted("held", 203)[0])
    (tmp_path / "prompt.json").write_text(body)
    assert "\n" not in one_line(run(*arguments))


def test_a_log_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "prompt.json").write_text('{"model_name": "m", "token_ids": [1]}')
    assert "no such folder" in one_line(run("explain", "/no/such.log", "--prompt", str(tmp_path / "prompt.json")))
    message = one_line(run("explain", "--prompt", str(tmp_path / "prompt.json")))
    assert message == "give the folder of an event log, or --kafka HOST:PORT"


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
