"""Bounds on requests in a second, of one process or of several together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from hashlib import sha256
from mmap import mmap
from pathlib import Path

_CELL_BYTES = 8
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

    def note(self) -> None:
        """Count a request."""
        self._full_at[0] = max(self._full_at[0], self._clock()) + 1.0 / self._per_s


class RateLimits:
    """Makes the bounds of a service."""

    def __init__(self, folder: Path | None = None) -> None:
        """folder: where the processes of the service share their bounds. None: there is one process."""
        self._folder = folder

    def limit(self, name: str, per_s: float) -> RateLimit:
        """Return the bound with a name, which is the same in all processes."""
        return RateLimit(per_s, full_at=None if self._folder is None else self._shared(self._folder, name))

    @staticmethod
    def _shared(folder: Path, name: str) -> memoryview[float]:
        path = folder / f"{sha256(name.encode(errors='surrogatepass')).hexdigest()[:32]}.limit"
        cell = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(cell, _CELL_BYTES)
            return memoryview(mmap(cell, _CELL_BYTES)).cast("d")
        finally:
            os.close(cell)
