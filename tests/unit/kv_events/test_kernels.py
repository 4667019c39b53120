"""Compiled kernels are cached, and recompiled when a function that they call changes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

_CALLEE = """
from kv_events.kernels.declare import array_function
@array_function
def answer():
    return {value}
"""
_ENTRY = """
from numba import types
from callee import answer
from kv_events.kernels.declare import array_kernel
@array_kernel(types.int64)
def ask():
    return answer()
print(ask(), sum(ask.stats.cache_hits.values()))
"""


def run(folder: Path, cache: Path, module: str = "entry") -> list[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(folder)}
    environment.pop("NUMBA_CACHE_DIR", None)
    command = [sys.executable, "-c", f"import {module}"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()


def test_a_kernel_is_loaded_from_disk_until_a_function_it_calls_changes(tmp_path: Path) -> None:
    folder, cache = tmp_path / "kernels", tmp_path / "cache"
    folder.mkdir()
    (folder / "entry.py").write_text(_ENTRY)
    (folder / "callee.py").write_text(_CALLEE.format(value=41))
    assert run(folder, cache) == ["41", "0"]
    assert run(folder, cache) == ["41", "1"]
    (folder / "callee.py").write_text(_CALLEE.format(value=42))
    assert run(folder, cache) == ["42", "0"]


def test_a_kernel_is_recompiled_when_a_package_that_contains_it_changes(tmp_path: Path) -> None:
    inner, cache = tmp_path / "outer" / "inner", tmp_path / "cache"
    inner.mkdir(parents=True)
    for package in (inner, inner.parent):
        (package / "__init__.py").touch()
    (inner / "entry.py").write_text(_ENTRY.replace("from callee", "from outer.callee"))
    (inner.parent / "callee.py").write_text(_CALLEE.format(value=41))
    assert run(tmp_path, cache, "outer.inner.entry") == ["41", "0"]
    assert run(tmp_path, cache, "outer.inner.entry") == ["41", "1"]
    (inner.parent / "callee.py").write_text(_CALLEE.format(value=42))
    assert run(tmp_path, cache, "outer.inner.entry") == ["42", "0"]


def test_a_kernel_is_recompiled_when_another_package_that_it_imports_from_changes(tmp_path: Path) -> None:
    ours, theirs, cache = tmp_path / "ours", tmp_path / "theirs", tmp_path / "cache"
    for package in (ours, theirs):
        package.mkdir()
        (package / "__init__.py").touch()
    (ours / "entry.py").write_text(_ENTRY.replace("from callee", "from theirs.callee"))
    (theirs / "callee.py").write_text(_CALLEE.format(value=41))
    assert run(tmp_path, cache, "ours.entry") == ["41", "0"]
    assert run(tmp_path, cache, "ours.entry") == ["41", "1"]
    (theirs / "callee.py").write_text(_CALLEE.format(value=42))
    assert run(tmp_path, cache, "ours.entry") == ["42", "0"]


def test_a_kernel_is_recompiled_when_its_module_has_moved(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (tmp_path / "callee.py").write_text(_CALLEE.format(value=41))
    for package in (tmp_path / "old", tmp_path / "new"):
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "entry.py").write_text(_ENTRY)
        assert run(tmp_path, cache, f"{package.name}.entry") == ["41", "0"]
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
    assert run(tmp_path, tmp_path / "cache", "made") == ["7", "0", "-7", "0"]
    assert run(tmp_path, tmp_path / "cache", "made") == ["7", "1", "-7", "1"]


_BUNDLED = """
from typing import NamedTuple
import numpy as np
from numba import types
from kv_events.kernels.bundles import U64Vector, resident
from kv_events.kernels.declare import array_kernel
class {name}(NamedTuple):
    words: U64Vector
@array_kernel(types.uint64, {name})
def first(bundle):
    return bundle.words[0]
print(first(resident({name}(np.array([{value}], np.uint64)))))
"""


def test_kernels_are_loaded_without_the_modules_of_other_kernels(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (tmp_path / "one.py").write_text(_BUNDLED.format(name="One", value=1))
    (tmp_path / "two.py").write_text(_BUNDLED.format(name="Two", value=2))
    assert run(tmp_path, cache, "one") == ["1"]
    (tmp_path / "one.py").unlink()
    assert run(tmp_path, cache, "two") == ["2"]
