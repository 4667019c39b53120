"""When to ask a publisher to name everything again: not too often, not all at once."""

from __future__ import annotations

import random
from dataclasses import dataclass

from indexer.namespaces import Namespaces
from indexer.settings import IndexerSettings
from indexer.views import INDEX_FULL, View, ViewState
from kv_events.schema import ResyncRequest
from kv_events.streams import StreamId

_LONGEST_PAUSE_S = 60.0


@dataclass(slots=True)
class _Wish:
    due_at: float
    pause_s: float


class ResyncPlanner:
    """Chooses which stale views to ask for now.

    A view is asked for after a short random delay, then again after pauses that double; all views together stay under
    `resync_rate_per_s`, so that many broken streams never starve live events.
    """

    def __init__(self, settings: IndexerSettings, seed: int | None = None) -> None:
        self._settings = settings
        self._random = random.Random(seed)  # noqa: S311  (jitter, not secrets)
        self._wishes: dict[StreamId, _Wish] = {}
        self._demanded: set[StreamId] = set()
        self._budget = 1.0
        self._last_plan: float | None = None
        self.requested = 0
        """Requests planned so far."""

    def demand(self, view: View) -> None:
        """An operator wants this view resynchronised at the next plan, whatever its state."""
        self._demanded.add(view.stream)

    def plan(self, namespaces: Namespaces, now: float) -> list[ResyncRequest]:
        """The requests to send now."""
        rate = self._settings.resync_rate_per_s
        elapsed = 0.0 if self._last_plan is None else now - self._last_plan
        self._last_plan = now
        self._budget = min(max(1.0, rate), self._budget + elapsed * rate)
        requests = self._demanded_requests(namespaces)
        stale = {view.stream: view for view in namespaces.views if _can_be_mended(view)}
        self._wishes = {stream: wish for stream, wish in self._wishes.items() if stream in stale}
        for stream, view in stale.items():
            wish = self._wishes.setdefault(stream, self._first_wish(now))
            if wish.due_at <= now and self._budget >= 1.0:
                self._budget -= 1.0
                wish.due_at = now + wish.pause_s * self._random.uniform(1.0, 1.5)
                wish.pause_s = min(2 * wish.pause_s, _LONGEST_PAUSE_S)
                requests.append(ResyncRequest(stream.key, view.epoch, view.stale_reason))
        self.requested += len(requests)
        return requests

    def _demanded_requests(self, namespaces: Namespaces) -> list[ResyncRequest]:
        requests = []
        for stream in list(self._demanded):
            if self._budget < 1.0:
                break
            self._demanded.remove(stream)
            view = namespaces.view(stream)
            if view is not None:
                self._budget -= 1.0
                requests.append(ResyncRequest(stream.key, view.epoch, "operator"))
        return requests

    def _first_wish(self, now: float) -> _Wish:
        # the heartbeat after a gap may already prove that only heartbeats were lost
        return _Wish(now + self._random.uniform(0.0, 0.2), self._settings.resync_retry_s)


def _can_be_mended(view: View) -> bool:
    """A view whose pages did not fit would ask for ever."""
    return view.state is ViewState.STALE and (view.stale_reason != INDEX_FULL or view.index.has_room)
