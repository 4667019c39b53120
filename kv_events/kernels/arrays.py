"""Zeros in memory pages of 4 KiB, for tables that fill from the start.

For arrays of 4 MiB and more, numpy advises the kernel to use pages of 2 MiB. The first use of any part then clears all
of it. Each stream has twenty tables, most of which are used in small part, so that clearing took a third of the time
that a growing stream needs, and memory that was never used. A store into the index waited for 0.2 to 12 ms. Queries
gained nothing that can be measured.

Smaller arrays would come from the heap, where freed memory is cleared completely for the next array: a stream that
uses 100 KiB then used 1.3 MB once others had come and gone.
"""

import math
import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

_MIN_BYTES = 2**15
_STEP_BYTES = 2**22


def zeros(shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return what `numpy.zeros` returns. All but small arrays are reserved.

    The kernel provides each of their pages at its first use. Raises MemoryError.
    """
    num_bytes = math.prod((shape,) if isinstance(shape, int) else shape) * np.dtype(dtype).itemsize
    if num_bytes < _MIN_BYTES:
        return np.zeros(shape, dtype)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # where large pages are the default of the system
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)


def give_back(array: npt.NDArray[Any]) -> Iterator[None]:
    """Give the memory of an array back in slices: freeing a gigabyte at once takes 20 ms. Its content is lost.

    array: as `zeros` returned it, or a part from its start. An array that `zeros` made small keeps its memory.
    """
    memory: Any = array
    while isinstance(memory, np.ndarray):
        memory = memory.base
    if not isinstance(memory, memoryview) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    memory = memory.obj
    end = min(len(memory), -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    for start in range(0, end, _STEP_BYTES):
        memory.madvise(mmap.MADV_DONTNEED, start, min(_STEP_BYTES, end - start))
        yield
