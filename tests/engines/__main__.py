"""Compares the index with real engines: `python -m tests.engines [ROW ...]`. Exit status 1 if any request differs."""

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.report import machine
from tests.engines.engine import SglangEngine
from tests.engines.environment import SGLANG, VLLM, install, install_sglang, variables
from tests.engines.recording import Asked, AskedText, Step, write
from tests.engines.rows import ROWS, Game

_RECORDED = 100
_RECORDED_CHATS = 200
_DATA = Path("tests/data/engines")
_SHOWN = 5
_LINE = "{:<15}{:<33}{:>6}{:>8}{:>8}{:>8}"


def main() -> None:
    """Play the rows, print a line for each, and write JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.engines", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"default: all, {', '.join(ROWS)}")
    parser.add_argument("--requests", type=int, default=200, help="compared requests of each row")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--environment", type=Path, default=Path(".cache/engines"), help="where vLLM is, or is to be")
    parser.add_argument("--json", type=Path, default=Path("build/engines.json"))
    parser.add_argument("--record", action="store_true", help=f"also write the recordings in {_DATA}")
    arguments = parser.parse_args()
    if unknown := set(arguments.rows) - set(ROWS):
        parser.error(f"unknown rows {', '.join(sorted(unknown))}; there are: {', '.join(ROWS)}")
    environment = arguments.environment.absolute()
    rows = arguments.rows or list(ROWS)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends what was started, as Ctrl-C does
    install(environment)
    if any(ROWS[name].engine is SglangEngine for name in rows):
        install_sglang(environment)
    print(f"vLLM {VLLM}, SGLang {SGLANG}, seed {arguments.seed}\n")
    print(_LINE.format("row", "groups of the model", "asked", "partial", "misread", "differ"), flush=True)
    results = {}
    for name in rows:
        results[name] = played(name, arguments.requests, environment, arguments.seed, record=arguments.record)
    if arguments.record:
        command = [environment / "bin/python", "-m", "tests.engines.scheduler", _DATA]
        subprocess.run(command, check=True, env=variables(environment))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine(), "vllm": VLLM, "sglang": SGLANG, "seed": arguments.seed, "rows": results}
    arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\npartial: reused in part; misread: a slow reader of the events is wrong, too. Written: {arguments.json}")
    sys.exit(any(row["differ"] or row["misread"] or row["failure"] for row in results.values()))


def played(name: str, num_requests: int, environment: Path, seed: int, *, record: bool) -> dict[str, Any]:
    """Play a row and print its line. Returns what JSON says of it."""
    row, began, failure = ROWS[name], time.monotonic(), ""
    game = Game(row, environment, seed)
    try:
        with game:
            row.play(game, num_requests)
    except (AssertionError, httpx.HTTPError) as error:
        failure = f"{type(error).__name__}: {error}"
        print(f"{name} has failed: {failure}", flush=True)
    counts = game.num_asked, game.num_partial, game.num_misread, len(game.differences)
    print(_LINE.format(name, row.model.words, *counts), flush=True)
    for each in game.differences[:_SHOWN]:
        words = f"engine {each.worker} reused {each.reused} of {each.prompt_tokens} tokens"
        print(f"    request {each.number}: {words}, the index says {each.score}", flush=True)
    if record and not failure:
        write(
            _DATA / f"server-{name}.rec",
            game.header,
            beginning(game.steps, _RECORDED_CHATS if name == "chats" else _RECORDED),
        )
    figures = dict(zip(("asked", "partial", "misread", "differ"), counts, strict=True))
    seconds = round(time.monotonic() - began)
    return {
        **figures,
        "failure": failure,
        "seconds": seconds,
        "differences": [each._asdict() for each in game.differences],
    }


def beginning(steps: list[Step], num_requests: int) -> list[Step]:
    """Return the steps up to a request."""
    asked = [number for number, step in enumerate(steps) if isinstance(step, Asked | AskedText)]
    return steps[: asked[min(num_requests, len(asked)) - 1] + 1]


if __name__ == "__main__":
    main()
