"""Routes about this process: health, readiness and metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

from api.openapi import answers, problem
from api.problems import ProblemError, ProblemKind
from api.queries.routes import json_response
from api.telemetry.service_metrics import HttpMetrics
from indexer.consumer import Consumer
from kv_events.http.service import Status

if TYPE_CHECKING:
    from api.workers.registrations import Registrations


def service_routes(
    consumer: Consumer,
    metrics: HttpMetrics,
    registrations: Registrations | None,
    degraded: Callable[[], str],
) -> APIRouter:
    """Return the probes and metrics, which need no token. degraded: why records may be missing from the recording."""
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
        if consumer.failure is not None:
            detail = f"the consumer has failed: {type(consumer.failure).__name__}"
            raise ProblemError(503, ProblemKind.UNAVAILABLE, detail)
        return json_response(Status(status="ok", recording=degraded()))

    @router.get(
        "/ready", response_class=Response, responses={**answers(Status, "Ready"), **problem(503, "Not ready yet")}
    )
    async def ready() -> Response:
        """Return 200 after everything that was in the log at the start has been applied, and while the log can be read.

        If the service reads engines itself: after the saved registrations are read, or ten seconds after the start.
        """
        reason = consumer.why_not_ready() or (registrations and registrations.why_not_ready())
        if reason:
            raise ProblemError(503, ProblemKind.UNAVAILABLE, reason, retry_after_s=1)
        return json_response(Status(status="ready"))

    @router.get("/metrics", response_class=Response)
    async def metrics_text() -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(await metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return router
