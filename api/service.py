"""What an application serves: the present, or (in `api.replay`) any moment of a log."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from fastapi import APIRouter
from starlette.middleware import Middleware

from api.access.guard import OPEN_PATHS
from api.access.rate_limits import TenantRates
from api.access.tokens import TokenRegistry
from api.decisions.routes import DecisionRoute
from api.decisions.window import DecisionWindow
from api.fast.fast_path import FastPath
from api.fast.local_answers import LocalAnswers
from api.page.routes import tokenize_endpoint
from api.page.state import PageState
from api.page.worker_history import WorkerHistory
from api.problems import ProblemError, ProblemKind
from api.prompts.renderer import PromptRenderer
from api.queries.explain import ExplainRoute
from api.queries.routes import QueryRoutes
from api.selection.routes import SelectionRoutes
from api.settings import ApiSettings, RegistrationSettings
from api.telemetry.families import counter, gauge, recording_families
from api.telemetry.requests import TraceRequests
from api.telemetry.service_metrics import (
    HttpMetrics,
    metrics_text,
    queue_families,
    reservation_families,
    tenant_families,
)
from api.view_source import Capacity, ViewSource
from api.workers.event_stream import EventStream, feed_routes
from api.workers.records import WorkerRecords
from api.workers.register import RegisterRoutes
from api.workers.routes import worker_routes
from indexer.consumer import Consumer
from indexer.recording.recorder import RecordingThread
from indexer.writing.queue import RESERVATIONS, WriteQueue
from kv_events.http.service import Status
from kv_events.remedies import NO_ENGINE, NO_PUBLISHER
from kv_events.runtime.supervised import leaving_together
from kv_events.runtime.tracing import open_spans
from kv_events.streams import StreamId
from selection.book import Booked
from selection.exchange import ReservationExchange
from selection.settings import SelectionSettings

if TYPE_CHECKING:
    from api.shards.group import ShardGroup
    from api.workers.registrations import Registrations


Endpoint: TypeAlias = Callable[..., Any]
"""A function of a request, or an instance that is an ASGI application. See `starlette.routing.Route`."""


class Service(ABC):
    """What an application serves. Everything is read in the event loop that changes it."""

    http_metrics: HttpMetrics | None = None
    """What counts requests. None: they are not counted."""
    fast_path: FastPath | None = None
    """What answers queries inside the HTTP protocol. None: all requests are passed to FastAPI."""
    open_paths: Set[str] = OPEN_PATHS
    """Paths that need no token."""
    endpoints: Mapping[str, Endpoint]
    """Path -> what answers POST."""
    routers: Sequence[APIRouter]
    """Routes besides those that every service has."""
    middleware: Sequence[Middleware]
    """The outermost first. All of it is inside `ObserveRequests` and `Guard`."""

    def __init__(self, views: ViewSource, settings: ApiSettings) -> None:
        """views: those that are shown. Raises InvalidValueError for a bad file of tokens."""
        self.views = views
        self.settings = settings
        self.tokens = TokenRegistry(settings)

    @abstractmethod
    def running(self) -> AbstractAsyncContextManager[None]:
        """Run the service during a block."""

    @abstractmethod
    async def page_state(self, at: str | None) -> PageState:
        """Return what the page shows. at: the text of `?at=`, or None. Raises ProblemError for a bad moment."""

    @abstractmethod
    async def metrics(self) -> bytes:
        """Return the metrics in Prometheus' text format 0.0.4. Queries can run between two slices of it."""

    def health(self) -> Status:
        """Return the answer of /health. Raises ProblemError (503)."""
        return Status(status="ok")

    def why_not_ready(self) -> str:
        """Return why the service is not ready, or "" if it is."""
        return ""

    def num_schedulable(self) -> int:
        """Return the number of workers that get new requests."""
        return 0

    def end_streams(self) -> None:  # noqa: B027  (most services have none)
        """End the endless answers, because the server is about to stop."""

    def amend_document(self, document: dict[str, Any]) -> None:  # noqa: B027
        """Change the OpenAPI document where this service differs from the live one."""


class LiveService(Service):
    """The present: the views of a consumer, and what callers report and change."""

    def __init__(
        self,
        consumer: Consumer,
        settings: ApiSettings,
        registrations: Registrations | None = None,
        decisions: WriteQueue | None = None,
        recording: RecordingThread | None = None,
        event_log: Path | None = None,
        group: ShardGroup | None = None,
        selection: SelectionSettings | None = None,
        limits: RegistrationSettings | None = None,
        reservations: ReservationExchange | None = None,
    ) -> None:
        """consumer: one that is not running yet; the service runs it.

        registrations: engines that this process reads itself. None if it reads none; registrations are then refused.
        decisions: what keeps the decisions of routers. None: they are dropped. recording: what records the log, or
        None. event_log: folder of the event log that the consumer reads, for explanations. None: they come from the
        recording. group: the group that this process is a member of. None: it answers from its own views alone.
        selection: how workers are chosen. Members of groups choose none, because each has a part of the views only.
        limits: on the records of workers.
        reservations: the book of what was chosen, and what keeps it. None: a book of this service alone.
        """
        super().__init__(consumer, settings)
        self._consumer = consumer
        self.feed = EventStream(consumer, settings.max_event_clients)
        self.history = WorkerHistory()
        self.decision_window = DecisionWindow()
        self._registrations = registrations
        self._records = WorkerRecords(consumer, limits or RegistrationSettings(), registrations)
        self.capacity: Capacity = self._records.pages
        """Who runs the engines may replace it."""
        self._decisions = decisions or WriteQueue(None)
        self._recording = recording
        self._group = group
        self._tenants = None if consumer.tenant_limits is None else TenantRates(consumer.tenant_limits)
        self._spans = open_spans()
        self.renderer = PromptRenderer(settings)
        local = LocalAnswers(consumer)
        answerer = local if group is None else group.gatherer
        parts = answerer, self._check_ready, settings.max_body_bytes, self._tenants, self.renderer
        self.endpoints: dict[str, Endpoint] = {**QueryRoutes(*parts).endpoints()}
        self.selection = None
        if group is not None:
            self.endpoints |= group.endpoints(settings.max_body_bytes)
        else:
            chosen = selection or SelectionSettings()
            exchange = reservations or ReservationExchange(chosen.book(), WriteQueue(None, contents=RESERVATIONS))
            exchange.listener = self.decision_window
            self.selection = SelectionRoutes(
                consumer,
                chosen,
                self._records,
                exchange,
                self.renderer,
                self._tenants,
                self._check_ready,
                settings.max_body_bytes,
            )
            self.endpoints |= self.selection.endpoints()
        self.middleware = [] if group is None else [group.middleware()]
        if self._spans is not None:
            self.middleware.insert(0, Middleware(TraceRequests, spans=self._spans, paths=[*self.endpoints]))
        self.http_metrics: HttpMetrics = self._created_metrics([*self.endpoints])
        self.fast_path: FastPath = FastPath(
            consumer,
            settings,
            self.tokens,
            self.http_metrics,
            local,
            self._tenants,
            None if group is None else group.fast_answers(has_tenants=self._tenants is not None),
            {} if self.selection is None else self.selection.text_routes(),
            None if self.selection is None else self.selection.reservations.bodyless_route(),
        )
        for routes in (
            RegisterRoutes(registrations, consumer),
            DecisionRoute(consumer, self._decisions, self.decision_window.take),
            ExplainRoute(event_log or settings.record, settings.explain_timeout_s),
        ):
            self.endpoints |= routes.endpoints()
        self.endpoints["/tokenize"] = tokenize_endpoint(self.renderer)
        self.routers = [
            worker_routes(consumer, registrations, consumer.resyncs.demand, self._records),
            feed_routes(self.feed),
        ]
        if group is not None:
            self.routers.append(group.routes())
        if self.selection is not None:
            self.routers.append(self.selection.reservations.router())

    def _check_ready(self) -> None:
        if self._group is not None:
            self._group.gatherer.check_ready()
        if not (self.settings.answer_before_ready or self._consumer.ready):
            raise ProblemError(503, ProblemKind.UNAVAILABLE, "the log is not applied yet, see /ready", retry_after_s=1)

    def _created_metrics(self, timed_paths: Sequence[str]) -> HttpMetrics:
        consumer, tenants, recording = self._consumer, self._tenants, self._recording
        max_workers = self.settings.metrics_max_workers
        metrics = HttpMetrics(consumer, timed_paths, max_workers, lambda *of: self.capacity(*of))
        metrics.add(lambda: [gauge("kvsight_event_clients", "Callers of GET /events", self.feed.num_clients)])
        if tenants is not None:
            metrics.add(lambda: tenant_families(consumer, tenants))
        if self._registrations is not None:
            metrics.registry.register(self._registrations.metrics(has_workers=max_workers > 0))
        metrics.add(lambda: queue_families(self._decisions))
        texts = "Queries with text, by what became of it"
        metrics.add(lambda: [counter("kvsight_texts", texts, self.renderer.outcomes, "outcome")])
        if (selection := self.selection) is not None:
            metrics.add(lambda: reservation_families(selection.exchange))
        if recording is not None:
            metrics.add(lambda: recording_families(recording.recorder))
        if self._group is not None:
            metrics.add(self._group.families)
        return metrics

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.tokens.following(self._forget_callers))
            if self._tenants is not None:
                await stack.enter_async_context(self._tenants.following())
            exchange = None if self.selection is None else self.selection.exchange
            for part in (self._recording, self._group, self._consumer, self._registrations):
                if part is not None:
                    await stack.enter_async_context(part.running())
            writers = (part.running() for part in (self._decisions, exchange) if part is not None)
            await stack.enter_async_context(leaving_together(*writers))
            await stack.enter_async_context(self._records.running())
            stack.push_async_callback(self.renderer.aclose)
            await stack.enter_async_context(self.history.running(self._consumer))
            yield
        if self._spans is not None:
            await asyncio.to_thread(self._spans.end)

    def _forget_callers(self) -> None:
        self.fast_path.heads.forget()
        self.feed.end_streams(lambda authorization: self.tokens.permits(authorization, "read"))

    def end_streams(self) -> None:
        self.feed.close()

    async def page_state(self, at: str | None) -> PageState:
        if at is not None:
            detail = "at: this service shows the present only; `kvsight replay LOG --serve` shows the past"
            raise ProblemError(422, ProblemKind.INVALID_VALUE, detail, "at", at)
        if self.selection is not None:
            self.selection.exchange.expire(self._consumer.now())
        return PageState(
            key="",
            is_past=False,
            can_forget_expired=self._registrations is None,
            views=self._consumer,
            is_resync_requested=self._consumer.resyncs.is_requested,
            next_step=NO_PUBLISHER if self._registrations is None else NO_ENGINE,
            engines={} if self._registrations is None else self._registrations.status(),
            capacity=self.capacity,
            booked=self._booked,
            watch=self.history,
            funnel=self.decision_window.report,
        )

    def _booked(self, stream: StreamId) -> Booked:
        return Booked() if self.selection is None else self.selection.exchange.book.booked(stream)

    def health(self) -> Status:
        if self._consumer.failure is not None:
            detail = f"the consumer has failed: {type(self._consumer.failure).__name__}"
            raise ProblemError(503, ProblemKind.UNAVAILABLE, detail)
        return Status(status="ok", recording="" if self._recording is None else self._recording.degraded)

    def num_schedulable(self) -> int:
        return self._records.num_schedulable()

    def why_not_ready(self) -> str:
        registrations, selection = self._registrations, self.selection
        return (
            self._consumer.why_not_ready()
            or (registrations and registrations.why_not_ready())
            or (selection and selection.exchange.why_not_ready())
            or ""
        )

    async def metrics(self) -> bytes:
        return await metrics_text(self.http_metrics.registry)
