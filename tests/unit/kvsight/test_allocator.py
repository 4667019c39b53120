"""A long-running command keeps freed memory for reuse."""

from __future__ import annotations

import subprocess
import sys

ROUNDS = 20
PROGRAM = f"""
import resource, sys
from kvsight.cli.shared.process import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
for round in range({ROUNDS} + 1):
    if round == 1:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    buffers = [b"x" * 2**22 for _ in range(6)]
    del buffers
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    """Return the page faults of a process that uses 24 MiB repeatedly, without those of the first use."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], check=True, capture_output=True, text=True)
    return int(done.stdout)


def test_buffers_that_are_used_again_are_not_zeroed_again() -> None:
    pages_a_round = 6 * 2**22 // 4096
    assert page_faults("keep") < pages_a_round
    assert page_faults("give back") > ROUNDS * pages_a_round / 2
