"""Routes about this process: alive, ready, measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

from api.hot import json_response
from api.metrics import HttpMetrics
from api.openapi import answers, problem
from api.problems import ProblemError
from indexer.consumer import Consumer
from kvsight.schemas.service import Status

if TYPE_CHECKING:
    from api.registrations import Registrations


_encoder = msgspec.json.Encoder()


def service_routes(consumer: Consumer, metrics: HttpMetrics, registrations: Registrations | None) -> APIRouter:
    """Probes and metrics; open to callers without a token."""
    router = APIRouter(tags=["service"])

    @router.get(
        "/health",
        response_class=Response,
        responses={**answers(Status, "Healthy"), **problem(503, "The consumer has failed")},
    )
    async def health() -> Response:
        """200 while the consumer lives, 503 once it has failed: then only a restart helps."""
        if consumer.failure is not None:
            detail = f"the consumer has failed: {type(consumer.failure).__name__}"
            raise ProblemError(503, "unavailable", detail)
        return json_response(_encoder.encode(Status(status="ok")))

    @router.get(
        "/ready", response_class=Response, responses={**answers(Status, "Ready"), **problem(503, "Not ready yet")}
    )
    async def ready() -> Response:
        """200 once everything that was in the log at the start has been applied.

        Where the service reads engines itself: once those that were registered before are read, or ten seconds after
        it began to.
        """
        reason = _why_not_ready(consumer) or (registrations and registrations.why_not_ready())
        if reason:
            raise ProblemError(503, "unavailable", reason)
        return json_response(_encoder.encode(Status(status="ready")))

    @router.get("/metrics", response_class=Response)
    async def metrics_text() -> Response:
        """Prometheus' text format."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return router


def _why_not_ready(consumer: Consumer) -> str | None:
    if consumer.ready:
        return None
    if consumer.failure is not None:
        return f"the consumer has failed: {type(consumer.failure).__name__}"
    if consumer.source_error is not None:
        return "the log cannot be read"
    lag = consumer.lag()
    return "the log is not opened yet" if lag is None else f"catching up: {lag} records of the log to apply"
