"""The long run: `python -m tests.fuzz [--minutes 10] [NAME ...]`. Each decoder runs in its own process."""

import argparse
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.fuzz.raw_http import NAME, run_raw_http
from tests.fuzz.runner import fuzz
from tests.fuzz.targets import targets


def main() -> None:
    """Run the named targets, or all. Exit status 1 if any of them failed."""
    known = [*targets(), NAME]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="all decoders together")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(known)}")
    arguments = parser.parse_args()
    names = arguments.names or known
    folder = Path(tempfile.mkdtemp(prefix="kvsight-fuzz-"))
    failed = []
    for name in names:
        last_input = folder / name.replace(" ", "-")
        seconds = 60 * arguments.minutes / len(names)
        spawned: dict[str, Any] = {"target": fuzz, "args": (name, seconds, last_input)}
        if name == NAME:
            spawned = {"target": run_raw_http, "args": (seconds, last_input)}
        process = multiprocessing.get_context("spawn").Process(**spawned)
        process.start()
        process.join()
        if process.exitcode:
            failed.append(name)
            print(f"{name}: ended with {process.exitcode}; its last input is {last_input}", flush=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
