"""How a long-running command keeps the memory that it uses again and again.

Events come in batches of some megabytes, and each is worked on in fresh buffers. glibc by default hands such buffers
back to the system when they are freed and has the next ones zeroed page by page, which cost a reader of engines' events
a sixth of its time. Parameters: mallopt(3).
"""

from __future__ import annotations

import ctypes
import sys

# parameters of mallopt, <malloc.h>
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_KEPT_BYTES = 64 * 2**20
_GROW_BYTES = 2**20
_LARGEST_KEPT_BYTES = 8 * 2**20
"""Larger buffers are tables: made for good, and paid for only as far as they are touched."""


def keep_freed_memory() -> bool:
    """Have this process keep up to 64 MiB that it freed. False: the C library is none that can be asked to."""
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # musl
        return False
    wanted = {_TRIM_THRESHOLD: _KEPT_BYTES, _TOP_PAD: _GROW_BYTES, _MMAP_THRESHOLD: _LARGEST_KEPT_BYTES}
    return all(mallopt(parameter, value) == 1 for parameter, value in wanted.items())
