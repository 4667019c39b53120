"""Resync requests: selects the publishers that must resend everything they hold, and the times of the requests."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from indexer.freshness import Freshness
from indexer.namespaces import Namespaces
from indexer.settings import IndexerSettings
from indexer.views import INDEX_FULL, RESYNC_CUT_OFF, TENANT_PAGES, View, ViewState
from kv_events.schema import ResyncRequest
from kv_events.streams import StreamId

_Audience = tuple[StreamId, int]
"""Stream and epoch: one publisher."""

OPERATOR = "operator"
"""Reason of a resync that a caller of the API asked for."""
_FULL = (INDEX_FULL, TENANT_PAGES)
RESYNC_REASONS = (
    *("new", "gap", "digest", "restart", RESYNC_CUT_OFF),
    *(*_FULL, "log replaced", "internal error", OPERATOR),
)
"""All reasons of requests."""

_LONGEST_PAUSE_S = 60.0
_KNOWN_IN_A_ROW = 4


@dataclass(slots=True)
class _Pending:
    """A view that needs a resync."""

    due_at: float
    pause_s: float
    """Time between the next request and the one after it."""
    num_requests: int = 0
    """Requests that were not answered yet."""


class ResyncPlanner:
    """Chooses the stale views whose publishers are asked now.

    A view is asked for after a short random delay, then again after pauses that double. All views together stay below
    `resync_rate_per_s`, so that many broken streams do not starve live events. Expired views are not asked for.

    Streams whose publisher has answered before come first, and among equals those that were asked least and were heard
    last. So streams without a publisher that listens, however many, do not delay the others. If both kinds are due, one
    request in five goes to a stream whose publisher has not answered before.
    """

    def __init__(
        self,
        settings: IndexerSettings,
        freshness: Freshness,
        seed: int | None = None,
        *,
        is_behind: Callable[[View], bool] = lambda _: False,
    ) -> None:
        """is_behind: whether records of a view are still to be read, which may repair it."""
        self._is_behind = is_behind
        self._settings = settings
        self._freshness = freshness
        self._random = random.Random(seed)  # noqa: S311  (jitter, not secrets)
        self._pending: dict[_Audience, _Pending] = {}
        self._demanded: set[StreamId] = set()
        self._budget = 1.0
        self._last_plan: float | None = None
        self._num_known_in_a_row = 0  # requests to known publishers since one to an unknown publisher
        self.requested: Counter[str] = Counter(dict.fromkeys(RESYNC_REASONS, 0))
        """Reason -> requests planned so far."""

    def demand(self, view: View) -> None:
        """Include a view in the next plan, whatever its state: an operator asked for it."""
        self._demanded.add(view.stream)

    def is_requested(self, view: View) -> bool:
        """Return whether the view's publisher was asked for a resync that has not ended yet."""
        pending = self._pending.get((view.stream, view.epoch))
        return pending is not None and pending.num_requests > 0

    def plan(self, namespaces: Namespaces, now: float) -> list[ResyncRequest]:
        """Return the requests to send now. now: monotonic seconds."""
        self._refill_budget(now)
        requests = self._demanded_requests(namespaces)
        stale = {(view.stream, view.epoch): view for view in namespaces.views if self._is_repairable(view)}
        self._pending = {audience: self._pending.get(audience) or self._first(now) for audience in stale}
        due = [view for audience, view in stale.items() if self._pending[audience].due_at <= now]
        known = sorted((view for view in due if _has_answered(view)), key=self._order)
        unknown = sorted((view for view in due if not _has_answered(view)), key=self._order)
        while self._budget >= 1.0 and (known or unknown):
            is_turn_of_unknown = unknown and (not known or self._num_known_in_a_row >= _KNOWN_IN_A_ROW)
            self._num_known_in_a_row = 0 if is_turn_of_unknown else self._num_known_in_a_row + 1
            requests.append(self._request((unknown if is_turn_of_unknown else known).pop(0), now))
        self.requested.update(request.reason for request in requests)
        return requests

    def _order(self, view: View) -> tuple[int, float]:
        return self._pending[view.stream, view.epoch].num_requests, self._freshness.silence_s(view)

    def _request(self, view: View, now: float) -> ResyncRequest:
        self._budget -= 1.0
        pending = self._pending[view.stream, view.epoch]
        pending.due_at = now + pending.pause_s * self._random.uniform(1.0, 1.5)
        pending.pause_s = min(2 * pending.pause_s, _LONGEST_PAUSE_S)
        pending.num_requests += 1
        return ResyncRequest(view.stream.key, view.epoch, view.stale_reason)

    def _refill_budget(self, now: float) -> None:
        rate = self._settings.resync_rate_per_s
        elapsed = 0.0 if self._last_plan is None else now - self._last_plan
        self._last_plan = now
        self._budget = min(max(1.0, rate), self._budget + elapsed * rate)

    def _demanded_requests(self, namespaces: Namespaces) -> list[ResyncRequest]:
        requests = []
        for stream in list(self._demanded):
            if self._budget < 1.0:
                break
            self._demanded.remove(stream)
            view = namespaces.view(stream)
            if view is not None:
                self._budget -= 1.0
                requests.append(ResyncRequest(stream.key, view.epoch, OPERATOR))
        return requests

    def _first(self, now: float) -> _Pending:
        # the heartbeat after a gap may already prove that only heartbeats were lost
        return _Pending(now + self._random.uniform(0.0, 0.2), self._settings.resync_retry_s)

    def _is_repairable(self, view: View) -> bool:
        """Return whether a resync can help. Requests for a view whose pages do not fit would never end."""
        is_wanted = view.state is ViewState.STALE and (view.stale_reason not in _FULL or view.index.has_room)
        return is_wanted and not self._is_behind(view) and self._freshness.state(view) is not ViewState.EXPIRED


def _has_answered(view: View) -> bool:
    """Return whether the publisher of a view has sent a resync since this process knows it."""
    return view.counters.resyncs > 0
