"""How kernels are compiled: three decorators that every numba kernel on named tuples of arrays uses.

Arrays that travel in a named tuple are reference-counted at every access, which costs more than the work itself. These
kernels own no memory (the caller allocates everything), so they are compiled without numba's memory runtime: the
counting disappears, and an allocation inside a kernel is a compile error instead of a slow kernel.
"""

from __future__ import annotations

from typing import Any

from numba import njit

_NO_COUNTING: dict[str, Any] = {"_nrt": False}

array_helper = njit(inline="always", **_NO_COUNTING)
"""A few lines that become part of their callers."""

array_function = njit(**_NO_COUNTING)
"""A function called from kernels only; compiled with its caller."""


def array_kernel(signature):
    """An entry point called from Python: compiled at import for this signature, or loaded from the disk cache."""
    return njit(signature, nogil=True, cache=True, **_NO_COUNTING)
