"""Compiled kernels are kept where that is possible, used where they cannot be written, and compiled once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

ROOT = Path(__file__).parents[3]
_ENTRY = """
from numba import types
from kv_events.kernels.declare import array_kernel
@array_kernel(types.int64, types.int64)
def double(number):
    return 2 * number
@array_kernel(types.int64, types.int64)
def triple(number):
    return 3 * number
"""
_RUN = """
from entry import double, triple
print(double(1), triple(1), *[sum(each.stats.cache_hits.values()) for each in (double, triple)])
"""
# may read what only root can read, such as an interpreter in root's home folder, but not write
_AS_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
_AS_NOBODY += ["--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search"]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of another user")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user can read, with a module of two kernels."""
    with TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        (Path(name) / "entry.py").write_text(_ENTRY)
        yield Path(name)


def start(
    folder: Path, program: str = _RUN, *, user: list[str] | None = None, **variables: str
) -> subprocess.Popen[str]:
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{folder}:{ROOT}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "NUMBA_CACHE_DIR": str(folder / "cache"),
        **variables,
    }
    command = [*(user or []), sys.executable, "-c", program]
    return subprocess.Popen(
        command, env=environment, cwd="/", text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def ended(process: subprocess.Popen[str]) -> tuple[list[str], list[str]]:
    """Return the words of stdout and the lines of stderr."""
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return out.split(), err.splitlines()


def test_the_first_start_says_once_what_it_does_and_where_and_the_next_nothing(folder: Path) -> None:
    words, lines = ended(start(folder))
    assert words == ["2", "3", "0", "0"]
    [line] = lines
    assert "compiling kernels" in line
    assert "30 s" in line
    assert str(folder / "cache") in line
    assert ended(start(folder)) == (["2", "3", "1", "1"], [])


@needs_root
def test_a_compiled_cache_that_cannot_be_written_is_used_as_it_is(folder: Path) -> None:
    ended(start(folder))
    for path in [folder / "cache", *(folder / "cache").rglob("*")]:
        path.chmod(path.stat().st_mode & ~0o222 | 0o444)
    assert ended(start(folder, user=_AS_NOBODY)) == (["2", "3", "1", "1"], [])


@needs_root
@pytest.mark.parametrize("named", ["", "/", "{folder}/cache"], ids=["no home", "read-only", "without kernels"])
def test_without_a_place_to_write_kernels_are_compiled_in_memory_after_one_line(folder: Path, named: str) -> None:
    (folder / "cache").mkdir()
    for _ in range(2):
        words, lines = ended(start(folder, user=_AS_NOBODY, NUMBA_CACHE_DIR=named.format(folder=folder)))
        assert words == ["2", "3", "0", "0"]
        [line] = lines
        assert "in memory at each start" in line
        assert "NUMBA_CACHE_DIR" in line


def test_processes_that_start_at_once_compile_each_kernel_once(folder: Path) -> None:
    hits = [ended(process)[0][2:] for process in [start(folder) for _ in range(3)]]
    assert [sorted(each) for each in zip(*hits, strict=True)] == [["0", "1", "1"]] * 2


def test_locks_of_processes_that_were_killed_do_no_harm(folder: Path) -> None:
    program = """
import os, signal
from kv_events.kernels import numba_internals
numba_internals.KernelCode.compile = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
import entry
"""
    process = start(folder, program)
    process.communicate(timeout=100)
    assert process.returncode == -9
    assert [*folder.rglob("*.lock")]
    assert ended(start(folder))[0] == ["2", "3", "0", "0"]


def test_a_helper_compiles_what_its_starter_then_loads(folder: Path) -> None:
    ended(start(folder, "from kv_events.kernels import load; load.help_compile(('entry',), 0, 1)"))
    assert ended(start(folder)) == (["2", "3", "1", "1"], [])


def test_a_program_whose_kernels_are_compiled_in_parallel_leaves_no_process(folder: Path) -> None:
    program = f"""
import psutil
from kv_events.kernels import load
with load.compiled_in_parallel("entry"):
    import entry
assert not psutil.Process().children()
{_RUN}"""
    assert ended(start(folder, program))[0][:2] == ["2", "3"]
    assert ended(start(folder)) == (["2", "3", "1", "1"], [])


def test_modules_can_be_imported_before_their_kernels_are_compiled(folder: Path) -> None:
    program = f"""
import sys
from kv_events.kernels import load
compile_all = load.import_without_kernels("entry")
assert "entry" in sys.modules and not load.has_compiled()
compile_all()
assert load.has_compiled()
{_RUN}"""
    assert ended(start(folder, program))[0] == ["2", "3", "0", "0"]
    assert ended(start(folder)) == (["2", "3", "1", "1"], [])
