"""Three decorators that compile numba kernels.

numba counts references to the arrays of a named tuple at every access, which costs more than the work itself. Kernels
own no memory, because callers allocate all arrays. They are therefore compiled without numba's memory runtime:
references are not counted, and an allocation inside a kernel is a compile error instead of a slow kernel.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

from kv_events.kernels.bundles import RESIDENT_TYPE, Spread, field_names, numba_type, reader
from kv_events.kernels.load import compile_kernel
from kv_events.kernels.numba_internals import FOR_KERNELS_ONLY, NO_MEMORY_RUNTIME

array_helper = njit(forceinline=True, **FOR_KERNELS_ONLY)
"""Decorator of short functions that are inlined into their callers. Python cannot call them."""

array_function = njit(forceinline=False, **FOR_KERNELS_ONLY)
"""Decorator of functions that only kernels call. They are compiled with their callers. Python cannot call them."""


def array_kernel(returns, *parameters):
    """Decorator of kernels that are called from Python. Compiles at import or loads from the disk cache.

    returns: a numba type. parameters: the type of each parameter of the function. It is a numba type, an annotated
    array of `bundles` (such as `U64Vector`), the class of a bundle if callers pass a `resident` bundle, or `spread` of
    such a class if callers pass the named tuple itself. Inside the function, all bundles are named tuples.

    A function defined inside another may use its variables. They are constants of the kernel.
    """

    def compiled(function):
        entry = _entry_point(function, parameters)
        types = [each for parameter in parameters for each in _entry_types(parameter)]
        kernel = njit(nogil=True, no_cfunc_wrapper=True, **NO_MEMORY_RUNTIME)(entry)
        compile_kernel(kernel, returns(*types), Path(function.__code__.co_filename))
        return _caller(function, parameters, kernel) if any(isinstance(each, Spread) for each in parameters) else kernel

    return compiled


def _entry_types(parameter: Any) -> list[Any]:
    """Return the numba types of the arguments that a parameter is expanded to."""
    if isinstance(parameter, Spread):
        return list(numba_type(parameter.bundle))
    return [RESIDENT_TYPE if _is_resident(parameter) else numba_type(parameter)]


def _is_resident(parameter: Any) -> bool:
    return isinstance(parameter, type) and issubclass(parameter, tuple)


def _entry_point(function: Callable[..., Any], parameters: tuple[Any, ...]) -> Callable[..., Any]:
    """Return the function that numba compiles: the kernel, on bare arrays, of which its first lines make the bundles.

    A kernel that calls the function instead would be compiled twice, and one into which numba inlines it takes longer.
    """
    constants = inspect.getclosurevars(function).nonlocals
    names: dict[str, Any] = {**function.__globals__, **constants}
    arguments, lines = [], []
    for name, parameter in zip(inspect.signature(function).parameters, parameters, strict=True):
        if isinstance(parameter, Spread):
            names[f"_make_{name}"] = parameter.bundle
            members = [f"{name}_{field}" for field in field_names(parameter.bundle)]
            arguments += members
            lines.append(f"{name} = _make_{name}({', '.join(members)})")
        elif _is_resident(parameter):
            names[f"_read_{name}"] = reader(parameter)
            arguments.append(f"{name}_words")
            lines.append(f"{name} = _read_{name}({name}_words)")
        else:
            arguments.append(name)
    definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list, definition.args.args = [], [ast.arg(name) for name in arguments]
    for name, value in constants.items():  # numba's cache tells kernels apart by name and line, not by constants
        definition.name += f"_{name}_{value}"
    first = 1 if ast.get_docstring(definition) is not None else 0
    definition.body[first:first] = ast.parse("\n".join(lines)).body
    return _defined(function, definition, names)


def _caller(function: Callable[..., Any], parameters: tuple[Any, ...], kernel: Any) -> Callable[..., Any]:
    """Return the function that Python calls. It spreads bundles over the kernel's arguments.

    A numba function with a variable number of arguments would be slower to call.
    """
    names = list(inspect.signature(function).parameters)
    arguments = [f"*{name}" if isinstance(each, Spread) else name for name, each in zip(names, parameters, strict=True)]
    text = f"def {function.__name__}({', '.join(names)}): return _kernel({', '.join(arguments)})"
    definition = ast.parse(text).body[0]
    assert isinstance(definition, ast.FunctionDef)
    return _defined(function, definition, {"_kernel": kernel, "__name__": function.__module__})


def _defined(function: Callable[..., Any], definition: ast.FunctionDef, names: dict[str, Any]) -> Callable[..., Any]:
    """Return a function made from a definition, with the location and docstring of another function."""
    code = function.__code__
    tree = ast.increment_lineno(ast.fix_missing_locations(ast.Module([definition], [])), code.co_firstlineno - 1)
    exec(compile(tree, code.co_filename, "exec"), names)  # noqa: S102  made of our own sources
    defined: Callable[..., Any] = names[definition.name]
    defined.__doc__ = function.__doc__
    return defined
