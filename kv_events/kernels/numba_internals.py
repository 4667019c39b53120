"""Undocumented parts of numba: how functions are compiled and kept. `bundles` knows how it lays out named tuples.

If a new version of numba changes one of them, `tests/kv_events/test_kernels.py` shows which one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numba.core.config
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering

_config: Any = numba.core.config

NO_MEMORY_RUNTIME: dict[str, Any] = {"_nrt": False}
"""Options of `njit` without numba's memory runtime: references are not counted and allocations do not compile."""


class _UntranslatedLibrary(JITCodeLibrary):
    """The code of a function that only kernels call, simplified, but neither inlined into nor translated.

    That happens in each kernel that calls it, into which it is linked. To do so here as well would take longer than all
    the rest. LLVM also changes code when it translates it, in ways that are not valid for code that is
    optimised again. See docs/decisions/inlined_functions.md.
    """

    @property
    def codegen(self) -> Any:
        """What would give the function an environment, which only calls from Python need."""
        return SimpleNamespace(set_env=lambda *_: None)

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)  # type: ignore[no-untyped-call]
class _LoweringForCallers(NativeLowering):
    _name = "lowering_for_callers"

    def run_pass(self, state: Any) -> bool:
        state.library = _UntranslatedLibrary(state.targetctx.codegen(), state.func_id.func_qualname)  # type: ignore[no-untyped-call]
        return bool(super().run_pass(state))  # type: ignore[no-untyped-call]


class _CompilerForCallers(CompilerBase):
    def define_pipelines(self) -> list[Any]:
        pipeline = DefaultPassBuilder.define_nopython_pipeline(self.state)  # type: ignore[no-untyped-call]
        pipeline.passes = [
            (_LoweringForCallers if each is NativeLowering else each, what) for each, what in pipeline.passes
        ]
        pipeline.finalize()
        return [pipeline]


FOR_KERNELS_ONLY: dict[str, Any] = {
    **NO_MEMORY_RUNTIME,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "pipeline_class": _CompilerForCallers,
}
"""Options of `njit` for functions that only kernels call. Python cannot call them; this halves the compile time."""


def cache_dir() -> str:
    """Return the folder set by NUMBA_CACHE_DIR, or ""."""
    folder: str = _config.CACHE_DIR
    return folder


class _Locator(_CacheLocator):
    """Tells numba to keep a function in a given folder, whose name stands for the state of all sources."""

    def __init__(self, folder: Path, function: Any) -> None:
        self._folder, self._function = folder, function

    def ensure_cache_path(self) -> None:
        pass

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> int:
        return 0

    def get_disambiguator(self) -> str:
        return str(self._function.__code__.co_firstlineno)


class _CacheImpl(CompileResultCacheImpl):
    def __init__(self, function: Any, folder: Path) -> None:
        self._locator_classes = [SimpleNamespace(from_function=lambda *_: _Locator(folder, function))]  # type: ignore[list-item]
        super().__init__(function)  # type: ignore[no-untyped-call]


class _Cache(FunctionCache):
    def __init__(self, function: Any, folder: Path, is_writable: bool) -> None:
        self._impl_class = partial(_CacheImpl, folder=folder)  # type: ignore[assignment]
        self._is_writable = is_writable
        super().__init__(function)  # type: ignore[no-untyped-call]

    def save_overload(self, signature: Any, result: Any) -> None:
        if self._is_writable:
            super().save_overload(signature, result)  # type: ignore[no-untyped-call]

    def holds(self, signature: Any, codegen: Any) -> bool:
        return self._index_key(signature, codegen) in self._cache_file._load_index()  # type: ignore[no-untyped-call]


@contextmanager
def _collector_off() -> Iterator[None]:
    """Do not look for garbage in a block: numba's many small objects make that a tenth of the time of compiling."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class KernelCode:
    """A kernel and its compiled code in a folder. The folder must be named after the state of all its sources."""

    def __init__(self, dispatcher: Any, folder: Path, *, is_writable: bool) -> None:
        """dispatcher: the result of `njit` without a signature."""
        self.is_writable = is_writable
        self._dispatcher = dispatcher
        self._cache = dispatcher._cache = _Cache(dispatcher.py_func, folder, is_writable)
        self.lock = folder / f"{self._cache._impl.filename_base}.lock"

    def is_kept(self, signature: Any) -> bool:
        """Return whether the folder holds the kernel for this signature, processor and version of numba."""
        return self._cache.holds(signature, self._dispatcher.targetctx.codegen())

    def compile(self, signature: Any) -> None:
        """Load the kernel, or compile and keep it. Raises OSError if it is compiled, but cannot be kept."""
        with _collector_off():
            self._dispatcher.compile(signature)
