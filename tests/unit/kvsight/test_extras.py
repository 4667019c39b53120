"""Commands in a process that has only the base install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvsight.extras import SERVE

PACKAGES = "aiohttp, fastapi, fastapi_offline, httptools, prometheus_client, redis, uvicorn, yarl"
NEEDED = f"{PACKAGES}: pip install 'kvsight[serve]'\n"


def run_without(modules: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    """`kvsight ARGUMENTS` where these modules cannot be imported."""
    program = f"import sys; sys.modules.update(dict.fromkeys({modules!r})); from kvsight.cli.main import run; run()"
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(
    "arguments",
    [("serve",), ("demo",), ("bridge", "--metrics-port", "9"), ("replay", "folder", "--query", "prompt.json")],
)
def test_a_missing_extra_is_one_line_that_names_what_to_install(arguments: tuple[str, ...]) -> None:
    ended = run_without(SERVE, *arguments)
    command = " ".join(part for part in arguments[:2] if part not in ("9", "folder"))
    command = f"{command} --query" if "--query" in arguments else command
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", f"kvsight {command} needs {NEEDED}")


def test_a_report_names_the_extra_that_it_needs(tmp_path: Path) -> None:
    ended = run_without(("bokeh",), "audit", str(tmp_path), "--html", str(tmp_path / "report.html"))
    line = "kvsight audit --html needs bokeh: pip install 'kvsight[analysis]'\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", line)


def test_only_what_is_missing_is_named() -> None:
    ended = run_without(("uvicorn",), "serve")
    assert (ended.returncode, ended.stderr) == (2, "kvsight serve needs uvicorn: pip install 'kvsight[serve]'\n")


@pytest.mark.parametrize(
    "arguments", [("--version",), ("query", "--show-hashes", "--tokens", "1,2,3,4", "--block-size", "4"), ("--help",)]
)
def test_other_commands_need_no_extra(arguments: tuple[str, ...]) -> None:
    ended = run_without(SERVE, *arguments)
    assert (ended.returncode, ended.stderr) == (0, "")
