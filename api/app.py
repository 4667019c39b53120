"""The application: its parts, and the order in which they start and stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.routing import Route

from api.access.guard import Guard, check_tokens
from api.access.origins import check_origin
from api.access.tenants import TenantRates
from api.access.tokens import TokenRegistry
from api.decisions.routes import DecisionRoute
from api.fast.fast_path import FastPath
from api.fast.local_answers import LocalAnswers
from api.openapi import DocumentedApp
from api.page.routes import page_routes
from api.page.state import LivePageState
from api.page.tokenize import TokenizeRoute
from api.queries.explain import ExplainRoute
from api.queries.routes import QueryRoutes
from api.service import service_routes
from api.settings import ApiSettings
from api.static_files import static_routes
from api.telemetry.families import recording_families
from api.telemetry.requests import ObserveRequests
from api.telemetry.service_metrics import HttpMetrics, decision_families, tenant_families
from api.telemetry.traced_requests import TraceRequests
from api.workers.dump import dump_routes
from api.workers.event_stream import EventStream, feed_routes
from api.workers.register import RegisterRoutes
from api.workers.routes import worker_routes
from indexer.consumer import Consumer
from indexer.decisions.log import DecisionLog
from indexer.recording.thread import RecordingThread
from kv_events.runtime.tracing import open_spans

if TYPE_CHECKING:
    from api.shards.group import ShardGroup
    from api.workers.registrations import Registrations


class Application(DocumentedApp):
    """The application of the live service."""

    def end_streams(self) -> None:
        """End the endless answers, because the server is about to stop."""
        feed: EventStream = self.state.feed
        feed.close()


def create_app(
    consumer: Consumer,
    settings: ApiSettings,
    registrations: Registrations | None = None,
    decisions: DecisionLog | None = None,
    recording: RecordingThread | None = None,
    event_log: Path | None = None,
    group: ShardGroup | None = None,
) -> Application:
    """Create the application for a consumer that is not running yet. Its lifespan runs it in the same event loop.

    registrations: engines that this process reads itself. None if it reads none; registrations are then refused.
    decisions: what keeps the decisions of routers. None: they are dropped. recording: what records the log, or None.
    event_log: folder of the event log that the consumer reads, for explanations. None: they come from the recording.
    group: the group that this process is a member of. None: it answers from its own views alone.
    """
    decisions = decisions or DecisionLog(None)
    limits = consumer.tenant_limits
    tenants = None if limits is None else TenantRates(limits)
    scene = LivePageState(consumer, registrations)
    tokens = TokenRegistry.of(settings)
    spans = open_spans()
    degraded = str if recording is None else lambda: recording.degraded

    def forget_callers() -> None:
        fast_path.heads.forget()
        feed.end_streams(lambda authorization: tokens.permits(authorization, "read"))

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        engines = nullcontext() if registrations is None else registrations.running()
        recorded = nullcontext() if recording is None else recording.running()
        followed = tokens.following(forget_callers)
        limited = nullcontext() if tenants is None else tenants.following()
        watched = scene.watch.running(consumer)
        shared = nullcontext() if group is None else group.running()
        async with (
            followed,
            limited,
            recorded,
            shared,
            consumer.running(),
            engines,
            decisions.running(),
            watched,
        ):
            yield
        if spans is not None:
            await asyncio.to_thread(spans.end)

    app = Application(lifespan, needs_token=tokens.are_required)
    app.state.scene = scene
    app.state.feed = feed = EventStream(consumer, settings.max_event_clients)
    local = LocalAnswers(consumer, tenants)
    answerer = local if group is None else group.gatherer
    queries = QueryRoutes(
        answerer, lambda: settings.answer_before_ready or consumer.ready, settings.max_body_bytes, tenants
    )
    endpoints, fast = queries.endpoints(), None
    if group is not None:
        endpoints |= group.endpoints(settings.max_body_bytes)
        fast = group.fast_answers(has_tenants=tenants is not None)
    metrics = HttpMetrics(consumer, endpoints, feed, settings.metrics_max_workers)
    app.state.fast_path = fast_path = FastPath(consumer, settings, tokens, metrics, local, fast)
    if tenants is not None:
        metrics.add(lambda: tenant_families(consumer, tenants))
    if registrations is not None:
        metrics.registry.register(registrations.metrics())
    metrics.add(lambda: decision_families(decisions))
    if recording is not None:
        metrics.add(lambda: recording_families(recording.recorder))
    rare = (
        RegisterRoutes(registrations),
        DecisionRoute(consumer, decisions, scene.funnel.take),
        TokenizeRoute(settings.tokenize_url),
        ExplainRoute(event_log or settings.record, settings.explain_timeout_s),
    )
    others = {path: endpoint for routes in rare for path, endpoint in routes.endpoints().items()}
    for path, endpoint in {**endpoints, **others}.items():
        app.router.routes.append(Route(path, endpoint, methods=["POST"]))
    app.include_router(service_routes(consumer, metrics, registrations, degraded))
    app.include_router(worker_routes(consumer, registrations, consumer.resyncs.demand))
    app.include_router(dump_routes(consumer))
    app.include_router(feed_routes(feed))
    app.router.routes += static_routes()
    app.include_router(page_routes(scene.open))
    # no middleware sees the requests that `FastPath` answers; the fast path has the rules of those below
    # the last middleware added is the outermost one, so that refused requests are counted, too
    if group is not None:
        group.add_to(app)
        metrics.add(group.families)
    if spans is not None:
        app.add_middleware(TraceRequests, spans=spans, paths=endpoints)
    app.add_middleware(Guard, checks=[check_origin(settings.is_allowed_host), check_tokens(tokens)])
    app.add_middleware(ObserveRequests, metrics=metrics)
    return app
