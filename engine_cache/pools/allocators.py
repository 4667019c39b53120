"""Allocation of the rows of device pools."""

from __future__ import annotations

from threading import Lock

import numpy as np

from engine_cache import settings
from engine_cache.errors import PoolError
from engine_cache.types import IndexArray, no_indices
from kv_events.errors import InvalidValueError


class PagedTokenToKVPoolAllocator:
    """Allocates whole pages of rows. Page 0 is a dummy write target and is not allocated. Any thread.

    size: number of rows to allocate, a multiple of page_size; the pool itself has `size + page_size`. first_page: 0 for
    a pool without a dummy. With `settings.CHECK_FREES`, freeing a page twice or freeing a row of another pool raises
    PoolError; without it, such errors are not detected.
    """

    def __init__(self, size: int, page_size: int, first_page: int = 1) -> None:
        if page_size < 1:
            raise InvalidValueError("page_size", page_size, "a positive integer")
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
