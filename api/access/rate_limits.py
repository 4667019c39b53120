"""Bounds on requests in a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar

_ROUNDING_S = 1e-6


class RateLimit:
    """A bound on requests in a second. What a second leaves unused may come at once in the next one."""

    def __init__(self, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._spare_s = (max(1.0, per_s) - 1.0) / per_s
        self._clock = clock
        self._full_at = 0.0  # when a whole second's requests are permitted again, by the clock

    def wait_s(self) -> float:
        """Return the seconds after which a request is permitted; 0.0 if it is now."""
        wait_s = self._full_at - self._clock() - self._spare_s
        return wait_s if wait_s > _ROUNDING_S else 0.0

    def note(self, count: int = 1) -> None:
        """Count requests. More than are permitted now delay those after them."""
        self._full_at = max(self._full_at, self._clock()) + count / self._per_s


OF_REQUEST: ContextVar[RateLimit | None] = ContextVar("limit_of_request", default=None)
"""Bound on the requests with the token of the request that is being answered, which is counted already. The queries of
a batch count as requests of their own."""
