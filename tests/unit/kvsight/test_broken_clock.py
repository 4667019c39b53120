"""Commands on a log with a record whose time no calendar has: they show the number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kv_events.log.event_log import EventLogWriter
from kv_events.log.moments import utc_text
from kv_events.runtime.words import local_time
from kvsight.cli.logs.lines import RecordLine
from kvsight.cli.main import app
from tests.support.log.records import Stream, stored

SHOWN = f"@{2**62 / 1000:g}"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    stream = Stream("w")
    with EventLogWriter(tmp_path / "log") as writer:
        for page in range(1, 5):
            record = stream.batch(stored((page - 1, [page])), now=1_700_000_000.0 + page)
            writer.append(record._replace(timestamp_ms=2**62) if page == 4 else record)
        writer.append(stream.batch(now=1_700_000_005.0))
    (tmp_path / "prompt.json").write_text(json.dumps({"model_name": "m", "seq_hashes": [1, 2, 3, 4, 999]}))
    return tmp_path / "log"


@pytest.mark.parametrize(
    "words",
    [
        "replay LOG",
        "replay LOG --at 4",
        "explain LOG --prompt PROMPT",
        "log info LOG",
        "replay LOG --at 2 --diff LOG --to 5",
    ],
)
def test_every_command_shows_the_time_as_a_number(words: str, log: Path) -> None:
    prompt = log.parent / "prompt.json"
    done = CliRunner().invoke(app, words.replace("LOG", str(log)).replace("PROMPT", str(prompt)).split())
    assert done.exit_code in (0, 1), done.output  # 1: `explain` found what is not held, and `--diff` a difference
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    assert SHOWN in done.output


@pytest.mark.parametrize("seconds", [2.0**62, -(2.0**62), 1e13, float("inf")])
def test_a_time_that_no_calendar_has_is_a_number(seconds: float) -> None:
    assert local_time(seconds) == utc_text(seconds) == f"@{seconds:g}"


def test_an_event_with_such_a_time_has_a_line() -> None:
    line = RecordLine(time_ms=2**62, kinds=("rejected",), reason="no batch").line()
    assert line.startswith(f"{SHOWN}  ")
