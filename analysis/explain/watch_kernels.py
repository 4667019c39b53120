"""Kernels that find a few hashes among millions.

A bitmap of 16 bits a watched hash rejects most others with one access; an open-addressing table finds the rest.
"""

from __future__ import annotations

import numpy as np
from numba import types

from kv_events.kernels.bundles import I64Input, I64Vector, U64Input, U64Vector
from kv_events.kernels.declare import array_helper, array_kernel

_SPREAD = np.uint64(0x9E3779B97F4A7C15)


@array_helper
def _spread(key):
    """Spread a key over 64 bits, because engines may count their blocks."""
    return key * _SPREAD


@array_helper
def _slot(spread_key, num_bits):
    return np.int64(spread_key >> np.uint64(64 - num_bits))


@array_kernel(types.void, U64Vector, I64Vector, U64Vector, types.int64, U64Input, I64Input)
def watch(keys, ids, bitmap, num_bits, new_keys, new_ids):
    """Add keys to a table of 2**num_bits slots with room for them. The first id of a key stays.

    keys: uint64, ids: int64 (-1: free), both [2**num_bits]. bitmap: uint64[2**num_bits / 8]. All are updated.
    """
    mask = np.int64(keys.shape[0] - 1)
    for i in range(new_keys.shape[0]):
        key = new_keys[i]
        spread_key = _spread(key)
        bit = _slot(spread_key, num_bits + 3)
        bitmap[bit >> 6] |= np.uint64(1) << np.uint64(bit & 63)
        slot = _slot(spread_key, num_bits)
        while ids[slot] >= 0 and keys[slot] != key:
            slot = (slot + 1) & mask
        if ids[slot] < 0:
            keys[slot] = key
            ids[slot] = new_ids[i]


@array_kernel(types.int64, U64Vector, I64Vector, U64Vector, types.int64, U64Input, I64Vector, I64Vector)
def find_watched(keys, ids, bitmap, num_bits, hashes, out_positions, out_ids):
    """Find watched keys among hashes. Returns their number.

    keys, ids, bitmap, num_bits: as in `watch`. hashes: uint64[n]. out_positions, out_ids: int64, at least n elements,
    written: the positions in `hashes`, ascending, and the ids.
    """
    mask = np.int64(keys.shape[0] - 1)
    found = 0
    for i in range(hashes.shape[0]):
        key = hashes[i]
        spread_key = _spread(key)
        bit = _slot(spread_key, num_bits + 3)
        if (bitmap[bit >> 6] >> np.uint64(bit & 63)) & np.uint64(1) == np.uint64(0):
            continue
        slot = _slot(spread_key, num_bits)
        while ids[slot] >= 0 and keys[slot] != key:
            slot = (slot + 1) & mask
        if ids[slot] >= 0:
            out_positions[found] = i
            out_ids[found] = ids[slot]
            found += 1
    return found
