"""What only a process of its own shows: kept memory, missing extras."""

import pytest

from kvsight.extras import SERVE
from tests.support.programs import run_program

ROUNDS, PAGES_A_ROUND = 20, 6 * 2**22 // 4096
MEMORY = f"""
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


def printed(program: str, *arguments: str) -> str:
    """What a program prints."""
    done = run_program(program, *arguments)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def test_buffers_that_are_used_again_are_not_zeroed_again() -> None:
    """A process uses 24 MiB repeatedly. The page faults of the first use are not counted."""
    assert int(printed(MEMORY, "keep")) < PAGES_A_ROUND
    assert int(printed(MEMORY, "give back")) > ROUNDS * PAGES_A_ROUND / 2


@pytest.mark.parametrize("words", [("query", "--show-hashes", "--tokens", "1,2,3,4", "--block-size", "4"), ("--help",)])
def test_commands_of_the_base_install_need_no_extra(words: tuple[str, ...]) -> None:
    program = f"import sys; sys.modules.update(dict.fromkeys({SERVE!r})); from kvsight.cli.main import run; run()"
    assert printed(program, *words)
