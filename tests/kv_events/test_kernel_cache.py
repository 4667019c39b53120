"""Kernels are compiled once for all commands, kept where that is possible, and compiled again when a source changes."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
_ENTRY = """
from kv_events.kernels.declare import kernel
from kv_events.kernels.factor import factor
@kernel
def double(number: int) -> int:
    return 2 * number
@kernel
def multiply(number: int) -> int:
    return factor() * number
"""
_FACTOR = """
from kv_events.kernels.declare import helper
@helper
def factor() -> int:
    return {}
"""
_CALL = """
from kv_events.kernels.entry import double, multiply
print(double(1), multiply(1), *[sum(each.stats.cache_hits.values()) for each in (double, multiply)])
"""
_LOAD = f"from kv_events.kernels import entry, load; load.load(){_CALL}"
COMPILED, LOADED = ["2", "3", "0", "0"], ["2", "3", "1", "1"]
# may read what only root can read, such as an interpreter in root's home folder, but not write
_AS_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
_AS_NOBODY += ["--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search"]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of another user")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A project with two kernels, in a folder that every user can read."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        room = folder / "kv_events/kernels"
        room.mkdir(parents=True)
        (folder / "kv_events/__init__.py").touch()
        for module in ("__init__", "bundles", "declare", "instructions", "load", "numba_parts", "numbers"):
            shutil.copy(ROOT / f"kv_events/kernels/{module}.py", room)
        (room / "entry.py").write_text(_ENTRY)
        (room / "factor.py").write_text(_FACTOR.format(3))
        yield folder


def start(folder: Path, program: str, *, user: list[str] | None = None, **variables: str) -> subprocess.Popen[str]:
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(folder),
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


@pytest.mark.parametrize(("program", "first"), [(_CALL, COMPILED), (_LOAD, LOADED)], ids=["by a call", "by `load`"])
def test_the_first_start_says_once_what_it_does_and_where_and_the_next_nothing(
    folder: Path, program: str, first: list[str]
) -> None:
    def run() -> tuple[list[str], list[str]]:
        return ended(start(folder, program, NUMBA_CACHE_DIR="", XDG_CACHE_HOME=str(folder / "home")))

    words, lines = run()
    assert words == first
    [line] = lines
    assert "compiling kernels (once for this processor" in line
    assert str(folder / "home/kvsight/kernels") in line
    assert run() == (LOADED, [])


@needs_root
def test_a_compiled_cache_that_cannot_be_written_is_used_as_it_is(folder: Path) -> None:
    ended(start(folder, _CALL))
    for path in [folder / "cache", *(folder / "cache").rglob("*")]:
        path.chmod(path.stat().st_mode & ~0o222 | 0o444)
    assert ended(start(folder, _LOAD, user=_AS_NOBODY)) == (LOADED, [])


@needs_root
@pytest.mark.parametrize("named", ["", "/", "{folder}/cache"], ids=["no home", "read-only", "without kernels"])
def test_without_a_place_to_write_kernels_are_compiled_in_memory_after_one_line(folder: Path, named: str) -> None:
    (folder / "cache").mkdir()
    program = f"{_LOAD}print(load.progress())"
    words, lines = ended(start(folder, program, user=_AS_NOBODY, NUMBA_CACHE_DIR=named.format(folder=folder)))
    assert words == [*COMPILED, "compiling", "kernels:", "2", "of", "2"]
    [line] = lines
    assert "in memory at each start" in line
    assert "NUMBA_CACHE_DIR" in line


def test_kernels_are_loaded_without_what_only_a_compilation_needs_which_may_follow(folder: Path) -> None:
    ended(start(folder, _CALL))
    program = f"""{_CALL}
import sys
from numba import njit
print("numba.np.npyimpl" in sys.modules)
(kept,) = multiply.overloads.values()
(code,) = [each for each in kept.library._shared_module.functions if each.name == kept.fndesc.llvm_cpython_wrapper_name]
print([each.opcode for block in code.blocks for each in block.instructions])
print(njit(lambda number: number**0.5)(4.0), double(True), multiply(2))
"""
    words, _ = ended(start(folder, program))
    assert words == [*LOADED, "False", "['ret']", "2.0", "2", "6"], "numba fills tables that only compiling needs"


@pytest.mark.parametrize(
    ("kind", "damage"), [*product(["nbi", "nbc"], ["empty", "cut", "zeros"]), ("nbc", "zeros in the machine code")]
)
def test_damaged_files_are_compiled_again_as_missing_ones_are(folder: Path, kind: str, damage: str) -> None:
    ended(start(folder, _LOAD))
    for path in (folder / "cache").rglob(f"*.{kind}"):
        data = path.read_bytes()
        damaged = {"empty": b"", "cut": data[: len(data) // 2], "zeros": bytes(len(data))}
        path.write_bytes(damaged.get(damage, data.replace(b"\x7fELF", bytes(4))))
    words, lines = ended(start(folder, _LOAD))
    assert words == COMPILED
    assert len([line for line in lines if "is damaged, and is compiled" in line]) == 2
    assert ended(start(folder, _LOAD)) == (LOADED, [])


def test_threads_that_need_a_kernel_at_once_load_it_once(folder: Path) -> None:
    program = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from kv_events.kernels.entry import double
barrier = Barrier(4)
def call(number):
    barrier.wait()
    return double(number)
with ThreadPoolExecutor() as threads:
    print(*threads.map(call, range(4)))
"""
    for _ in range(2):
        assert ended(start(folder, program))[0] == ["0", "2", "4", "6"]


def test_processes_that_start_at_once_compile_each_kernel_once(folder: Path) -> None:
    hits = [ended(process)[0][2:] for process in [start(folder, _CALL) for _ in range(3)]]
    assert [sorted(each) for each in zip(*hits, strict=True)] == [["0", "1", "1"]] * 2


def test_all_kernels_are_compiled_together_with_a_count_and_none_is_left_out(folder: Path) -> None:
    program = f"""
from kv_events.kernels import load
print(load.progress(), load.is_complete(), sep=", ")
load.compile_missing()
print(load.progress(), load.is_complete(), sep=", ")
{_CALL}"""
    words, _ = ended(start(folder, program))
    counted = "compiling kernels: 0 of 2, False compiling kernels: 2 of 2, True"
    assert words == [*counted.split(), *LOADED]


def test_locks_of_processes_that_were_killed_do_no_harm(folder: Path) -> None:
    program = f"""
import os, signal
from kv_events.kernels.numba_parts import KernelDispatcher
KernelDispatcher.load = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
{_CALL}"""
    process = start(folder, program)
    process.communicate(timeout=100)
    assert process.returncode == -signal.SIGKILL
    assert [*folder.rglob("*.lock")]
    assert ended(start(folder, _CALL))[0] == COMPILED


def test_processes_that_compile_end_with_the_one_that_waits_for_them(folder: Path) -> None:
    (folder / "kv_events/kernels/endless.py").write_text("while True: pass")
    process = start(folder, "from kv_events.kernels import load; load.compile_missing()")
    parent = psutil.Process(process.pid)
    wait_until(lambda: parent.children(), 60, "a child")
    children = parent.children()
    process.kill()
    process.communicate()
    wait_until(lambda: not any(child.is_running() for child in children), 60, "the end of the children")


def test_a_kernel_is_compiled_again_when_a_function_that_it_calls_changes(folder: Path) -> None:
    assert ended(start(folder, _CALL))[0] == COMPILED
    (folder / "kv_events/kernels/factor.py").write_text(_FACTOR.format(4))
    assert ended(start(folder, _CALL))[0] == ["2", "4", "0", "0"]


def test_kernels_of_other_places_are_not_kept(folder: Path) -> None:
    (folder / "other.py").write_text(_ENTRY)
    program = _CALL.replace("kv_events.kernels.entry", "other")
    for _ in range(2):
        assert ended(start(folder, program)) == (COMPILED, [])


@pytest.mark.parametrize(("limit", "times"), [(0, 1), (4096, 2)], ids=["no room at all", "room for the index"])
def test_kernels_that_could_not_be_saved_are_compiled_and_saved_later(folder: Path, limit: int, times: int) -> None:
    (folder / "cache").mkdir()
    full = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}));"
    for _ in range(times):
        words, lines = ended(
            start(folder, f"import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); {full} {_CALL}")
        )
        assert words == COMPILED
        assert "cannot be kept" in lines[-1]
    words, lines = ended(start(folder, _LOAD))
    assert (words, len(lines)) == (LOADED, 1), "a second line would say that some are still missing"


def test_the_lock_of_another_user_keeps_nobody_from_compiling(folder: Path) -> None:
    program = f"""
from pathlib import Path
from kv_events.kernels import entry, load
for kernel in (entry.double, entry.multiply):
    kernel.keep_in(load._folder(), is_writable=True)
    load._lock_of(kernel).mkdir()
{_CALL}"""
    assert ended(start(folder, program))[0] == COMPILED
