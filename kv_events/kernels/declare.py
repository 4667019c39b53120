"""Three decorators that declare numba kernels and the functions that they call.

Types come from the annotations, see `bundles`. Every function is compiled once, for these types; arguments are
converted to them. Callers allocate all arrays, and kernels allocate nothing.
"""

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast, get_type_hints

from kv_events.kernels.bundles import PINNED_TYPE, BytesInput, U8Input, is_bundle, is_spread, numba_type, reader
from kv_events.kernels.instructions import vector_of
from kv_events.kernels.load import add_kernel, load_kernel
from kv_events.kernels.numba_parts import HelperDispatcher, KernelDispatcher

P = ParamSpec("P")
R = TypeVar("R")


def helper(function: Callable[P, R]) -> Callable[P, R]:
    """Declare a function that only kernels call. LLVM inlines it if that pays. Python cannot call it."""
    return cast(Callable[P, R], HelperDispatcher(function, lambda: _signature(function), is_inlined=False))


def inline_helper(function: Callable[P, R]) -> Callable[P, R]:
    """Declare a short function that is inlined into every kernel that calls it. Python cannot call it."""
    return cast(Callable[P, R], HelperDispatcher(function, lambda: _signature(function), is_inlined=True))


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Declare a function that Python and kernels call. `load.load` or the first call loads its code, or compiles it.

    From Python, a parameter whose annotation is a bundle's class receives a pinned bundle (`bundles.pin`), one of
    `Spread` the bundle itself, and `BytesInput` is `bytes`. In the function and in kernels, these are named tuples and
    a `U8Input`. Kernels cannot call a kernel with a `Spread` bundle.
    """
    inner = HelperDispatcher(function, lambda: _signature(function), is_inlined=True)
    entry = _entry_point(function, inner)
    dispatcher = KernelDispatcher(entry, lambda: _entry_signature(function), inner, load_kernel)
    add_kernel(dispatcher)
    if any(is_spread(each) for each in _hints(function).values()):
        return _caller(function, dispatcher)
    return cast(Callable[P, R], dispatcher)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a function: its parameters in order, then `return`."""
    hints = get_type_hints(function, include_extras=True)
    return {name: hints[name] for name in (*inspect.signature(function).parameters, "return")}


def _signature(function: Callable[..., Any]) -> Any:
    """Return the numba types of a helper."""
    *parameters, returned = (numba_type(U8Input if each == BytesInput else each) for each in _hints(function).values())
    return returned(*parameters)


def _entry_signature(function: Callable[..., Any]) -> Any:
    """Return the numba types of a kernel's entry point."""
    *parameters, returned = _hints(function).values()
    types: list[Any] = []
    for each in parameters:
        types += list(numba_type(each)) if is_spread(each) else [PINNED_TYPE if is_bundle(each) else numba_type(each)]
    return numba_type(returned)(*types)


def _entry_point(function: Callable[..., Any], inner: HelperDispatcher) -> Callable[..., Any]:
    """Return the function that numba compiles: on bare arrays, of which it makes the bundles of the kernel."""
    names: dict[str, Any] = {"_function": inner, "_vector_of": vector_of}
    arguments, values = [], []
    for name, hint in list(_hints(function).items())[:-1]:
        value, members = name, [name]
        if is_spread(hint):
            names[f"_make_{name}"] = hint.__origin__
            members = [f"{name}_{field}" for field in hint.__origin__._fields]
            value = f"_make_{name}({', '.join(members)})"
        elif is_bundle(hint):
            names[f"_read_{name}"] = reader(hint)
            value = f"_read_{name}({name})"
        elif hint == BytesInput:
            value = f"_vector_of({name})"
        arguments += members
        values.append(value)
    return _defined(function, f"({', '.join(arguments)}): return _function({', '.join(values)})", names)


def _caller(function: Callable[P, R], kernel: KernelDispatcher) -> Callable[P, R]:
    """Return the function that Python calls. It spreads bundles over the kernel's arguments.

    A numba function with a variable number of arguments would be slower to call.
    """
    hints = _hints(function)
    names = list(hints)[:-1]
    arguments = [f"*{name}" if is_spread(hints[name]) else name for name in names]
    return _defined(function, f"({', '.join(names)}): return _kernel({', '.join(arguments)})", {"_kernel": kernel})


def _defined(function: Callable[..., Any], text: str, names: dict[str, Any]) -> Callable[..., Any]:
    """Return a function with the name, module, location and docstring of another function."""
    code, names = function.__code__, {**names, "__name__": function.__module__}
    lines_before = "\n" * (code.co_firstlineno - 1)
    exec(compile(f"{lines_before}def {function.__name__}{text}", code.co_filename, "exec"), names)  # noqa: S102  our own text
    defined: Callable[..., Any] = names[function.__name__]
    defined.__doc__ = function.__doc__
    return defined
