"""The application: the same routes for the service of the present and for the replay of a log."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, FastAPI
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import Route

from api.access.guard import Guard, check_origin, check_tokens
from api.openapi import answers, complete, problem
from api.page.routes import page_routes
from api.problems import ProblemError, ProblemKind, install
from api.queries.routes import json_response
from api.service import Service
from api.static_files import static_routes
from api.telemetry.requests import ObserveRequests
from kv_events.http.service import Readiness, Status


class Application(FastAPI):
    """The application of a service. Its errors are problem documents."""

    def __init__(self, service: Service) -> None:
        self.service = service
        checks = [check_origin(service.settings.is_allowed_host), check_tokens(service.tokens, service.open_paths)]
        # no middleware sees the requests that `FastPath` answers; the fast path has the rules of those here
        middleware = [
            Middleware(ObserveRequests, metrics=service.http_metrics),  # refused requests are counted, too
            Middleware(Guard, checks=checks),
            *service.middleware,
        ]
        super().__init__(
            title="kvsight",
            version=_version(),
            lifespan=lambda _app: service.running(),
            docs_url=None,
            redoc_url=None,
            middleware=middleware,
        )
        install(self)

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, which is built once."""
        if self.openapi_schema is None:
            needs_token = self.service.tokens.are_required
            complete(super().openapi(), self.service.amend_document, needs_token=needs_token)
        return super().openapi()


def create_app(service: Service) -> Application:
    """Create the application of a service. Its lifespan runs the service in the same event loop."""
    app = Application(service)
    for path, endpoint in service.endpoints.items():
        app.router.routes.append(Route(path, endpoint, methods=["POST"]))
    app.include_router(_probe_routes(service))
    for router in service.routers:
        app.include_router(router)
    app.include_router(page_routes(service.page_state))
    app.router.routes += static_routes()
    return app


def _probe_routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["service"])

    @router.get(
        "/health",
        response_class=Response,
        responses={**answers(Status, "Healthy"), **problem(503, "The consumer has failed")},
    )
    async def health() -> Response:
        """Return 200 while the consumer runs, and 503 after it has failed. Only a restart helps then.

        `recording` says why a recording beside the service is degraded, if it is.
        """
        return json_response(service.health())

    @router.get(
        "/ready", response_class=Response, responses={**answers(Readiness, "Ready"), **problem(503, "Not ready yet")}
    )
    async def ready() -> Response:
        """Return 200 after everything that was in the log at the start has been applied, and while the log can be read.

        If the service reads engines itself: after the saved registrations are read, or ten seconds after the start.
        """
        if reason := service.why_not_ready():
            raise ProblemError(503, ProblemKind.UNAVAILABLE, reason, retry_after_s=1)
        num_workers = service.num_schedulable()
        return json_response(Readiness(status="ready", ready=True, schedulable_workers=num_workers))

    @router.get("/metrics", response_class=Response)
    async def metrics_text() -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(await service.metrics(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return router


def _version() -> str:
    try:
        return version("kvsight")
    except PackageNotFoundError:
        return "0"  # running from a checkout without installation
