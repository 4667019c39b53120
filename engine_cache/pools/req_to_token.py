"""Which pool row holds which token of a request."""

from __future__ import annotations

import numpy as np

from engine_cache.types import IndexArray
from kv_events.errors import InvalidValueError


class ReqToTokenPool:
    """One line of row numbers per request in flight.

    size: requests at once. max_context_len: tokens a request may have.
    """

    def __init__(self, size: int, max_context_len: int) -> None:
        self.max_context_len = max_context_len
        self._rows = np.zeros((size, max_context_len), dtype=np.int64)
        self._free = list(range(size - 1, -1, -1))

    def available_size(self) -> int:
        """Requests that can still be taken."""
        return len(self._free)

    def alloc(self) -> int | None:
        """A line for one request, or None when all are taken."""
        return self._free.pop() if self._free else None

    def free(self, req_pool_idx: int) -> None:
        """Give a line back."""
        self._free.append(req_pool_idx)

    def read(self, req_pool_idx: int, length: int) -> IndexArray:
        """Row numbers of the first `length` tokens; a copy."""
        self._check(length)
        return self._rows[req_pool_idx, :length].copy()

    def write(self, req_pool_idx: int, start: int, indices: IndexArray) -> None:
        """Set the row numbers of the tokens from `start` on."""
        self._check(start + len(indices))
        self._rows[req_pool_idx, start : start + len(indices)] = indices

    def _check(self, length: int) -> None:
        if length > self.max_context_len:
            raise InvalidValueError("tokens of a request", length, f"at most {self.max_context_len}")
