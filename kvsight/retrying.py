"""When a client retries a request, and how long it waits first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from http import HTTPStatus

import httpx

from kv_events.errors import InvalidValueError, check_type
from kv_events.runtime import backoff

_RETRY_LATER = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
_BROKEN = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)
"""No connection, or a broken one. A request that timed out is not repeated: the server may only be slow."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Number of attempts and pauses between them. Pauses double; each is randomly shortened by up to half."""

    attempts: int = 3
    """Maximum number of attempts; 1 disables retries."""
    first_pause_s: float = 0.05
    longest_pause_s: float = 2.0
    """Also the longest Retry-After of a server that is honoured. A longer one ends the attempts."""

    def __post_init__(self) -> None:
        """Raises InvalidValueError."""
        check_type("attempts", self.attempts, int)
        if self.attempts < 1:
            raise InvalidValueError("attempts", self.attempts, "a positive integer")
        for field in ("first_pause_s", "longest_pause_s"):
            check_type(field, getattr(self, field), int | float)
            if not 0 <= getattr(self, field) < math.inf:
                raise InvalidValueError(field, getattr(self, field), "seconds, not negative")

    def pause(self, attempt: int, outcome: httpx.Response | httpx.HTTPError) -> float | None:
        """Seconds to wait before the next attempt; None if there is none. attempt: 0, 1, ..."""
        if attempt + 1 >= self.attempts:
            return None
        asked = 0.0
        if isinstance(outcome, httpx.Response):
            if outcome.status_code not in _RETRY_LATER:
                return None
            after = outcome.headers.get("retry-after", "")
            asked = float(after) if after.isascii() and after.isdecimal() else 0.0
        elif not isinstance(outcome, _BROKEN):
            return None
        pause_s = backoff.pause_s(attempt, self.first_pause_s, self.longest_pause_s)
        return None if asked > self.longest_pause_s else max(asked, pause_s)
