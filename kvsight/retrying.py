"""When a client tries again, and how long it waits before."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

import httpx

from kv_events import backoff

_COME_BACK = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
_BROKEN = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)
"""No connection, or one that broke. A server that is merely slow is not asked for the same thing again."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Attempts and pauses; the pauses double, and each is shortened at random by up to a half."""

    attempts: int = 3
    """At most; 1: never again."""
    first_pause_s: float = 0.05
    longest_pause_s: float = 2.0
    """Also the longest that a server's Retry-After is heeded; a later one ends the attempts."""

    def pause(self, attempt: int, outcome: httpx.Response | httpx.HTTPError) -> float | None:
        """Seconds to wait after an attempt (0, 1, ...) that ended so; None: it was the last one."""
        if attempt + 1 >= self.attempts:
            return None
        asked = 0.0
        if isinstance(outcome, httpx.Response):
            if outcome.status_code not in _COME_BACK:
                return None
            after = outcome.headers.get("retry-after", "")
            asked = float(after) if after.isascii() and after.isdecimal() else 0.0
        elif not isinstance(outcome, _BROKEN):
            return None
        pause_s = backoff.pause_s(attempt, self.first_pause_s, self.longest_pause_s)
        return None if asked > self.longest_pause_s else max(asked, pause_s)
