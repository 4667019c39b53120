"""How kernels are compiled: three decorators that every numba kernel uses.

numba counts references to an array of a named tuple at every access, which costs more than the work itself. Kernels own
no memory (the caller allocates everything), so they are compiled without numba's memory runtime: nothing is counted,
and an allocation inside a kernel is a compile error instead of a slow kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

from kv_events.bundles import RESIDENT_TYPE, Spread, field_names, numba_type, prepare, reader
from kv_events.kernel_cache import kept_on_disk
from kv_events.numba_internals import NO_MEMORY_RUNTIME, member_types

array_helper = njit(inline="always", **NO_MEMORY_RUNTIME)
"""A few lines that become part of their callers."""

array_function = njit(**NO_MEMORY_RUNTIME)
"""A function called from kernels only; compiled with its caller."""

_array_body = njit(forceinline=True, **NO_MEMORY_RUNTIME)


def array_kernel(returns, *parameters):
    """An entry point called from Python: compiled at import for these types, or loaded from the disk cache.

    returns: a type of numba's. parameters, one for each of the function's: a type of numba's; an annotated array of
    `bundles` (`U64Vector`); the class of a bundle, where callers pass a `resident` one; or `spread` of such a class,
    where they pass the named tuple itself. In the function all bundles are named tuples.
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
    """numba's types of the arguments that a parameter becomes."""
    if isinstance(parameter, Spread):
        return [numba_type(member) for member in member_types(numba_type(parameter.bundle))]
    return [RESIDENT_TYPE if _is_resident(parameter) else numba_type(parameter)]


def _is_resident(parameter: Any) -> bool:
    return isinstance(parameter, type) and issubclass(parameter, tuple)


def _entry_point(function: Callable[..., Any], parameters: tuple[Any, ...]) -> Callable[..., Any]:
    """The function of bare arrays that numba compiles: it puts the bundles together and calls the kernel's function."""
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
    """The function that Python calls: it spreads bundles over the kernel's arguments."""
    names = list(inspect.signature(function).parameters)
    arguments = [f"*{name}" if isinstance(each, Spread) else name for name, each in zip(names, parameters, strict=True)]
    return _defined(function, names, f"_kernel({', '.join(arguments)})", {"_kernel": kernel})


def _defined(
    function: Callable[..., Any], arguments: list[str], value: str, names: dict[str, Any]
) -> Callable[..., Any]:
    """A function that returns the value of an expression, with a given function's name, place and docstring.

    numba compiles no function of a variable number of arguments that would be as fast to call, so its source is put
    together from parameter names, as in `collections.namedtuple`.
    """
    name, code = function.__name__, function.__code__
    text = "\n" * (code.co_firstlineno - 1) + f"def {name}({', '.join(arguments)}): return {value}"
    names["__name__"] = function.__module__
    exec(compile(text, code.co_filename, "exec"), names)  # noqa: S102  names of parameters in our own sources
    defined: Callable[..., Any] = names[name]
    defined.__doc__ = function.__doc__
    return defined
