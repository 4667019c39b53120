"""The application that serves the past: the reading routes of the service, at any moment of an event log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from api.access.guard import OPEN_PATHS, Guard, check_tokens
from api.access.origins import check_origin
from api.access.tokens import TokenRegistry
from api.fast.local_answers import LocalAnswers
from api.openapi import DocumentedApp
from api.page.routes import page_routes
from api.problems import ProblemError, ProblemKind
from api.queries.explain import ExplainRoute
from api.queries.routes import QueryRoutes
from api.replay.markers import MarkerSearch
from api.replay.moments import OpenMoments
from api.replay.routes import AT_TEXT, metrics_routes, past_routes
from api.replay.service import MomentMiddleware, PageStates, ReplayViews, present_moment, shows_moment
from api.settings import ApiSettings
from api.static_files import static_routes
from api.telemetry.requests import ObserveRequests
from api.workers.dump import dump_routes
from api.workers.routes import worker_routes
from kv_events.log.moments import LogMoment

_WRITING = ("/register", "/unregister", "/decisions", "/workers/{worker:path}/resync")
"""Paths of the live service that change something."""
_OPEN_PATHS = OPEN_PATHS - {"/metrics"}
"""Paths without a token. The metrics are those of a moment, which has to be opened."""


class PastApplication(DocumentedApp):
    """The application of a replay."""

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, in which each route has its moment."""
        if self.openapi_schema is not None:
            return self.openapi_schema
        document = super().openapi()
        for path in _WRITING:
            document["paths"].pop(path, None)
        document["paths"]["/metrics"]["get"].pop("security", None)
        at = {"name": "at", "in": "query", "schema": {"type": "string"}, "description": AT_TEXT}
        for path, operations in document["paths"].items():
            for operation in operations.values() if shows_moment(path) else ():
                others = [each for each in operation.get("parameters", []) if each["name"] != "at"]
                operation["parameters"] = [*others, at]
        return document


def create_past_app(folder: Path, settings: ApiSettings, default: LogMoment, damage: list[str]) -> PastApplication:
    """Create the application for the log in a folder.

    default: the moment of requests that name none; `LogMoment()`: the end of the log. damage: what of the log is known
    to be unusable. Raises EventLogError or OSError.
    """
    moments = OpenMoments(folder, default)
    marks = MarkerSearch(folder, moments.extent.first_index)
    tokens = TokenRegistry.of(settings)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with marks.running(moments.extent.next_index), tokens.following(lambda: None):
            yield

    app = PastApplication(lifespan, needs_token=tokens.are_required)
    served = ReplayViews()
    explain = ExplainRoute(folder, settings.explain_timeout_s, lambda: present_moment().moment)
    posts = {
        **QueryRoutes(LocalAnswers(served), lambda: True, settings.max_body_bytes).endpoints(),
        **explain.endpoints(),
    }
    for path, endpoint in posts.items():
        app.router.routes.append(Route(path, endpoint, methods=["POST"]))
    for path in _WRITING:
        app.router.routes.append(Route(path, _refuse, methods=["POST"]))
    app.include_router(worker_routes(served))
    app.include_router(dump_routes(served))
    app.include_router(metrics_routes(served, settings.metrics_max_workers))
    app.include_router(past_routes(moments, marks, folder.name, damage))
    app.include_router(page_routes(PageStates(folder, moments, marks).open))
    app.router.routes += static_routes()
    app.add_middleware(MomentMiddleware, moments=moments, max_body_bytes=settings.max_body_bytes)
    # the last middleware added is the outermost one: callers without the token open no moments
    app.add_middleware(Guard, checks=[check_origin(settings.is_allowed_host), check_tokens(tokens, _OPEN_PATHS)])
    app.add_middleware(ObserveRequests)
    return app


async def _refuse(_request: Request) -> Response:
    raise ProblemError(
        409, ProblemKind.READ_ONLY, "this is a replay of a log, which changes nothing; ask the live service"
    )
