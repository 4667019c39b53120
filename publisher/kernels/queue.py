"""Kernels of the change queue, which the ledger's kernels call. They use arrays only, no Python objects."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types

from kv_events.kernels.bundles import I64Vector, U8Vector, U32Vector, U64Vector
from kv_events.kernels.declare import array_helper, array_kernel
from publisher.kernels.changes import CLEARED

# elements of cursors: numbers of changes queued, taken and confirmed since the ring was last empty; total changes
# dropped; whether the stream is broken; number of the current span
HEAD, TAKEN, TAIL, DROPPED, BROKEN, SPAN = range(6)

_NO_HASH = np.uint64(0)


class QueueArrays(NamedTuple):
    """A ring of page changes, columns of [capacity]. Change i is at index i modulo capacity. See `PageChanges`."""

    kinds: U8Vector
    hashes: U64Vector
    block_hashes: U64Vector
    parents: U64Vector
    spans: U32Vector
    cursors: I64Vector
    """[6] see HEAD, TAKEN, TAIL, DROPPED, BROKEN, SPAN."""


@array_helper
def append(queue, kind, sequence_hash, block_hash, parent):
    """Append one change. If the queue is full, all changes not taken yet are dropped and the stream is broken."""
    cursors = queue.cursors
    capacity = queue.kinds.shape[0]
    if cursors[BROKEN] != 0:
        cursors[DROPPED] += 1
    elif cursors[HEAD] - cursors[TAIL] >= capacity:
        cursors[DROPPED] += cursors[HEAD] - cursors[TAKEN] + 1
        cursors[HEAD] = cursors[TAKEN]
        cursors[BROKEN] = 1
    else:
        i = cursors[HEAD] if cursors[HEAD] < capacity else cursors[HEAD] % capacity  # a division is slow
        queue.kinds[i], queue.spans[i] = np.uint8(kind), np.uint32(cursors[SPAN])
        queue.hashes[i], queue.block_hashes[i], queue.parents[i] = sequence_hash, block_hash, parent
        cursors[HEAD] += 1


@array_kernel(types.void, QueueArrays)
def queue_cleared(queue):
    """Queue a clear of all pages, in its own span."""
    queue.cursors[SPAN] += 1
    append(queue, CLEARED, _NO_HASH, _NO_HASH, _NO_HASH)
    queue.cursors[SPAN] += 1
