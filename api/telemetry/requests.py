"""Middleware that times, counts and logs requests, and one that makes spans of queries for traces."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Collection
from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.access.guard import header
from api.problems import ProblemError
from api.telemetry.service_metrics import HttpMetrics
from kv_events.records import Headers
from kv_events.runtime.outages import RateLimitedLogger
from kv_events.runtime.tracing import trace_headers

if TYPE_CHECKING:
    from kv_events.runtime.spans import Span, Spans

HEADER = "x-request-id"

_VALID_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

logger = logging.getLogger(__name__)


class ObserveRequests:
    """Times the query routes and counts errors, for `metrics`. Adds `X-Request-ID` to answers of status 4xx and 5xx.

    The id is the caller's own, or a new one. A 4xx is logged at DEBUG, and a 5xx at WARNING, at most twice a minute. An
    error that no route handles is logged with its traceback and answered with a 500.
    """

    def __init__(self, app: ASGIApp, metrics: HttpMetrics | None = None) -> None:
        self._app = app
        self._metrics = metrics
        self._limited_logger = RateLimitedLogger(logger, "http")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                if message["status"] >= 400:
                    self._note(scope, message)
            await send(message)

        began = time.perf_counter()
        try:
            await self._app(scope, receive, send_with_id)
            if self._metrics is not None and scope["path"] in self._metrics.queries.paths:
                self._metrics.queries.note(scope["path"], time.perf_counter() - began)
        except Exception:
            request = _request_id(scope)
            logger.exception("request %s, %s, failed", request, _what(scope))
            if has_begun:
                raise
            problem = ProblemError(500, None, f"an internal error; the service's log describes request {request}")
            response = problem.response()
            response.headers[HEADER] = request
            await response(scope, receive, send)

    def _note(self, scope: Scope, start: Message) -> None:
        request, status = _request_id(scope), start["status"]
        if self._metrics is not None:
            self._metrics.errors.labels(f"{status // 100}xx").inc()
        start["headers"] = [*start.get("headers", ()), (HEADER.encode(), request.encode())]
        if status >= 500:
            self._limited_logger.warning("request %s, %s, was answered with %d", request, _what(scope), status)
        else:
            logger.debug("request %s, %s, was answered with %d", request, _what(scope), status)


def start_request(spans: Spans, path: str, headers: Headers) -> Span:
    """Start the span of a POST request."""
    return spans.start(f"POST {path}", "server", {"http.request.method": "POST", "http.route": path}, headers)


def end_request(span: Span, status: int) -> None:
    """End the span of a request that was answered."""
    span.set_attribute("http.response.status_code", status)
    span.end()


class TraceRequests:
    """A middleware that spans the requests to some paths, those that `FastPath` passes to FastAPI."""

    def __init__(self, app: ASGIApp, spans: Spans, paths: Collection[str]) -> None:
        self._app = app
        self._spans = spans
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in self._paths or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        headers = trace_headers((name.decode("latin-1"), value) for name, value in scope["headers"])
        span = start_request(self._spans, scope["path"], headers)

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
                if message["status"] >= HTTPStatus.INTERNAL_SERVER_ERROR:
                    self._spans.fail(span, "")
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            span.end()


def _request_id(scope: Scope) -> str:
    given = (header(scope, HEADER.encode()) or b"").decode("latin-1")
    return given if _VALID_ID.fullmatch(given) else secrets.token_hex(8)


def _what(scope: Scope) -> str:
    return f"{scope['method'][:16]} {scope['path'][:80]!r}"
