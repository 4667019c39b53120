"""All uses of undocumented parts of numba.

If a new version of numba breaks one of them, `tests/unit/kv_events/test_numba_internals.py` shows which one.
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
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering

_config: Any = numba.core.config
_cgutils: Any = cgutils
_types: Any = types

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


# --- helpers for intrinsics -----------------------------------------------------------------------------------------


def element_address(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Return the address of an element of a one-dimensional array in C order."""
    view = context.make_array(array_type)(context, builder, array)
    return builder.gep(view.data, [index])


def array_length(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    """Return the number of elements of an array."""
    return context.make_array(array_type)(context, builder, array).nitems


def native_type(context: Any, numba_type: Any) -> Any:
    """Return the LLVM type of a value in memory."""
    return context.get_value_type(numba_type)


def native_size(context: Any, numba_type: Any) -> int:
    """Return the size of a value in memory, in bytes."""
    size: int = context.get_abi_sizeof(context.get_value_type(numba_type))
    return size


def raise_unless(context: Any, builder: Any, condition: Any, error: type[Exception], message: str) -> None:
    """Make the kernel raise an exception if a condition is false."""
    with builder.if_then(builder.not_(condition), likely=False):
        context.call_conv.return_user_exc(builder, error, (message,))


def declared_function(builder: Any, name: str, returns: Any, parameters: list[Any]) -> Any:
    """Return an LLVM function, declared in the module that is being built."""
    return _cgutils.get_or_insert_function(builder.module, ir.FunctionType(returns, parameters), name)


def tuple_type(classes: type, members: tuple[Any, ...]) -> Any:
    """Return the numba type of a named tuple whose members have these types."""
    return _types.BaseTuple.from_types(members, classes)


def member_types(bundle_type: Any) -> tuple[Any, ...]:
    """Return the numba types of a named tuple's members."""
    members: tuple[Any, ...] = tuple(bundle_type)
    return members


def native_words(value: Any) -> list[int]:
    """Return an array, or a named tuple of arrays, as the 64-bit words that `num_words` counts, without owners."""
    if isinstance(value, tuple):
        return [word for member in value for word in native_words(member)]
    return [0, 0, value.size, value.itemsize, value.ctypes.data, *value.shape, *value.strides]


def num_words(bundle_type: Any) -> int:
    """Return the size of a named tuple of arrays in memory, in 64-bit words.

    The words of an array are two owners, length, item size, address, shape and strides.
    """
    if isinstance(bundle_type, types.BaseTuple):
        return sum(num_words(member) for member in member_types(bundle_type))
    return 5 + 2 * int(bundle_type.ndim)
