"""Three decorators that compile numba kernels.

numba counts references to the arrays of a named tuple at every access, which costs more than the work itself. Kernels
own no memory, because callers allocate all arrays. They are therefore compiled without numba's memory runtime:
references are not counted, and an allocation inside a kernel is a compile error instead of a slow kernel.

This module, `load` and `bundles` use undocumented parts of numba. If a new version of numba changes one of them,
`tests/kv_events/test_kernels.py` shows which one.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from numba import njit
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering

from kv_events.kernels.bundles import RESIDENT_TYPE, Spread, field_names, numba_type, reader
from kv_events.kernels.load import compile_kernel


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


@register_pass(mutates_CFG=True, analysis_only=False)
class _LoweringForCallers(NativeLowering):
    _name = "lowering_for_callers"

    def run_pass(self, state: Any) -> bool:
        state.library = _UntranslatedLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        return bool(super().run_pass(state))


class _CompilerForCallers(CompilerBase):
    def define_pipelines(self) -> list[Any]:
        pipeline = DefaultPassBuilder.define_nopython_pipeline(self.state)
        pipeline.passes = [
            (_LoweringForCallers if each is NativeLowering else each, what) for each, what in pipeline.passes
        ]
        pipeline.finalize()
        return [pipeline]


NO_MEMORY_RUNTIME: dict[str, Any] = {"_nrt": False}
"""Options of `njit` without numba's memory runtime."""
FOR_KERNELS_ONLY: dict[str, Any] = {
    **NO_MEMORY_RUNTIME,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "pipeline_class": _CompilerForCallers,
}
"""Options of `njit` for functions that only kernels call. This halves the compile time."""

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
    """Return the function that numba compiles: on bare arrays, of which it makes the bundles of the kernel."""
    names: dict[str, Any] = {"_function": array_helper(function)}
    arguments, values = [], []
    for name, parameter in zip(inspect.signature(function).parameters, parameters, strict=True):
        value, members = name, [name]
        if isinstance(parameter, Spread):
            names[f"_make_{name}"] = parameter.bundle
            members = [f"{name}_{field}" for field in field_names(parameter.bundle)]
            value = f"_make_{name}({', '.join(members)})"
        elif _is_resident(parameter):
            names[f"_read_{name}"] = reader(parameter)
            value = f"_read_{name}({name})"
        arguments += members
        values.append(value)
    constants = inspect.getclosurevars(function).nonlocals  # numba's cache tells kernels apart by name and line
    name = "_".join([function.__name__, *(f"{constant}_{value}" for constant, value in constants.items())])
    return _defined(function, name, f"({', '.join(arguments)}): return _function({', '.join(values)})", names)


def _caller(function: Callable[..., Any], parameters: tuple[Any, ...], kernel: Any) -> Callable[..., Any]:
    """Return the function that Python calls. It spreads bundles over the kernel's arguments.

    A numba function with a variable number of arguments would be slower to call.
    """
    names = list(inspect.signature(function).parameters)
    arguments = [f"*{name}" if isinstance(each, Spread) else name for name, each in zip(names, parameters, strict=True)]
    text = f"({', '.join(names)}): return _kernel({', '.join(arguments)})"
    return _defined(function, function.__name__, text, {"_kernel": kernel})


def _defined(function: Callable[..., Any], name: str, text: str, names: dict[str, Any]) -> Callable[..., Any]:
    """Return a function of a name, with the module, location and docstring of another function."""
    code, names = function.__code__, {**names, "__name__": function.__module__}
    lines_before = "\n" * (code.co_firstlineno - 1)
    exec(compile(f"{lines_before}def {name}{text}", code.co_filename, "exec"), names)  # noqa: S102  our own text
    defined: Callable[..., Any] = names[name]
    defined.__doc__ = function.__doc__
    return defined
