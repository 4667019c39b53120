"""What there is to show at one moment."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from api.decisions.window import DecisionWindow
from api.page.worker_history import WorkerHistory
from api.problems import ProblemError, ProblemKind
from api.view_source import ViewSource
from api.workers.description import Engines
from indexer.consumer import Consumer
from indexer.views import View
from kv_events.http.fleet import Funnel

if TYPE_CHECKING:
    from api.workers.registrations import Registrations


@dataclass(frozen=True, slots=True, kw_only=True)
class PageState:
    """The views and their history. Everything is read in the event loop that changes them."""

    key: str
    """Answers about scenes with equal keys are shared. The live scene has the key ""."""
    is_past: bool
    views: ViewSource
    is_resync_requested: Callable[[View], bool]
    engines: Engines
    """Registered engines, which have no view until they are heard."""
    watch: WorkerHistory
    funnel: Callable[[float], Funnel]
    """Returns the funnel of the hour before a time, in seconds since 1970."""


PageStateAt: TypeAlias = Callable[[str | None], Awaitable[PageState]]
"""Returns the scene of a moment, the text of `?at=`, or of None, which is now. Raises ProblemError for a bad moment."""


class LivePageState:
    """Opens the live scene. `watch` and `funnel` are filled by others."""

    def __init__(self, consumer: Consumer, registrations: Registrations | None) -> None:
        self._consumer = consumer
        self._registrations = registrations
        self.watch = WorkerHistory()
        self.funnel = DecisionWindow()

    async def open(self, at: str | None) -> PageState:
        """Return the scene. See `PageStateAt`."""
        if at is not None:
            detail = "at: this service shows the present only; `kvsight replay LOG --serve` shows the past"
            raise ProblemError(422, ProblemKind.INVALID_VALUE, detail, "at", at)
        consumer = self._consumer
        return PageState(
            key="",
            is_past=False,
            views=consumer,
            is_resync_requested=consumer.resyncs.is_requested,
            engines={} if self._registrations is None else self._registrations.status(),
            watch=self.watch,
            funnel=self.funnel.report,
        )
