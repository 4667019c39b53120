"""The live scene: the views of the consumer now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from api.decisions.window import DecisionWindow
from api.page.state import PageState
from api.page.worker_history import WorkerHistory
from api.problems import ProblemError, ProblemKind
from indexer.consumer import Consumer

if TYPE_CHECKING:
    from api.workers.registrations import Registrations


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
