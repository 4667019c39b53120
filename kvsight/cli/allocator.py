"""Settings of glibc's allocator for long-running commands: less memory for each published stream.

`docs/decisions/allocator.md` has the reasons and the figures. Parameters: see mallopt(3).
"""

from __future__ import annotations

import ctypes
import os

# parameters of mallopt, <malloc.h>
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_KEPT_BYTES = 32 * 2**20
_GROW_BYTES = 2**20
_LARGEST_KEPT_BYTES = 6 * 2**20
"""Larger blocks are tables, of which only the touched pages use memory. Without this limit glibc would soon allocate
them from the heap as well and zero them entirely."""


def keep_freed_memory() -> bool:
    """Let each allocator arena (busy threads have one each) keep up to 32 MiB of freed memory.

    Returns False if the C library does not support it, or if `MALLOC_` variables are set, which take precedence.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # it is not glibc
        return False
    values = {_TRIM_THRESHOLD: _KEPT_BYTES, _TOP_PAD: _GROW_BYTES, _MMAP_THRESHOLD: _LARGEST_KEPT_BYTES}
    return all(mallopt(parameter, value) == 1 for parameter, value in values.items())
