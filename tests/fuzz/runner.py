"""One decoder against many inputs, with a bound on the memory that each of them may allocate."""

import os
import resource
import sys
import time
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.mutation import near
from tests.fuzz.targets import Target, targets

BASE_BYTES = 24 * 2**20
"""Memory that any input may allocate, regardless of its size: tables, index arrays."""
BYTES_PER_BYTE = 2048
"""Additional memory for each byte of the input."""

_ROUND = 500
_GROWTH_MIB = 64


def check(target: Target, examples: int, number: int, last_input: Path | None = None) -> None:
    """Run a target on a number of inputs. Raises the target's unexpected error after minimising the input.

    number: seed of the inputs. last_input: file to which each input is written before the run, in case it ends the
    process.
    """

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(near(target.examples))
    def try_input(data: bytes) -> None:
        if last_input is not None:
            last_input.write_bytes(data)
        within_bounds(target.run, data)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Generating overly large repr")  # before it was minimised
        try_input()


def within_bounds(run: Callable[[bytes], None], data: bytes) -> None:
    """Run the target. Raises AssertionError if it allocated more memory than its input justifies."""
    tracemalloc.start()  # not earlier: it slows down all that allocates, and hypothesis does most of that
    try:
        run(data)
        _, taken = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    bound = BASE_BYTES + BYTES_PER_BYTE * len(data)
    assert taken <= bound, f"{len(data)} bytes of input took {taken} bytes of memory, more than {bound}"


def fuzz(name: str, seconds: float, last_input: Path) -> None:
    """Run a target repeatedly. Ends the process with a message if its memory keeps growing."""
    target = targets()[name]
    check(target, _ROUND, 0, last_input)
    settled = _peak_mib()
    began, rounds = time.monotonic(), 1
    while time.monotonic() - began < seconds:
        check(target, _ROUND, rounds + 1000 * os.getpid(), last_input)
        rounds += 1
    grown = _peak_mib() - settled
    print(f"{name}: {rounds * _ROUND} inputs, peak memory grew by {grown:.0f} MiB", flush=True)
    if grown > _GROWTH_MIB:
        sys.exit(f"{name}: more than {_GROWTH_MIB} MiB after the first {_ROUND} inputs")


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
