"""The private parts of numba that kernels need, and nothing else in the project.

`docs/decisions` says for each of them what it gains and when it can go. If a new version of numba changes one of them,
`tests/kv_events/test_kernels.py` shows which one.
"""

import gc
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

from llvmlite import ir
from llvmlite.binding import parse_assembly, parse_bitcode
from numba.core import registry
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering

_logger = logging.getLogger(__name__)
_CPUDispatcher: Any = registry.CPUDispatcher
_OPTIONS = {"nopython": True, "no_cfunc_wrapper": True, "_nrt": False}
"""`_nrt`: without numba's memory runtime. numba counts references to the arrays of a named tuple at every access, which
costs more than the work itself. Callers allocate all arrays, so nothing has to be counted; an allocation inside a
kernel is a compile error instead of a slow kernel."""


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


class HelperDispatcher(_CPUDispatcher):
    """A function that kernels call. It is compiled once, for one signature, when the first caller is compiled."""

    def __init__(self, function: Callable[..., Any], signature: Callable[[], Any], *, is_inlined: bool) -> None:
        """signature: returns the types. It is called when they are needed."""
        options = {**_OPTIONS, "no_cpython_wrapper": True, "forceinline": is_inlined}
        super().__init__(function, targetoptions=options, pipeline_class=_CompilerForCallers)
        self._signature = signature

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Called by numba where a caller calls the function. Arguments are converted to the signature's types."""
        if self._can_compile:
            self.compile(self._signature())
            self.disable_compile()
        return super().get_call_template(args, kws)


class KernelDispatcher(_CPUDispatcher):
    """A function that Python calls. It has one signature. Its code is loaded before the first call, or by it."""

    def __init__(
        self,
        entry: Callable[..., Any],
        signature: Callable[[], Any],
        inner: HelperDispatcher,
        load: Callable[[Any], None],
    ) -> None:
        """entry: calls `inner`, which other kernels call in its place. signature: returns the types of `entry`.

        load: receives this dispatcher before its first call, and calls its `load`.
        """
        super().__init__(entry, targetoptions={**_OPTIONS, "nogil": True})
        self._signature, self._load = signature, load
        self.get_call_template, self.get_overload = inner.get_call_template, inner.get_overload

    def keep_in(self, folder: Path, *, is_writable: bool) -> None:
        """Load compiled code from a folder, and save it there."""
        self._cache = _Cache(self.py_func, folder, is_writable)

    @property
    def kept_in(self) -> Path:
        """The file of the code in the folder of `keep_in`. numba writes it last."""
        files = self._cache._cache_file
        return Path(files._data_path(files._data_name(1)))

    def load(self) -> None:
        """Load the code, or compile it. Raises OSError if the code was compiled, but cannot be saved.

        Python's garbage collector is off meanwhile: numba's many small objects make it a tenth of the time.
        """
        with global_compiler_lock:  # of the threads that need a kernel at once, the first one loads it
            if not self._can_compile:
                return
            was_on = gc.isenabled()
            gc.disable()
            try:
                self.compile(self._signature())
            finally:
                if was_on:
                    gc.enable()
                if self.overloads:
                    self.disable_compile()

    def _compile_for_args(self, *args: Any, **kwargs: Any) -> Any:
        """Called by numba for a call before the code is loaded. Returns the compiled function, which it then calls."""
        self._load(self)
        (signature,) = self.nopython_signatures
        given = [self.typeof_pyval(value) for value in args]
        if (
            kwargs
            or len(given) != len(signature.args)
            or None in map(self.typingctx.can_convert, given, signature.args)
        ):
            raise TypeError(f"No matching definition for argument type(s) {', '.join(map(str, given))}")
        return self.overloads[signature.args].entry_point


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
        super().__init__(function)

    def reduce(self, cres: Any) -> tuple[int, tuple[Any, ...]]:
        """Keep the machine code with its checksum, and the names of its functions, which numba looks up. Leave out the
        code that it would link into callers: only Python calls what is kept.
        """
        (name, kind, (machine_code, for_callers)), *rest = super().reduce(cres)
        module = cres.codegen._create_empty_module(name)
        for function in parse_bitcode(for_callers).functions:
            if not function.is_declaration:
                empty = ir.Function(module, ir.FunctionType(ir.VoidType(), ()), function.name)
                ir.IRBuilder(empty.append_basic_block()).ret_void()
        names = parse_assembly(str(module)).as_bitcode()
        return crc32(machine_code), ((name, kind, (machine_code, names)), *rest)

    def rebuild(self, target_context: Any, payload: tuple[int, tuple[Any, ...]]) -> Any:
        """Raises ValueError if the machine code is damaged."""
        checksum, kept = payload
        if crc32(kept[0][2][0]) != checksum:
            raise ValueError("the checksum is wrong")
        return super().rebuild(target_context, kept)


class _Cache(FunctionCache):
    def __init__(self, function: Any, folder: Path, is_writable: bool) -> None:
        self._impl_class = partial(_CacheImpl, folder=folder)  # type: ignore[assignment]
        self._is_writable = is_writable
        super().__init__(function)

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """Leave out what only a compilation needs: numba's tables of all operations, which take 0.1 s to fill.

        Damaged files, such as those that a power loss leaves, count as missing.
        """
        try:
            return self._load_overload(signature, target_context)
        except Exception as error:  # noqa: BLE001  (damaged pickles raise any)
            _logger.warning("a kernel in %s is damaged, and is compiled: %r", self.cache_path, error)
            if self._is_writable:
                self.flush()
            return None

    def save_overload(self, signature: Any, result: Any) -> None:
        if self._is_writable:
            super().save_overload(signature, result)
