"""What state to show. Silence counts against a worker only while the log itself is known to be alive."""

from __future__ import annotations

from indexer.views import View, ViewState


class Freshness:
    """Judges ages by the time up to which the log was readable.

    Its clock is any that never goes back: a monotonic one for live views, the records' own time for a replay. While
    the log is away nobody can be heard, so nobody expires; when it comes back, everybody gets a
    whole time-to-live again to be heard.
    """

    def __init__(self, ttl_s: float, now: float) -> None:
        self._ttl_s = ttl_s
        self._alive_at = now
        self._resumed_at = now

    def log_is_alive(self, now: float) -> None:
        """The log was readable just now."""
        if now - self._alive_at > self._ttl_s / 2:
            self._resumed_at = now
        self._alive_at = max(self._alive_at, now)

    def silence_s(self, view: View) -> float:
        """Seconds during which a worker could have been heard and was not."""
        return self._alive_at - max(view.heard_tick, self._resumed_at)

    def state(self, view: View) -> ViewState:
        """The state to show and to act on."""
        if self.silence_s(view) > self._ttl_s:
            return ViewState.EXPIRED
        return ViewState.STALE if view.degraded_reason and view.state is ViewState.LIVE else view.state
