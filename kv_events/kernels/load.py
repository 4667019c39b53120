"""Keeps compiled kernels on disk, in folders that are named after a digest of all sources that may be part of them.

numba itself only checks the file of the entry point. It would use outdated code after a change in another file with
functions that the entry point calls.

A folder that cannot be written is used as it is. Without any folder, kernels are compiled in memory at each start. If
several processes need a kernel at once, the first one compiles it and the others wait for it.
"""

import gc
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from functools import lru_cache, partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

from numba import config
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

_IMPORT = re.compile(rb"^\s*(?:from|import)\s+([\w.]+)", re.MULTILINE)
_MOST_HELPERS = 3
_logger = logging.getLogger(__name__)
_config: Any = config


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
        """Load the kernel, or compile and keep it. Raises OSError if it is compiled, but cannot be kept.

        numba's many small objects make the search for garbage a tenth of the time of compiling.
        """
        was_on = gc.isenabled()
        gc.disable()
        try:
            self._dispatcher.compile(signature)
        finally:
            if was_on:
                gc.enable()


class DeclaredKernel(NamedTuple):
    """The arguments of `compile_kernel`."""

    dispatcher: Any
    signature: Any
    source: Path


class _State:
    """What happened in this process."""

    has_compiled = False
    help_with: tuple[str, ...] = ()
    """Modules whose kernels other processes help to compile as soon as one is not in the cache."""
    helpers: ClassVar[list[subprocess.Popen[bytes]]] = []
    postponed: list[DeclaredKernel] | None = None
    """Kernels that are declared now and compiled later. None: kernels are compiled when they are declared."""


def has_compiled() -> bool:
    """Return whether a kernel was not in the cache, since the start or since kernels were compiled together last."""
    return _State.has_compiled


def compile_kernel(dispatcher: Any, signature: Any, source: Path) -> None:
    """Compile a kernel for its only signature, or load it from the cache.

    dispatcher: the result of numba's `njit` without a signature. source: the file that declares the kernel.
    """
    if _State.postponed is not None:
        _State.postponed.append(DeclaredKernel(dispatcher, signature, source))
        return
    try:
        folder = _folder(source)
    except (OSError, RuntimeError) as error:  # no permission, or no home folder
        _announce("in memory at each start", f"no folder for them can be used: {error}")
        dispatcher.compile(signature)
    else:
        is_writable = os.access(folder, os.W_OK)
        _load_or_compile(KernelCode(dispatcher, folder, is_writable=is_writable), signature, folder)
    dispatcher.disable_compile()


def _load_or_compile(code: KernelCode, signature: Any, folder: Path) -> None:
    if code.is_kept(signature):
        code.compile(signature)
    elif not code.is_writable:
        _announce("in memory at each start", f"{folder} cannot be written and lacks them for this processor")
        code.compile(signature)
    else:
        with _locked(code.lock, LOCK_EX):
            if not code.is_kept(signature):
                _announce(f"once for this processor, kept in {folder.parent}")
            try:
                code.compile(signature)
            except OSError as error:  # raised when the compiled kernel is saved
                _logger.warning("a compiled kernel cannot be kept in %s: %s", folder, error.strerror)


def _announce(how: str, reason: str = "") -> None:
    """Say once that this process compiles, and let others help if they are allowed to."""
    if _State.has_compiled:
        return
    _State.has_compiled = True
    advice = f"; {reason}; set NUMBA_CACHE_DIR to a folder that this user can write" if reason else ""
    _logger.warning("compiling kernels (%s); this takes up to 30 s%s", how, advice)
    if _State.help_with and not reason:
        program = f"import sys; sys.path[:] = {sys.path!r}; from kv_events.kernels import load; load.help_compile"
        num_helpers = min(len(os.sched_getaffinity(0)) - 1, _MOST_HELPERS)
        for number in range(num_helpers):
            command = [sys.executable, "-c", f"{program}({_State.help_with!r}, {number}, {num_helpers})"]
            none = subprocess.DEVNULL
            _State.helpers.append(subprocess.Popen(command, stdin=none, stdout=none, stderr=none))  # noqa: S603


def import_without_kernels(*modules: str) -> Callable[[], None]:
    """Import modules without compiling or loading their kernels, which takes little time.

    Returns a function that does the rest, in any thread. No kernel of the modules may be called before it returns. Up
    to four processes compile, one for each core, unless all kernels are in the cache or the cache cannot be written.
    """
    declared = declared_kernels(modules)

    def compile_all() -> None:
        _State.help_with, _State.has_compiled = modules, False
        try:
            for kernel in declared:
                compile_kernel(*kernel)
        finally:
            _State.help_with = ()
            for helper in _State.helpers:
                helper.terminate()
                helper.wait()
            _State.helpers.clear()

    return compile_all


def help_compile(modules: tuple[str, ...], number: int, num_helpers: int) -> None:
    """Compile kernels of modules into the cache, except those that another process compiles or that are there.

    The last kernels come first, because the process that needs them begins with the first. Each helper begins at
    another one.
    """
    kernels = declared_kernels(modules)[::-1]
    first = number * len(kernels) // num_helpers
    for dispatcher, signature, source in kernels[first:] + kernels[:first]:
        code = KernelCode(dispatcher, _folder(source), is_writable=True)
        with suppress(OSError), _locked(code.lock, LOCK_EX | LOCK_NB):
            if not code.is_kept(signature):
                code.compile(signature)


def declared_kernels(modules: tuple[str, ...]) -> list[DeclaredKernel]:
    """Import modules without compiling. Returns their kernels, each after those that it calls."""
    declared = _State.postponed = []
    try:
        for module in modules:
            import_module(module)
    finally:
        _State.postponed = None
    return declared


@contextmanager
def _locked(path: Path, operation: int) -> Iterator[None]:
    """Hold the lock on a file. The system releases it when a process ends, so a file that is left does no harm.

    Raises BlockingIOError if LOCK_NB is set and another process holds the lock.
    """
    with path.open("a") as file:
        try:
            flock(file, operation)
        except BlockingIOError:
            raise
        except OSError:  # the file system has no locks: at worst, a kernel is compiled twice
            pass
        yield


@lru_cache
def _folder(source: Path) -> Path:
    """Return the folder of the current state of a module's sources, inside NUMBA_CACHE_DIR or the user's cache.

    Raises OSError or RuntimeError if it cannot be used.
    """
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = Path(_config.CACHE_DIR) if _config.CACHE_DIR else Path(user_cache).expanduser() / "kvsight" / "kernels"
    path = root / _digest_of_sources(source)
    path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.R_OK | os.X_OK):
        raise PermissionError(f"{path} cannot be read")
    return path


@lru_cache
def _digest_of_sources(source: Path) -> str:
    """Return the digest of a module and of all modules of this project that it imports directly or indirectly.

    Names count as well: a kept kernel is loaded with the module that it was compiled in, which may have moved.
    """
    found: set[Path] = set()
    waiting = {source}
    while waiting:
        path = waiting.pop()
        found.add(path)
        waiting |= _imported(path) - found
    digest = sha256()
    for name, path in sorted((str(path.relative_to(_import_root(path))), path) for path in found):
        digest.update(name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@lru_cache
def _imported(source: Path) -> frozenset[Path]:
    """Return the files of this project that a module imports. An imported package counts with all its modules."""
    contract = Path(__file__).parent.parent
    root = _import_root(source)
    own = root / source.relative_to(root).parts[0] if root != source.parent else root
    found: set[Path] = set()
    for name in set(_IMPORT.findall(source.read_bytes())):
        for folder in {root, contract.parent}:
            target = folder.joinpath(*name.decode().split("."))
            paths = [Path(f"{target}.py")] if Path(f"{target}.py").exists() else target.glob("*.py")
            found.update(
                path for path in paths if {own, contract} & {*path.parents} or b"kv_events" in path.read_bytes()
            )
    return frozenset(found)


def _import_root(source: Path) -> Path:
    """Return the folder from which a module is imported, that of its outermost package."""
    packages = [folder for folder in source.parents if (folder / "__init__.py").exists()]
    return packages[-1].parent if packages else source.parent
