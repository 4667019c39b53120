"""How kernels are compiled: three decorators that every numba kernel on named tuples of arrays uses.

Arrays that travel in a named tuple are reference-counted at every access, which costs more than the work itself. These
kernels own no memory (the caller allocates everything), so they are compiled without numba's memory runtime: the
counting disappears, and an allocation inside a kernel is a compile error instead of a slow kernel.

Compiled kernels are kept on disk, in a folder named after a digest of all sources that may be part of them: numba by
itself looks only at the file of the entry point, and would go on with old code after a change in a function it calls.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from typing import Any

import numba.core.config
from numba import njit

_config: Any = numba.core.config
_NO_COUNTING: dict[str, Any] = {"_nrt": False}

array_helper = njit(inline="always", **_NO_COUNTING)
"""A few lines that become part of their callers."""

array_function = njit(**_NO_COUNTING)
"""A function called from kernels only; compiled with its caller."""


def array_kernel(signature):
    """An entry point called from Python: compiled at import for this signature, or loaded from the disk cache."""

    def compiled(function):
        with _cached_beside(Path(function.__code__.co_filename).parent):
            return njit(signature, nogil=True, cache=True, **_NO_COUNTING)(function)

    return compiled


@contextmanager
def _cached_beside(folder: Path) -> Iterator[None]:
    """Let numba keep what is compiled in the block in the folder of this state of the sources."""
    usual = _config.CACHE_DIR
    try:
        cache = _cache_root(usual) / _digest_of_kernels(folder)
        cache.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home, or not ours
        yield  # nowhere to write: numba finds a place of its own, or compiles anew at each start
        return
    _config.CACHE_DIR = str(cache)
    try:
        yield
    finally:
        _config.CACHE_DIR = usual


def _cache_root(numba_cache_dir: str) -> Path:
    """NUMBA_CACHE_DIR, or the user's cache folder."""
    if numba_cache_dir:
        return Path(numba_cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvsight" / "kernels"


def _digest_of_kernels(folder: Path) -> str:
    """Digest of this package, whose constants are frozen into kernels, and of the kernels in another folder and in the
    packages that it lies in.
    """
    digest = sha256()
    here = Path(__file__).parent
    packages = takewhile(lambda each: (each / "__init__.py").exists(), folder.parents)
    for source in sorted({path for each in (here, folder, *packages) for path in each.glob("*.py")}):
        text = source.read_bytes()
        if source.parent == here or b"numba" in text or b"kv_events.kernels" in text:
            digest.update(text)
    return digest.hexdigest()[:16]
