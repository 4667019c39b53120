"""Mapping from the tokens of requests to pool rows."""

from __future__ import annotations

import numpy as np

from engine_cache.types import IndexArray
from kv_events.errors import InvalidValueError


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
