"""Owners of the rows of device and host pools, and the sizes of host pools. No torch."""

from threading import Lock

import numpy as np

from engine_cache import settings
from engine_cache.errors import PoolError
from engine_cache.types import IndexArray, no_indices
from kv_events.errors import InvalidValueError, check_positive


class PagedTokenToKVPoolAllocator:
    """Allocates whole pages of rows. Page 0 is a dummy write target and is not allocated. Any thread.

    size: number of rows to allocate, a multiple of page_size; the pool itself has `size + page_size`. first_page: 0 for
    a pool without a dummy. With `settings.CHECK_FREES`, freeing a page twice or freeing a row of another pool raises
    PoolError; without it, such errors are not detected.
    """

    def __init__(self, size: int, page_size: int, first_page: int = 1) -> None:
        check_positive(page_size=page_size)
        if size < page_size or size % page_size:
            raise InvalidValueError("size", size, f"a positive multiple of the page size {page_size}")
        self.size = size
        self.page_size = page_size
        self._first_page = first_page
        self._num_pages = size // page_size
        self._rows_of_page = np.arange(page_size, dtype=np.int64)
        self._debug = settings.CHECK_FREES
        self._lock = Lock()  # guards the stack of free pages
        self.clear()

    def clear(self) -> None:
        # a stack with its top at _num_free; low pages are allocated first
        last = self._first_page + self._num_pages - 1
        with self._lock:
            self._stack = np.arange(last, self._first_page - 1, -1, dtype=np.int64)
            self._num_free = self._num_pages

    def available_size(self) -> int:
        """Number of free rows."""
        return self._num_free * self.page_size

    def free_pages(self) -> IndexArray:
        """Return a copy of the numbers of the free pages, in no particular order."""
        with self._lock:
            return self._stack[: self._num_free].copy()

    def alloc(self, need_size: int) -> IndexArray | None:
        """Allocate `need_size` rows, page by page. Returns None if fewer are free.

        Raises InvalidValueError unless `need_size` is a multiple of the page size.
        """
        if need_size < 0 or need_size % self.page_size:
            raise InvalidValueError("need_size", need_size, f"a multiple of the page size {self.page_size}")
        num_pages = need_size // self.page_size
        with self._lock:
            if num_pages > self._num_free:
                return None
            self._num_free -= num_pages
            pages = self._stack[self._num_free : self._num_free + num_pages][::-1]
            return _rows_of(pages, self._rows_of_page)

    def free(self, indices: IndexArray) -> None:
        """Free every page that contains one of the rows."""
        pages = _pages_of(indices, self.page_size)
        with self._lock:
            if self._debug:
                self._check_allocated(pages)
            self._stack[self._num_free : self._num_free + len(pages)] = pages
            self._num_free += len(pages)

    def _check_allocated(self, pages: IndexArray) -> None:
        last = self._first_page + self._num_pages - 1
        foreign = pages[(pages < self._first_page) | (pages > last)]
        if len(foreign):
            raise PoolError(f"page {foreign[0]} freed, the pool has pages {self._first_page} .. {last}")
        twice = np.intersect1d(pages, self._stack[: self._num_free])
        if len(twice):
            raise PoolError(f"page {twice[0]} freed, but it is free already ({self._num_free} pages are)")


class MambaSlotAllocator(PagedTokenToKVPoolAllocator):
    """Allocates slots of recurrent states, numbered 1 .. size. Slot 0 is a dummy write target."""

    def __init__(self, size: int) -> None:
        super().__init__(size, page_size=1)


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


class BytelessHostPool(PagedTokenToKVPoolAllocator):
    """A host pool for simulations, which allocates the rows `0 .. size - 1` but copies nothing."""

    layer_num = 1
    layout = "page_first"

    def __init__(self, size: int, page_size: int) -> None:
        super().__init__(size, page_size, first_page=0)

    def backup_from_device_all_layer(
        self, device_pool: object, host_indices: IndexArray, device_indices: IndexArray
    ) -> None:
        """Do nothing: there are no bytes to copy."""

    def load_to_device_per_layer(
        self, device_pool: object, host_indices: IndexArray, device_indices: IndexArray, layer_id: int
    ) -> None:
        """Do nothing: there are no bytes to copy."""


class ReqToTokenPool:
    """One line of row numbers for each request in progress.

    size: maximum number of concurrent requests. max_context_len: maximum number of tokens of a request.
    """

    def __init__(self, size: int, max_context_len: int) -> None:
        self.max_context_len = max_context_len
        self._rows = np.zeros((size, max_context_len), dtype=np.int64)
        self._free = list(range(size - 1, -1, -1))

    def available_size(self) -> int:
        return len(self._free)

    def alloc(self) -> int | None:
        """Allocate a line for one request. Returns None if all are in use."""
        return self._free.pop() if self._free else None

    def free(self, req_pool_idx: int) -> None:
        self._free.append(req_pool_idx)

    def read(self, req_pool_idx: int, length: int) -> IndexArray:
        """Return a copy of the row numbers of the first `length` tokens."""
        self._check(length)
        return self._rows[req_pool_idx, :length].copy()

    def write(self, req_pool_idx: int, start: int, indices: IndexArray) -> None:
        """Set the row numbers of the tokens from `start`."""
        self._check(start + len(indices))
        self._rows[req_pool_idx, start : start + len(indices)] = indices

    def _check(self, length: int) -> None:
        if length > self.max_context_len:
            raise InvalidValueError("tokens of a request", length, f"at most {self.max_context_len}")


def host_pool_size(
    device_size: int, page_size: int, size_per_token: int, *, host_size_gb: float = 0.0, ratio: float = 2.0
) -> int:
    """Return the number of rows of a host pool: as many as fit into `host_size_gb` or, if that is 0, `ratio` times as
    many as on the device. The result is a multiple of the page size and one page more than requested.

    size_per_token: bytes per row. Raises InvalidValueError if the host pool is not larger than the device pool.
    """
    check_positive(page_size=page_size)
    if host_size_gb < 0:
        raise InvalidValueError("host_size_gb", host_size_gb, "0 or more")
    wanted = int(host_size_gb * 1e9 // size_per_token) if host_size_gb else int(device_size * ratio)
    size = (wanted // page_size + 1) * page_size
    require_larger_than_device(size, device_size)
    return size


def require_larger_than_device(host_size: int, device_size: int) -> None:
    """Check that the host pool is larger than the device pool. Raises InvalidValueError with both sizes."""
    if host_size <= device_size:
        raise InvalidValueError("size of the host pool", host_size, f"more rows than the device pool's {device_size}")


def rows_of_pages(indices: IndexArray, page_size: int) -> IndexArray:
    """Return all rows of every page that contains one of these rows, ascending."""
    return _rows_of(_pages_of(indices, page_size), np.arange(page_size, dtype=np.int64))


def _rows_of(pages: IndexArray, rows_of_page: IndexArray) -> IndexArray:
    rows: IndexArray = (pages[:, None] * len(rows_of_page) + rows_of_page).reshape(-1)
    return rows


def _pages_of(indices: IndexArray, page_size: int) -> IndexArray:
    """Return the distinct pages of the rows, ascending. Rows of one page are mostly adjacent, so the sort is short."""
    if not len(indices):
        return no_indices()
    pages = indices // page_size
    starts = np.flatnonzero(pages[1:] != pages[:-1]) + 1
    return np.unique(np.concatenate((pages[:1], pages[starts])))
