"""Keeps compiled kernels on disk, and compiles all of them at once where they are missing.

The folder of compiled kernels is named after a digest of all sources of kernels, the versions that compile them, and
the processor. numba itself only checks the file of the entry point: it would use outdated code after a change in
another file with functions that the entry point calls.

A folder that cannot be written is used as it is. Without any folder, kernels are compiled in memory at each start. If
several processes need a kernel at once, the first one compiles it and the others wait for it.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from functools import cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Final

import llvmlite
from llvmlite import binding
from numba import __version__ as numba_version
from numba import config

from kv_events.kernels.numba_parts import KernelDispatcher

_logger = logging.getLogger(__name__)
_config: Any = config
if _config.CPU_NAME == "x86-64-v3" and not binding.get_host_cpu_features().get("avx2"):
    _config.CPU_NAME = _config.CPU_FEATURES = None  # of an image whose kernels an older processor cannot run
_ROOT: Final = Path(__file__).parents[2]
_PACKAGES: Final = ("api", "bridge", "publisher", "indexer", "selection", "analysis", "kv_events")
"""Those with the largest kernels come first, so that no process compiles one while all others are done."""
_MOST_PROCESSES: Final = 4
_COMPLETE: Final = "complete"
_declared: list[KernelDispatcher] = []
_not_loaded: list[KernelDispatcher] = []
_loading = Lock()


def add_kernel(kernel: KernelDispatcher) -> None:
    """Add a kernel to those that `load` loads, if it is in a room of kernels. Others are loaded by their first call."""
    if _is_of_project(kernel):
        _declared.append(kernel)
        _not_loaded.append(kernel)


def load() -> None:
    """Load the kernels of all imported modules. Compile those of the whole project first, if any are missing.

    Publishers and indexes call this when they are created, so that no event and no query waits for a kernel.
    """
    with _loading:
        if _not_loaded:
            compile_missing()
        while _not_loaded:
            load_kernel(_not_loaded.pop())


@cache
def compile_missing() -> None:
    """Compile the kernels of the project that are not on disk, in one process for each core. See `progress`.

    Does nothing if they cannot be kept.
    """
    if is_complete() or not _is_writable():
        return
    _announce(f"once for this processor, kept in {_folder()}; this takes up to a minute")
    program = f"import sys; sys.path[:] = {sys.path!r}; from kv_events.kernels import load; load.compile_share()"
    command, none = [sys.executable, "-c", program], subprocess.DEVNULL
    num_processes = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
    with ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=none, stderr=none))  # noqa: S603
            for _ in range(num_processes)
        ]
        for process in processes:
            stack.callback(process.terminate)
        for process in processes:
            process.wait()
    if not is_complete():
        _logger.warning("kernels could not be compiled ahead; they are compiled when they are loaded")


def progress() -> str:
    """Return how many kernels are compiled, in words. For any thread."""
    kernels, can_be_kept = _all_kernels(), _folder() is not None
    done = sum(bool(kernel.overloads) or (can_be_kept and _is_kept(kernel)) for kernel in kernels)
    return f"compiling kernels: {done} of {len(kernels)}"


def is_complete() -> bool:
    """Return whether all kernels are on disk."""
    folder = _folder()
    return folder is not None and (folder / _COMPLETE).exists()


def compile_share() -> None:
    """Compile the kernels of the project that no other process compiles meanwhile. Ends with the process that waits."""
    Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    kernels = _all_kernels()
    for operation in (LOCK_EX | LOCK_NB, LOCK_EX):  # at the end, wait for the other processes
        for kernel in kernels:
            with suppress(OSError), _locked(_lock_of(kernel), operation):
                if not _is_kept(kernel):
                    kernel.load()
    if all(map(_is_kept, kernels)):
        (kernels[0].kept_in.parent / _COMPLETE).touch()


def load_kernel(kernel: KernelDispatcher) -> None:
    """Load a kernel from disk, or compile and keep it. Kernels outside the project's rooms are not kept."""
    folder = _folder()
    if folder is None or not _is_of_project(kernel):
        kernel.load()
        return
    kernel.keep_in(folder, is_writable=_is_writable())
    try:
        if _is_kept(kernel) or not _is_writable():
            if not _is_kept(kernel):
                _announce_in_memory(f"{folder} cannot be written and lacks them for this processor")
            kernel.load()
            return
        with _locked(_lock_of(kernel), LOCK_EX):
            if not _is_kept(kernel):
                _announce(f"once for this processor, kept in {folder}")
            kernel.load()
    except OSError as error:  # for example a full disk; a kernel that was compiled is loaded all the same
        _logger.warning("a compiled kernel cannot be kept in %s: %s", folder, error.strerror)
        kernel.load()


def _lock_of(kernel: KernelDispatcher) -> Path:
    return kernel.kept_in.with_suffix(".lock")


def _is_kept(kernel: KernelDispatcher) -> bool:
    return kernel.kept_in.exists()


def _is_of_project(kernel: KernelDispatcher) -> bool:
    return Path(kernel.py_func.__code__.co_filename) in _sources()


@cache
def _all_kernels() -> list[KernelDispatcher]:
    """Import every module of kernels. Returns all kernels of the project."""
    for path in _sources():
        if path.parent.name == "kernels":
            import_module(".".join(path.relative_to(_ROOT).with_suffix("").parts))
    if (folder := _folder()) is not None:
        for kernel in _declared:
            kernel.keep_in(folder, is_writable=_is_writable())
    return _declared


@cache
def _sources() -> dict[Path, None]:
    """Return the files that decide what kernels are compiled to: all rooms of kernels, and the contract's constants."""
    rooms = [path for package in _PACKAGES for path in sorted((_ROOT / package).glob("**/kernels/*.py"))]
    return dict.fromkeys([*rooms, *sorted((_ROOT / "kv_events").glob("*.py"))])


@cache
def _folder() -> Path | None:
    """Return the folder of this state of the sources, in NUMBA_CACHE_DIR or the user's cache, or None."""
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        root = Path(_config.CACHE_DIR) if _config.CACHE_DIR else Path(user_cache).expanduser() / "kvsight" / "kernels"
        folder = root / _digest()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # no permission, or no home folder
        _announce_in_memory(f"no folder for them can be used: {error}")
        return None
    if not os.access(folder, os.R_OK | os.X_OK):
        _announce_in_memory(f"{folder} cannot be read")
        return None
    return folder


@cache
def _is_writable() -> bool:
    folder = _folder()
    return folder is not None and os.access(folder, os.W_OK)


def _digest() -> str:
    """Return the digest of the sources, and of what else decides the machine code."""
    cpu = _config.CPU_NAME or binding.get_host_cpu_name()
    features = binding.get_host_cpu_features().flatten() if _config.CPU_FEATURES is None else _config.CPU_FEATURES
    versions = sys.version_info[:2], numba_version, llvmlite.__version__
    digest = sha256(repr((versions, cpu, features, _config.BOUNDSCHECK, _config.OPT)).encode())
    for path in _sources():
        digest.update(str(path.relative_to(_ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def _announce(how: str) -> None:
    """Log once that this process compiles."""
    _logger.warning("compiling kernels (%s)", how)


def _announce_in_memory(reason: str) -> None:
    _announce(f"in memory at each start; {reason}; set NUMBA_CACHE_DIR to a folder that this user can write")


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
        except OSError:  # the file system has no locks: at worst, each process compiles every kernel
            pass
        yield
