"""A chaos run: `python -m tests.chaos [--minutes 10] [--seed 1] [NAME ...]`. Exit status 1 if a promise was broken."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import msgspec

import tests.chaos.log_faults
from tests.chaos.faults import FAULTS
from tests.chaos.report import plain_table, summary
from tests.chaos.run import Outcome, run

_OUTPUT = Path("build/chaos")

assert tests.chaos.log_faults  # fills the table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one")
    parser.add_argument("--times", type=int, default=None, help="injections at most")
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to draw from; parts of names. Default: all")
    arguments = parser.parse_args()
    seed = int(time.time()) % 10**6 if arguments.seed is None else arguments.seed
    names = [name for name in FAULTS if not arguments.names or any(part in name for part in arguments.names)]
    if not names:
        parser.error(f"no fault is named so; there are: {', '.join(FAULTS)}")
    folder = Path(tempfile.mkdtemp(prefix=f"kvsight-chaos-{seed}-"))
    print(f"seed {seed}, logs in {folder}", flush=True)
    report = run(folder, seed, arguments.minutes, names, show, arguments.times)
    _OUTPUT.mkdir(parents=True, exist_ok=True)
    file = _OUTPUT / f"{seed}.json"
    file.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    print(f"\n{plain_table([report])}\n\n{summary(report)}\nwritten to {file}")
    if not report.is_right:
        again = " ".join(["python -m tests.chaos", f"--seed {seed}", *(f"'{part}'" for part in arguments.names)])
        sys.exit(f"a promise was broken; again: {again} --minutes {arguments.minutes:g}")


def show(outcome: Outcome) -> None:
    converged = "never right" if outcome.converged_s is None else f"right after {outcome.converged_s:.1f} s"
    line = f"{outcome.number:3} {' + '.join(outcome.faults):60} {converged}, {outcome.resent_pages:,} pages again"
    line += f", worst answer {outcome.worst_s * 1000:.0f} ms, load {outcome.load:.1f}"
    if not outcome.is_right:
        line += f"  FAILED: {outcome.errors} errors, {outcome.divergent_pages} divergent pages, {outcome.lies} lies"
    print("\n    ".join([line, *outcome.details]), flush=True)


if __name__ == "__main__":
    main()
