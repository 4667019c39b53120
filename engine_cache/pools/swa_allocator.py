"""Allocation of the rows of a device pool with sliding-window layers, which keep only the last tokens. No torch."""

from __future__ import annotations

import numpy as np

from engine_cache import settings
from engine_cache.errors import PoolError
from engine_cache.pools.allocators import PagedTokenToKVPoolAllocator, rows_of_pages
from engine_cache.types import IndexArray


class SWATokenToKVPoolAllocator:
    """Allocates rows of the full-attention layers, each with a row of the sliding-window layers (SWA).

    The SWA row may be freed earlier. The full row identifies a token.

    size, swa_size: number of rows of either kind, multiples of page_size. With `settings.CHECK_FREES`, freeing a page
    twice or mapping a row twice raises PoolError; without it, such errors are not detected.
    """

    def __init__(self, size: int, swa_size: int, page_size: int) -> None:
        self.full = PagedTokenToKVPoolAllocator(size, page_size)
        """Allocator of full rows alone, as needed for a load from the host."""
        self.swa = PagedTokenToKVPoolAllocator(swa_size, page_size)
        self.size = size
        self.page_size = page_size
        self.full_to_swa_index_mapping = np.zeros(size + page_size, np.int64)
        """[size + page_size] SWA row of each full row; 0 if it has none."""
        self._debug = settings.CHECK_FREES

    def clear(self) -> None:
        self.full.clear()
        self.swa.clear()
        self.full_to_swa_index_mapping[:] = 0

    def available_size(self) -> int:
        """Number of tokens for which `alloc` has rows."""
        return min(self.full.available_size(), self.swa.available_size())

    def alloc(self, need_size: int) -> IndexArray | None:
        """Allocate full rows, page by page, each with an SWA row. Returns None if too few rows of either kind are free.

        Raises InvalidValueError unless the number is a multiple of the page size.
        """
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
        """Free every page that contains one of the rows, of both kinds."""
        self.free_swa(full_indices)
        self.full.free(full_indices)

    def free_swa(self, full_indices: IndexArray) -> None:
        """Free the SWA rows of every page that contains one of the rows. The full rows stay allocated."""
        rows = rows_of_pages(full_indices, self.page_size)  # the next owner of a page must not inherit the mapping
        swa_indices = self.translate(rows)
        self.full_to_swa_index_mapping[rows] = 0
        self.swa.free(swa_indices[swa_indices > 0])

    def translate(self, full_indices: IndexArray) -> IndexArray:
        """Return a copy of the SWA rows of these rows, 0 for a row without one."""
        return self.full_to_swa_index_mapping[full_indices]

    def map_swa(self, full_indices: IndexArray, swa_indices: IndexArray) -> None:
        """Assign unused SWA rows to full rows without one. `free` and `free_swa` free them."""
        if self._debug:
            self._check_unmapped(full_indices, swa_indices)
        self.full_to_swa_index_mapping[full_indices] = swa_indices

    def move_swa(self, source: IndexArray, target: IndexArray) -> IndexArray:
        """Move the SWA rows of the full rows `source` to the full rows `target`, which have none, and return them."""
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
