"""The long run: `python -m tests.fuzz [--minutes 10] [NAME ...]`. Each decoder runs in its own process."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from pathlib import Path

from tests.fuzz.runner import fuzz
from tests.fuzz.targets import targets


def main() -> None:
    """Run the named targets, or all. Exit status 1 if any of them failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="all decoders together")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(targets())}")
    arguments = parser.parse_args()
    names = arguments.names or list(targets())
    folder = Path(tempfile.mkdtemp(prefix="kvsight-fuzz-"))
    failed = []
    for name in names:
        last_input = folder / name.replace(" ", "-")
        seconds = 60 * arguments.minutes / len(names)
        process = multiprocessing.get_context("spawn").Process(target=fuzz, args=(name, seconds, last_input))
        process.start()
        process.join()
        if process.exitcode:
            failed.append(name)
            print(f"{name}: ended with {process.exitcode}; its last input is {last_input}", flush=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
