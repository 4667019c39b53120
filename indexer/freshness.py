"""The reported state of a view. A worker expires only by silence while the event log can be read."""

import math
from collections.abc import Callable

from indexer.views import LATE_S, View, ViewState
from kv_events.streams import HEARTBEAT_S

NO_HEARTBEAT = "no heartbeat"
"""Reason of a view that is stale because of silence."""


class Freshness:
    """Determines the age of views from the time up to which the event log could be read.

    The clock must never go back. It is a monotonic clock for live views and the time of the records for a replay. No
    worker expires while the event log is unavailable. When the log is available again, every worker has a whole
    time-to-live. A view without a batch for two heartbeats is stale, whatever the cause.
    """

    def __init__(self, ttl_s: float, now: float, clock: Callable[[], float] | None = None) -> None:
        """clock: the current time. None: the time up to which the log was read."""
        self.is_catching_up = False
        """Whether the event log has records from before the start that are not applied yet. No view is live then."""
        self._ttl_s = ttl_s
        self.longest_pauses_s = ttl_s / 2, min(ttl_s / 2, LATE_S - HEARTBEAT_S)
        """Times between two readings of the log above which `resumed_at` and `unbroken_since` begin again."""
        self._clock = clock
        self.log_read_at = now
        """Time up to which the event log was read."""
        self.resumed_at = now
        """Time at which the event log became available for the last time."""
        self.unbroken_since = now
        """The same after pauses that are short for a worker to expire, but with which two heartbeats may be missed."""

    def note_log_read(self, now: float) -> None:
        """Record that the event log could be read at this time."""
        pause_s = now - self.log_read_at
        longest_s, longest_unbroken_s = self.longest_pauses_s
        if pause_s > longest_s:
            self.resumed_at = now
        if pause_s > longest_unbroken_s:
            self.unbroken_since = now
        self.log_read_at = max(self.log_read_at, now)

    def silence_s(self, view: View) -> float:
        """Return the seconds during which the event log could be read but had no records from the worker."""
        return self.log_read_at - max(view.last_batch_tick, self.resumed_at)

    def is_silent(self, view: View, tick: float) -> bool:
        """Return whether two heartbeats were missing when a record arrived, so that its sender may be followed.

        tick: the arrival. A closed publisher is silent at once. Otherwise never true after an outage of the event log
        until two heartbeats are missing again, and never while the records of the past are read at the start. A
        time-to-live that is shorter than two heartbeats counts instead.
        """
        return view.is_closed or tick - max(view.silent_from, self.unbroken_since) > min(LATE_S, self._ttl_s)

    def is_expired(self, view: View, tick: float) -> bool:
        """Return whether the worker had been silent for the time-to-live when a record of any worker arrived.

        tick: the arrival. The exceptions of `is_silent` apply.
        """
        return view.is_closed or tick - max(view.last_batch_tick, self.resumed_at) > self._ttl_s

    def state(self, view: View) -> ViewState:
        """Return the state to report and to act on."""
        if view.is_closed or view.last_batch_tick < self.expired_before():
            return ViewState.EXPIRED
        if view.state is not ViewState.LIVE:
            return view.state
        if view.last_batch_tick < self.syncing_before():
            return ViewState.SYNCING
        return ViewState.STALE if view.degraded_reason or self.is_late(view) else ViewState.LIVE

    def expired_before(self) -> float:
        """Return the time such that views which were heard last before it are expired."""
        at = self.log_read_at - self._ttl_s
        return at if self.resumed_at < at else -math.inf

    def syncing_before(self) -> float:
        """Return the time such that views which were heard last before it are syncing: all while catching up."""
        return math.inf if self.is_catching_up else -math.inf

    def late_before(self) -> float:
        """Return the time such that views which were heard last before it miss two heartbeats."""
        return (self.log_read_at if self._clock is None else self._clock()) - LATE_S

    def bounds(self) -> tuple[float, float, float]:
        return self.expired_before(), self.syncing_before(), self.late_before()

    def is_late(self, view: View) -> bool:
        """Return whether two heartbeats of the worker are missing, for example because the event log is unreadable.

        So are they while the batches arrive that have waited for the end of an outage.
        """
        return view.last_batch_tick < self.late_before() or view.is_delayed

    def reason(self, view: View) -> str:
        return view.reason or (NO_HEARTBEAT if self.is_late(view) else "")
