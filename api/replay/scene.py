"""What the page shows of a moment."""

from __future__ import annotations

from pathlib import Path

from api.page.state import PageState
from api.page.worker_history import WorkerHistory
from api.replay.curves import DecisionHistory, RateHistory
from api.replay.markers import MarkerSearch
from api.replay.moments import History, OpenMoments
from api.replay.service import ReplayViews, present_moment
from indexer.replay import Timeline


class PageStates:
    """Opens the scene of the moment that a request names."""

    def __init__(self, folder: Path, moments: OpenMoments, marks: MarkerSearch) -> None:
        self._moments = moments
        self._marks = marks
        self._rates = RateHistory()
        self._decisions = DecisionHistory(folder)

    async def open(self, _at: str | None) -> PageState:
        """Return the scene of the moment that `MomentMiddleware` holds open. See `PageStateAt`."""
        opened = present_moment()
        index, now = opened.views.index, opened.views.now

        def history(timeline: Timeline) -> History:
            return opened.history or History(
                self._rates.rates(timeline, now), self._decisions.funnel(timeline, index, now)
            )

        found = opened.history
        if found is None:
            found = opened.history = await self._moments.work(history)
        return PageState(
            key=f"{opened.moment.text} {self._moments.extent.next_index} {self._marks.next_index}",
            is_past=True,
            views=ReplayViews(),
            is_resync_requested=lambda _view: False,
            engines={},
            watch=WorkerHistory.of_past(found.rates, self._marks.changes_before(index)),
            funnel=lambda _now: found.funnel,
        )
