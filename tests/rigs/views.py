"""Views whose records and whose clock a test controls: what the consumer does, without tasks."""

from typing import Any

from indexer.applier import Applier, DeadLetters
from indexer.freshness import Freshness
from indexer.namespaces import Namespaces
from indexer.resync import ResyncPlanner
from indexer.settings import IndexerSettings
from indexer.slices import run_at_once
from indexer.tenants import TenantGate
from indexer.views import View, ViewState
from kv_events.records import LogRecord
from kv_events.schema import ResyncRequest
from tests.support.log.records import Stream
from tests.support.log.view_facts import held_pages


class Views:
    """Views of any streams. No worker is silent for the applier unless `follows_silence`."""

    def __init__(
        self, now: float = 0.0, *, follows_silence: bool = False, tenants: TenantGate | None = None, **settings: Any
    ) -> None:
        """tenants: as for `Applier`."""
        self.now = now
        self.settings = IndexerSettings.ignoring_environment(**({"max_pages": 10_000} | settings))
        self.freshness = Freshness(self.settings.worker_ttl_s, now)
        freshness = self.freshness if follows_silence else None
        self.applier = Applier(Namespaces(self.settings), DeadLetters(), freshness, tenants)
        self.planner = ResyncPlanner(self.settings, self.freshness, seed=1)

    def read(self, *records: LogRecord, at: float | None = None, tick: float | None = None) -> None:
        """Apply records. at, tick: as for `Applier.apply`; default: the records' own time."""
        for record in records:
            run_at_once(self.applier.apply(record, record.timestamp_ms / 1000 if at is None else at, tick))

    def read_now(self, *records: LogRecord) -> None:
        """Apply records that arrive now."""
        self.read(*records, at=self.now, tick=self.now)

    def wait(self, seconds: float, step_s: float = 0.5) -> None:
        """Let time pass while the log can be read."""
        for _ in range(round(seconds / step_s)):
            self.now += step_s
            self.freshness.note_log_read(self.now)

    def view(self, stream: Stream) -> View:
        """Return the view of a stream, which there must be."""
        view = self.applier.namespaces.view(stream.id)
        assert view is not None
        return view

    def shown(self, stream: Stream) -> tuple[ViewState, str]:
        """Return the state to show and the reason of the view."""
        view = self.view(stream)
        return self.freshness.state(view), view.reason

    def planned(self) -> list[ResyncRequest]:
        """Return the requests that are due now."""
        return self.planner.plan(self.applier.namespaces, self.now)

    def planned_within(self, seconds: float) -> list[str]:
        """Return the streams that are asked during this time."""
        asked = []
        for _ in range(round(seconds * 10)):
            self.wait(0.1, 0.1)
            asked += [request.stream for request in self.planned()]
        return asked


def held(view: View) -> set[tuple[int, int]]:
    """Return the (page, tier) pairs of a view."""
    return {(page, tier) for page, (_, mask) in held_pages(view).items() for tier in range(4) if mask >> tier & 1}
