"""A table of the hashes that a question is about, of which few are among millions. A bitmap rejects most others."""

import numpy as np
import numpy.typing as npt
from numba import types

from kv_events.hashing import U64Array
from kv_events.kernels.bundles import BoolVector, I64Vector, U64Input, U64Vector, resident
from kv_events.kernels.declare import array_helper, array_kernel
from kv_events.kernels.page_table import Table, make_table
from kv_events.kernels.page_table_ops import find, find_or_insert

_CAPACITY = 2**24
"""Only address space is reserved for it."""

I64Array = npt.NDArray[np.int64]
BITMAP_WORDS = 2**14
"""16 bits for each of 65,536 hashes. More are found as well, but rejected later."""
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(64 - 20)


@array_helper
def _bit(key):
    """Return the word and the bit of a key. It is spread first, because engines may count their blocks."""
    bit = key * _SPREAD >> _SHIFT
    return np.int64(bit >> np.uint64(6)), np.uint64(1) << (bit & np.uint64(63))


@array_kernel(types.void, Table, U64Vector, U64Input, BoolVector)
def watch(table, bitmap, keys, out_new):
    """Insert keys. bitmap: uint64[BITMAP_WORDS]. out_new: bool[n], written: whether a key got the next entry."""
    for i in range(keys.shape[0]):
        word, bit = _bit(keys[i])
        bitmap[word] |= bit
        entry, is_new = find_or_insert(table, keys[i])
        out_new[i] = is_new and entry >= 0


@array_kernel(types.int64, Table, U64Vector, U64Input, I64Vector, I64Vector)
def find_watched(table, bitmap, hashes, out_positions, out_entries):
    """Find watched keys among hashes. Returns their number.

    out_positions, out_entries: int64, at least n elements, written: positions in `hashes`, ascending, and entries.
    """
    found = 0
    for i in range(hashes.shape[0]):
        word, bit = _bit(hashes[i])
        if bitmap[word] & bit != np.uint64(0):
            entry = find(table, hashes[i])
            if entry >= 0:
                out_positions[found] = i
                out_entries[found] = entry
                found += 1
    return found


class WatchTable:
    """Finds watched hashes in the columns of records."""

    def __init__(self) -> None:
        self._table = resident(make_table(_CAPACITY))
        self._bitmap = np.zeros(BITMAP_WORDS, np.uint64)
        self._ids = self._positions = self._entries = np.empty(0, np.int64)

    def add(self, hashes: U64Array, first_id: int) -> None:
        """Watch hashes. Hash i has the id first_id + i; a hash that is watched already keeps its id."""
        is_new = np.empty(len(hashes), np.bool_)
        watch(self._table, self._bitmap, np.ascontiguousarray(hashes), is_new)
        self._ids = np.concatenate((self._ids, first_id + np.flatnonzero(is_new)))

    def find(self, hashes: U64Array) -> tuple[I64Array, I64Array]:
        """Return (int64[k] ascending positions of watched hashes, int64[k] their ids). Valid until the next call."""
        if len(hashes) > len(self._positions):
            self._positions, self._entries = np.empty(len(hashes), np.int64), np.empty(len(hashes), np.int64)
        count = find_watched(self._table, self._bitmap, hashes, self._positions, self._entries)
        return self._positions[:count], self._ids[self._entries[:count]]
