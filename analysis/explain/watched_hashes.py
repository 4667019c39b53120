"""A table of the hashes that a question is about."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from analysis.explain.watch_kernels import find_watched, watch
from kv_events.hashing import U64Array

_FIRST_BITS = 10

I64Array = npt.NDArray[np.int64]


class WatchTable:
    """Finds watched hashes in the columns of records, at about a nanosecond for each hash of a column."""

    def __init__(self) -> None:
        self._added: list[tuple[U64Array, I64Array]] = []
        self._num_added = 0
        self._positions = self._found = np.empty(0, np.int64)
        self._allocate(_FIRST_BITS)

    def add(self, hashes: U64Array, first_id: int) -> None:
        """Watch hashes. Hash i has the id first_id + i; a hash that is watched already keeps its id."""
        new = (np.ascontiguousarray(hashes), np.arange(first_id, first_id + len(hashes), dtype=np.int64))
        self._added.append(new)
        self._num_added += len(hashes)
        if 2 * self._num_added <= len(self._keys):
            watch(self._keys, self._ids, self._bitmap, self._num_bits, *new)
            return
        self._allocate((2 * self._num_added - 1).bit_length())
        for each in self._added:
            watch(self._keys, self._ids, self._bitmap, self._num_bits, *each)

    def find(self, hashes: U64Array) -> tuple[I64Array, I64Array]:
        """Return (int64[k] ascending positions of watched hashes, int64[k] their ids). Valid until the next call."""
        if len(hashes) > len(self._positions):
            self._positions, self._found = np.empty(len(hashes), np.int64), np.empty(len(hashes), np.int64)
        count = find_watched(self._keys, self._ids, self._bitmap, self._num_bits, hashes, self._positions, self._found)
        return self._positions[:count], self._found[:count]

    def _allocate(self, num_bits: int) -> None:
        self._num_bits = num_bits
        self._keys = np.zeros(1 << num_bits, np.uint64)
        self._ids = np.full(1 << num_bits, -1, np.int64)
        self._bitmap = np.zeros(1 << (num_bits - 3), np.uint64)
