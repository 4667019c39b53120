"""How a long-running command keeps the memory that it uses again and again.

Events come in batches of some megabytes, and each is worked on in fresh buffers. glibc by default hands such buffers
back to the system when they are freed and has the next ones zeroed page by page, which cost a reader of engines' events
a sixth of its time. Parameters: mallopt(3).
"""

from __future__ import annotations

import ctypes
import os

# parameters of mallopt, <malloc.h>
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_KEPT_BYTES = 32 * 2**20
_GROW_BYTES = 2**20
_LARGEST_KEPT_BYTES = 6 * 2**20
"""Larger ones are tables: made for good, and paid for only as far as they are touched. By its own rule glibc would soon
take them from the heap, too, and zero them whole: 25 MB for each stream that is published."""


def keep_freed_memory() -> bool:
    """Have each of this process's arenas, of which busy threads have one each, keep up to 32 MiB that were freed.

    False: the C library cannot be asked to, or somebody has told it otherwise by `MALLOC_` variables.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # it is not glibc
        return False
    wanted = {_TRIM_THRESHOLD: _KEPT_BYTES, _TOP_PAD: _GROW_BYTES, _MMAP_THRESHOLD: _LARGEST_KEPT_BYTES}
    return all(mallopt(parameter, value) == 1 for parameter, value in wanted.items())
