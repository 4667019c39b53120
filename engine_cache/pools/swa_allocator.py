"""Who owns which row of a device pool whose sliding-window layers keep the last tokens only. No torch."""

from __future__ import annotations

import numpy as np

from engine_cache.errors import PoolError
from engine_cache.pools.allocators import PagedTokenToKVPoolAllocator, rows_of_pages
from engine_cache.settings import debug_pools
from engine_cache.types import IndexArray


class SWATokenToKVPoolAllocator:
    """Hands out rows of the full-attention layers, and with each a row of the sliding-window layers (SWA), which may be
    given back before it. A token is known by its full row.

    size, swa_size: rows to hand out on either side, multiples of page_size. With `KVSIGHT_DEBUG_POOLS` set, freeing a
    page twice or mapping a row twice raises PoolError; without it that goes unnoticed.
    """

    def __init__(self, size: int, swa_size: int, page_size: int) -> None:
        self.full = PagedTokenToKVPoolAllocator(size, page_size)
        """Owner of the full rows alone, as a load from the host wants them."""
        self.swa = PagedTokenToKVPoolAllocator(swa_size, page_size)
        self.size = size
        self.page_size = page_size
        self.full_to_swa_index_mapping = np.zeros(size + page_size, np.int64)
        """[size + page_size] SWA row of a full row; 0: it has none."""
        self._debug = debug_pools()

    def clear(self) -> None:
        """Every page is free again."""
        self.full.clear()
        self.swa.clear()
        self.full_to_swa_index_mapping[:] = 0

    def available_size(self) -> int:
        """Tokens that `alloc` has rows for."""
        return min(self.full.available_size(), self.swa.available_size())

    def alloc(self, need_size: int) -> IndexArray | None:
        """Full rows, page by page, each with an SWA row, or None when one side is short. Raises InvalidValueError
        unless it is a whole number of pages."""
        full_indices = self.full.alloc(need_size)
        if full_indices is None:
            return None
        swa_indices = self.swa.alloc(need_size)
        if swa_indices is None:
            self.full.free(full_indices)
            return None
        self.map_swa(full_indices, swa_indices)
        return full_indices

    def free(self, full_indices: IndexArray) -> None:
        """Take back every page that one of the rows lies in, on both sides."""
        self.free_swa(full_indices)
        self.full.free(full_indices)

    def free_swa(self, full_indices: IndexArray) -> None:
        """Take back the SWA pages of every page that one of the rows lies in, as far as it has one; the full rows stay
        their owner's."""
        rows = rows_of_pages(full_indices, self.page_size)  # the next owner of a page must not inherit any of it
        swa_indices = self.translate(rows)
        self.full_to_swa_index_mapping[rows] = 0
        self.swa.free(swa_indices[swa_indices > 0])

    def translate(self, full_indices: IndexArray) -> IndexArray:
        """SWA rows of these rows, 0 for one without; a copy."""
        return self.full_to_swa_index_mapping[full_indices]

    def map_swa(self, full_indices: IndexArray, swa_indices: IndexArray) -> None:
        """Give full rows without an SWA row one that belongs to nobody else; `free` and `free_swa` take it back."""
        if self._debug:
            self._check_unmapped(full_indices, swa_indices)
        self.full_to_swa_index_mapping[full_indices] = swa_indices

    def move_swa(self, source: IndexArray, target: IndexArray) -> IndexArray:
        """Hand the SWA rows of the full rows `source` over to `target`, which have none, and return them."""
        swa_indices = self.translate(source)
        self.full_to_swa_index_mapping[source] = 0
        self.map_swa(target, swa_indices)
        return swa_indices

    def _check_unmapped(self, full_indices: IndexArray, swa_indices: IndexArray) -> None:
        mapped = full_indices[self.full_to_swa_index_mapping[full_indices] > 0]
        if len(mapped):
            raise PoolError(f"full row {mapped[0]} gets an SWA row, but it has one")
        shared = np.intersect1d(swa_indices, self.full_to_swa_index_mapping)
        if len(shared):
            raise PoolError(f"SWA row {shared[0]} gets a full row, but it has one, or is none")
