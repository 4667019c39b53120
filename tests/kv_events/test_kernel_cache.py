"""Kernels are compiled once, kept where that is possible, and compiled again when a function that they call changes."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

ROOT = Path(__file__).parents[2]
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
COMPILED, LOADED = ["2", "3", "0", "0"], ["2", "3", "1", "1"]
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


def words_of(folder: Path, module: str) -> list[str]:
    """Return what a module prints."""
    return ended(start(folder, f"import {module}"))[0]


def test_the_first_start_says_once_what_it_does_and_where_and_the_next_nothing(folder: Path) -> None:
    words, lines = ended(start(folder, NUMBA_CACHE_DIR="", XDG_CACHE_HOME=str(folder / "home")))
    assert words == COMPILED
    [line] = lines
    assert "compiling kernels" in line
    assert "30 s" in line
    assert str(folder / "home/kvsight/kernels") in line
    assert ended(start(folder, NUMBA_CACHE_DIR="", XDG_CACHE_HOME=str(folder / "home"))) == (LOADED, [])


@needs_root
def test_a_compiled_cache_that_cannot_be_written_is_used_as_it_is(folder: Path) -> None:
    ended(start(folder))
    for path in [folder / "cache", *(folder / "cache").rglob("*")]:
        path.chmod(path.stat().st_mode & ~0o222 | 0o444)
    assert ended(start(folder, user=_AS_NOBODY)) == (LOADED, [])


@needs_root
@pytest.mark.parametrize("named", ["", "/", "{folder}/cache"], ids=["no home", "read-only", "without kernels"])
def test_without_a_place_to_write_kernels_are_compiled_in_memory_after_one_line(folder: Path, named: str) -> None:
    (folder / "cache").mkdir()
    for _ in range(2):
        words, lines = ended(start(folder, user=_AS_NOBODY, NUMBA_CACHE_DIR=named.format(folder=folder)))
        assert words == COMPILED
        [line] = lines
        assert "in memory at each start" in line
        assert "NUMBA_CACHE_DIR" in line


def test_processes_that_start_at_once_compile_each_kernel_once(folder: Path) -> None:
    hits = [ended(process)[0][2:] for process in [start(folder) for _ in range(3)]]
    assert [sorted(each) for each in zip(*hits, strict=True)] == [["0", "1", "1"]] * 2


def test_locks_of_processes_that_were_killed_do_no_harm(folder: Path) -> None:
    program = """
import os, signal
from kv_events.kernels import load
load.KernelCode.compile = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
import entry
"""
    process = start(folder, program)
    process.communicate(timeout=100)
    assert process.returncode == -9
    assert [*folder.rglob("*.lock")]
    assert ended(start(folder))[0] == COMPILED


def test_a_helper_compiles_what_its_starter_then_loads(folder: Path) -> None:
    ended(start(folder, "from kv_events.kernels import load; load.help_compile(('entry',), 0, 1)"))
    assert ended(start(folder)) == (LOADED, [])


def test_modules_are_imported_before_their_kernels_are_compiled_in_parallel_and_no_process_is_left(
    folder: Path,
) -> None:
    program = f"""
import psutil, sys
from kv_events.kernels import load
compile_all = load.import_without_kernels("entry")
assert "entry" in sys.modules and not load.has_compiled()
compile_all()
assert load.has_compiled()
assert not psutil.Process().children()
{_RUN}"""
    assert ended(start(folder, program))[0][:2] == ["2", "3"]
    assert ended(start(folder)) == (LOADED, [])


_CALLEE = """
from kv_events.kernels.declare import array_function
@array_function
def answer():
    return {}
"""
_CALLER = """
from numba import types
from {} import answer
from kv_events.kernels.declare import array_kernel
@array_kernel(types.int64)
def ask():
    return answer()
print(ask(), sum(ask.stats.cache_hits.values()))
"""


def write_package(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "__init__.py").touch()
    return folder


@pytest.mark.parametrize(
    ("caller", "callee"),
    [("caller", "callee"), ("outer.inner.caller", "outer.callee"), ("ours.caller", "theirs.callee")],
    ids=["in one folder", "in the package around it", "in another package"],
)
def test_a_kernel_is_loaded_until_a_function_that_it_calls_changes(tmp_path: Path, caller: str, callee: str) -> None:
    for module, text in ((caller, _CALLER.format(callee)), (callee, _CALLEE.format(41))):
        path = tmp_path.joinpath(*module.split("."))
        for package in path.relative_to(tmp_path).parents[:-1]:
            write_package(tmp_path / package)
        path.with_suffix(".py").write_text(text)
    assert words_of(tmp_path, caller) == ["41", "0"]
    assert words_of(tmp_path, caller) == ["41", "1"]
    tmp_path.joinpath(*callee.split(".")).with_suffix(".py").write_text(_CALLEE.format(42))
    assert words_of(tmp_path, caller) == ["42", "0"]


def test_a_kernel_is_compiled_again_when_its_module_has_moved(tmp_path: Path) -> None:
    (tmp_path / "callee.py").write_text(_CALLEE.format(41))
    for name in ("old", "new"):
        package = write_package(tmp_path / name)
        (package / "caller.py").write_text(_CALLER.format("callee"))
        assert words_of(tmp_path, f"{name}.caller") == ["41", "0"]
        shutil.rmtree(package)


_MADE = """
from numba import types
from kv_events.kernels.declare import array_kernel
def make(is_negative):
    @array_kernel(types.int64, types.int64)
    def signed(number):
        return -number if is_negative else number
    return signed
for kernel in [make(False), make(True)]:
    print(kernel(7), sum(kernel.stats.cache_hits.values()))
"""


def test_kernels_that_differ_by_a_constant_are_kept_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(_MADE)
    assert words_of(tmp_path, "made") == ["7", "0", "-7", "0"]
    assert words_of(tmp_path, "made") == ["7", "1", "-7", "1"]


_BUNDLED = """
from typing import NamedTuple
import numpy as np
from numba import types
from kv_events.kernels.bundles import U64Vector, pin
from kv_events.kernels.declare import array_kernel
class {name}(NamedTuple):
    words: U64Vector
@array_kernel(types.uint64, {name})
def first(bundle):
    return bundle.words[0]
print(first(pin({name}(np.array([{value}], np.uint64)))))
"""


def test_kernels_are_loaded_without_the_modules_of_other_kernels(tmp_path: Path) -> None:
    for name, value in (("one", "1"), ("two", "2")):
        (tmp_path / f"{name}.py").write_text(_BUNDLED.format(name=name.title(), value=value))
        assert words_of(tmp_path, name) == [value]
        (tmp_path / f"{name}.py").unlink()
