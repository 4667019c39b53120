"""Kernels of the queue of page changes that the ledger feeds. Arrays only, no Python objects."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import types

from kv_events.kernels import array_helper, array_kernel
from publisher.change_kernels import CLEARED

# elements of cursors: changes queued, taken, confirmed since the ring was last empty; changes given up; whether the
# stream is broken; number of the group that is being queued
HEAD, TAKEN, TAIL, DROPPED, BROKEN, GROUP = range(6)

_NO_HASH = np.uint64(0)


class QueueArrays(NamedTuple):
    """Ring of page changes, [capacity] a column; change number i lies at i modulo the capacity. See `PageChanges`."""

    kinds: npt.NDArray[np.uint8]
    hashes: npt.NDArray[np.uint64]
    block_hashes: npt.NDArray[np.uint64]
    parents: npt.NDArray[np.uint64]
    groups: npt.NDArray[np.uint32]
    cursors: npt.NDArray[np.int64]
    """[6] see HEAD, TAKEN, TAIL, DROPPED, BROKEN, GROUP."""


_U64 = types.uint64[::1]
QUEUE_ARRAYS = (types.uint8[::1], _U64, _U64, _U64, types.uint32[::1], types.int64[::1])
"""numba types of a `QueueArrays`' arrays."""


@array_helper
def append(queue, kind, sequence_hash, block_hash, parent):
    """Append one change. A full queue drops all that was not taken yet and breaks the stream."""
    cursors = queue.cursors
    capacity = queue.kinds.shape[0]
    if cursors[BROKEN] != 0:
        cursors[DROPPED] += 1
    elif cursors[HEAD] - cursors[TAIL] >= capacity:
        cursors[DROPPED] += cursors[HEAD] - cursors[TAKEN] + 1
        cursors[HEAD] = cursors[TAKEN]
        cursors[BROKEN] = 1
    else:
        i = cursors[HEAD] if cursors[HEAD] < capacity else cursors[HEAD] % capacity  # a division takes its time
        queue.kinds[i], queue.groups[i] = np.uint8(kind), np.uint32(cursors[GROUP])
        queue.hashes[i], queue.block_hashes[i], queue.parents[i] = sequence_hash, block_hash, parent
        cursors[HEAD] += 1


@array_kernel(types.void(*QUEUE_ARRAYS))
def queue_cleared(kinds, hashes, block_hashes, parents, groups, cursors):
    """Queue the change "everything cleared", a group of its own."""
    cursors[GROUP] += 1
    queue = QueueArrays(kinds, hashes, block_hashes, parents, groups, cursors)
    append(queue, CLEARED, _NO_HASH, _NO_HASH, _NO_HASH)
    cursors[GROUP] += 1
