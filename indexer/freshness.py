"""The state to show. Silence counts against a worker only while the event log itself can be read."""

from __future__ import annotations

from indexer.views import View, ViewState


class Freshness:
    """Judges ages by the time up to which the log was readable.

    The clock must never go back: a monotonic clock for live views, the time of the records for a replay. While the
    event log is unavailable no worker expires. When it returns, every worker has a whole time-to-live again.
    """

    def __init__(self, ttl_s: float, now: float) -> None:
        self._ttl_s = ttl_s
        self._alive_at = now
        self._resumed_at = now

    def log_is_alive(self, now: float) -> None:
        """Note that the event log could be read just now."""
        if now - self._alive_at > self._ttl_s / 2:
            self._resumed_at = now
        self._alive_at = max(self._alive_at, now)

    def silence_s(self, view: View) -> float:
        """Seconds during which the event log could be read and had nothing from the worker."""
        return self._alive_at - max(view.heard_tick, self._resumed_at)

    def state(self, view: View) -> ViewState:
        """The state to show and to act on."""
        if self.silence_s(view) > self._ttl_s:
            return ViewState.EXPIRED
        return ViewState.STALE if view.degraded_reason and view.state is ViewState.LIVE else view.state
