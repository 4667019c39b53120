"""The reported state of a view. Silence counts against a worker only while the event log can be read."""

from __future__ import annotations

from indexer.views import View, ViewState


class Freshness:
    """Determines the age of views from the time up to which the event log could be read.

    The clock must never go back. It is a monotonic clock for live views and the time of the records for a replay. No
    worker expires while the event log is unavailable. When the log is available again, every worker has a whole
    time-to-live.
    """

    def __init__(self, ttl_s: float, now: float) -> None:
        self.is_catching_up = False
        """Whether the event log has records from before the start that are not applied yet. No view is live then."""
        self._ttl_s = ttl_s
        self._log_read_at = now
        self._resumed_at = now

    def note_log_read(self, now: float) -> None:
        """Record that the event log could be read at this time."""
        if now - self._log_read_at > self._ttl_s / 2:
            self._resumed_at = now
        self._log_read_at = max(self._log_read_at, now)

    def silence_s(self, view: View) -> float:
        """Return the seconds during which the event log could be read but had no records from the worker."""
        return self._log_read_at - max(view.heard_tick, self._resumed_at)

    def is_silent(self, view: View, tick: float) -> bool:
        """Return whether the worker had been silent for the time-to-live when a record arrived. tick: the arrival.

        Never true during an outage of the event log, and never while the records of the past are read at the start.
        """
        return tick - max(view.heard_tick, self._resumed_at) > self._ttl_s

    def state(self, view: View) -> ViewState:
        """Return the state to report and to act on."""
        if self.silence_s(view) > self._ttl_s:
            return ViewState.EXPIRED
        if self.is_catching_up and view.state is ViewState.LIVE:
            return ViewState.SYNCING
        return ViewState.STALE if view.degraded_reason and view.state is ViewState.LIVE else view.state
