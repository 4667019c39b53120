"""Three decorators that compile numba kernels.

numba counts references to the arrays of a named tuple at every access, which costs more than the work itself. Kernels
own no memory, because callers allocate all arrays. They are therefore compiled without numba's memory runtime:
references are not counted, and an allocation inside a kernel is a compile error instead of a slow kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

from kv_events.bundles import RESIDENT_TYPE, Spread, field_names, numba_type, prepare, reader
from kv_events.kernel_cache import kept_on_disk
from kv_events.numba_internals import CHECKS_BOUNDS, NO_MEMORY_RUNTIME, member_types

array_helper = njit(inline="always", **NO_MEMORY_RUNTIME)
"""Decorator of short functions that are inlined into their callers."""

array_function = njit(**NO_MEMORY_RUNTIME)
"""Decorator of functions that only kernels call. They are compiled with their callers."""

# With bounds checks, bodies that are inlined by force were observed to return wrong results (numba 0.68, LLVM 22).
_array_body = njit(forceinline=not CHECKS_BOUNDS, **NO_MEMORY_RUNTIME)


def array_kernel(returns, *parameters):
    """Decorator of kernels that are called from Python. Compiles at import or loads from the disk cache.

    returns: a numba type. parameters: the type of each parameter of the function. It is a numba type, an annotated
    array of `bundles` (such as `U64Vector`), the class of a bundle if callers pass a `resident` bundle, or `spread` of
    such a class if callers pass the named tuple itself. Inside the function, all bundles are named tuples.
    """

    def compiled(function):
        entry = _entry_point(function, parameters)
        types = [each for parameter in parameters for each in _entry_types(parameter)]
        source = Path(function.__code__.co_filename)
        with kept_on_disk(source):
            kernel = njit(returns(*types), nogil=True, cache=True, **NO_MEMORY_RUNTIME)(entry)
        return _caller(function, parameters, kernel) if any(isinstance(each, Spread) for each in parameters) else kernel

    return compiled


def _entry_types(parameter: Any) -> list[Any]:
    """Return the numba types of the arguments that a parameter is expanded to."""
    if isinstance(parameter, Spread):
        return [numba_type(member) for member in member_types(numba_type(parameter.bundle))]
    return [RESIDENT_TYPE if _is_resident(parameter) else numba_type(parameter)]


def _is_resident(parameter: Any) -> bool:
    return isinstance(parameter, type) and issubclass(parameter, tuple)


def _entry_point(function: Callable[..., Any], parameters: tuple[Any, ...]) -> Callable[..., Any]:
    """Return the function that numba compiles. It builds the bundles from bare arrays and calls the kernel's body."""
    names: dict[str, Any] = {"_body": _array_body(function)}
    arguments, values = [], []
    for name, parameter in zip(inspect.signature(function).parameters, parameters, strict=True):
        if isinstance(parameter, Spread):
            names[f"_make_{name}"] = parameter.bundle
            members = [f"{name}_{field}" for field in field_names(parameter.bundle)]
            arguments += members
            values.append(f"_make_{name}({', '.join(members)})")
        elif _is_resident(parameter):
            prepare(parameter)
            names[f"_read_{name}"] = reader(parameter)
            arguments.append(name)
            values.append(f"_read_{name}({name})")
        else:
            arguments.append(name)
            values.append(name)
    return _defined(function, arguments, f"_body({', '.join(values)})", names)


def _caller(function: Callable[..., Any], parameters: tuple[Any, ...], kernel: Any) -> Callable[..., Any]:
    """Return the function that Python calls. It spreads bundles over the kernel's arguments."""
    names = list(inspect.signature(function).parameters)
    arguments = [f"*{name}" if isinstance(each, Spread) else name for name, each in zip(names, parameters, strict=True)]
    return _defined(function, names, f"_kernel({', '.join(arguments)})", {"_kernel": kernel})


def _defined(
    function: Callable[..., Any], arguments: list[str], value: str, names: dict[str, Any]
) -> Callable[..., Any]:
    """Return a function that evaluates an expression, with the name, location and docstring of another function.

    A numba function with a variable number of arguments would be slower to call. The source is therefore generated from
    parameter names, as in `collections.namedtuple`.
    """
    name, code = function.__name__, function.__code__
    text = "\n" * (code.co_firstlineno - 1) + f"def {name}({', '.join(arguments)}): return {value}"
    names["__name__"] = function.__module__
    exec(compile(text, code.co_filename, "exec"), names)  # noqa: S102  names of parameters in our own sources
    defined: Callable[..., Any] = names[name]
    defined.__doc__ = function.__doc__
    return defined
