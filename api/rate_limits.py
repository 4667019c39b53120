"""Bounds on requests in a second, of one process or of several together."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from hashlib import sha256
from mmap import mmap

_CELLS, _PROBES = 2**14, 64
_ROUNDING_S = 1e-6


class RateLimit:
    """A bound on requests in a second. What a second leaves unused may come at once in the next one.

    Its only state is one number, so several processes can share it without a lock: of requests that two of them count
    at the same instant, one may be lost.
    """

    def __init__(
        self,
        per_s: float,
        clock: Callable[[], float] = time.monotonic,
        full_at: memoryview[float] | None = None,
    ) -> None:
        """full_at: one number, when a whole second's requests are permitted again, by the clock. None: of its own."""
        self._per_s = per_s
        self._spare_s = (max(1.0, per_s) - 1.0) / per_s
        self._clock = clock
        self._full_at: memoryview[float] | list[float] = [0.0] if full_at is None else full_at

    def wait_s(self) -> float:
        """Return the seconds after which a request is permitted; 0.0 if it is now."""
        wait_s = self._full_at[0] - self._clock() - self._spare_s
        return wait_s if wait_s > _ROUNDING_S else 0.0

    def note(self, count: int = 1) -> None:
        """Count requests. More than are permitted now delay those after them."""
        self._full_at[0] = max(self._full_at[0], self._clock()) + count / self._per_s


OF_REQUEST: ContextVar[RateLimit | None] = ContextVar("limit_of_request", default=None)
"""Bound on the requests with the token of the request that is being answered, which is counted already. The queries of
a batch count as requests of their own."""


class SharedCells:
    """Numbers by name, in memory that a process shares with those that it forks. Made before them."""

    def __init__(self) -> None:
        self._keys = memoryview(mmap(-1, 8 * _CELLS)).cast("Q")  # 0: free
        self._values = memoryview(mmap(-1, 8 * _CELLS)).cast("d")

    def cell(self, name: str) -> memoryview[float] | None:
        """Return the number of a name, 0.0 at first, or None if there is no room."""
        key = int.from_bytes(sha256(name.encode(errors="surrogatepass")).digest()[:8], "little") | 1
        for probe in range(_PROBES):
            slot = (key // 2 + probe) % _CELLS
            if self._keys[slot] == 0:
                self._keys[slot] = key
            if self._keys[slot] == key:
                return self._values[slot : slot + 1]
        return None


class RateLimits:
    """Makes the bounds of a service."""

    def __init__(self, cells: SharedCells | None = None) -> None:
        """cells: what the processes of the service share. None: there is one process."""
        self._cells = cells

    def limit(self, name: str, per_s: float) -> RateLimit:
        """Return the bound with a name, which is the same in all processes, as long as there is room for its number."""
        return RateLimit(per_s, full_at=None if self._cells is None else self._cells.cell(name))
