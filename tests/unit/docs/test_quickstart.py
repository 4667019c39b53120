"""The program of docs/quickstart.md runs, and the query gets the answer that the page shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from typer.testing import CliRunner

from kvsight.cli.main import app

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "quickstart.md").read_text()


@pytest.fixture
def events(tmp_path: Path) -> Path:
    """The event log that the program on the page writes."""
    (program,) = re.findall(r"^ *```python\n(.*?)^ *```", PAGE, re.MULTILINE | re.DOTALL)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", dedent(program)]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, input="\n", capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "published" in ended.stdout
    return tmp_path / "events"


def test_the_query_finds_the_tokens_that_are_shown(events: Path) -> None:
    (prompt,) = re.findall(r"echo '(.*?)' \| kvsight query -", PAGE)
    (shown,) = re.findall(r"^ *engine-0 +0 +(\d+)  live", PAGE, re.MULTILINE)
    done = CliRunner().invoke(app, ["replay", str(events), "--at", "1", "--query", "-", "--json"], input=prompt)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["instances"]["engine-0"]["gpu"] == int(shown) == 16


def test_the_views_can_be_looked_at_as_they_were(events: Path) -> None:
    done = CliRunner().invoke(app, ["replay", str(events), "--at", "1", "--json"])
    assert done.exit_code == 0, done.output
    assert [view["worker"] for view in json.loads(done.stdout)] == ["engine-0"]
    assert "`kvsight replay events --at 1`" in PAGE
