"""All uses of undocumented parts of numba.

If a new version of numba breaks one of them, `tests/unit/kv_events/test_numba_internals.py` shows which one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba.core.config
from llvmlite import ir
from numba import types
from numba.core import cgutils

_config: Any = numba.core.config
_cgutils: Any = cgutils
_types: Any = types

NO_MEMORY_RUNTIME: dict[str, Any] = {"_nrt": False}
"""Options of `njit` without numba's memory runtime: references are not counted and allocations do not compile."""

CHECKS_BOUNDS = bool(_config.BOUNDSCHECK)
"""Whether kernels are compiled with bounds checks, by NUMBA_BOUNDSCHECK."""


def cache_dir() -> str:
    """Return the folder set by NUMBA_CACHE_DIR, or ""."""
    folder: str = _config.CACHE_DIR
    return folder


@contextmanager
def cached_in(folder: Path) -> Iterator[None]:
    """Cache the compiled code of kernels that are declared in the block in a folder."""
    usual = _config.CACHE_DIR
    _config.CACHE_DIR = str(folder)
    try:
        yield
    finally:
        _config.CACHE_DIR = usual


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


def num_words(bundle_type: Any) -> int:
    """Return the size of a named tuple of arrays in memory, in 64-bit words.

    The words of an array are two owners, length, item size, address, shape and strides.
    """
    if isinstance(bundle_type, types.BaseTuple):
        return sum(num_words(member) for member in member_types(bundle_type))
    return 5 + 2 * int(bundle_type.ndim)
