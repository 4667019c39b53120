"""Everything of numba that its documentation does not promise, in one place.

`tests/unit/kv_events/test_numba_internals.py` says which of it changed when a new numba breaks one of these.
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
"""Options of `njit` that leave numba's memory runtime out: no reference counts, and an allocation does not compile."""


def cache_dir() -> str:
    """The folder that NUMBA_CACHE_DIR names, or ""."""
    folder: str = _config.CACHE_DIR
    return folder


@contextmanager
def cached_in(folder: Path) -> Iterator[None]:
    """Let kernels that are declared in the block keep their compiled code in a folder."""
    usual = _config.CACHE_DIR
    _config.CACHE_DIR = str(folder)
    try:
        yield
    finally:
        _config.CACHE_DIR = usual


# --- what intrinsics are written with -------------------------------------------------------------------------------


def element_address(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Address of an element of a one-dimensional array in C order."""
    view = context.make_array(array_type)(context, builder, array)
    return builder.gep(view.data, [index])


def array_length(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    """Elements of an array."""
    return context.make_array(array_type)(context, builder, array).nitems


def native_type(context: Any, numba_type: Any) -> Any:
    """How a value lies in memory: the LLVM type."""
    return context.get_value_type(numba_type)


def native_size(context: Any, numba_type: Any) -> int:
    """Bytes of a value in memory."""
    size: int = context.get_abi_sizeof(context.get_value_type(numba_type))
    return size


def raise_unless(context: Any, builder: Any, condition: Any, error: type[Exception], message: str) -> None:
    """Leave the kernel with an exception where a condition does not hold."""
    with builder.if_then(builder.not_(condition), likely=False):
        context.call_conv.return_user_exc(builder, error, (message,))


def declared_function(builder: Any, name: str, returns: Any, parameters: list[Any]) -> Any:
    """A function of LLVM's own, for the module that is being built."""
    return _cgutils.get_or_insert_function(builder.module, ir.FunctionType(returns, parameters), name)


def tuple_type(classes: type, members: tuple[Any, ...]) -> Any:
    """numba's type of a named tuple whose members have these types."""
    return _types.BaseTuple.from_types(members, classes)


def member_types(bundle_type: Any) -> tuple[Any, ...]:
    """numba's types of a named tuple's members."""
    members: tuple[Any, ...] = tuple(bundle_type)
    return members


def num_words(bundle_type: Any) -> int:
    """64-bit words of a named tuple of arrays in memory. An array: two owners, length, item size, address, shape,
    strides.
    """
    if isinstance(bundle_type, types.BaseTuple):
        return sum(num_words(member) for member in member_types(bundle_type))
    return 5 + 2 * int(bundle_type.ndim)
