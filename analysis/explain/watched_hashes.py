"""A table of the hashes that a question is about, of which few are among millions. A bitmap rejects most others."""

import numpy as np
import numpy.typing as npt

from analysis.kernels.watched import BITMAP_WORDS, find_watched, watch
from kv_events.hashing import U64Array
from kv_events.kernels.bundles import pin
from kv_events.kernels.page_table import make_table

_CAPACITY = 2**24
"""Only address space is reserved for it."""

I64Array = npt.NDArray[np.int64]


class WatchTable:
    """Finds watched hashes in the columns of records."""

    def __init__(self) -> None:
        self._table = pin(make_table(_CAPACITY))
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
