"""Spans of queries, as children of the callers' spans."""

from __future__ import annotations

from collections.abc import Collection
from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kv_events.records import Headers
from kv_events.runtime.tracing import trace_headers

if TYPE_CHECKING:
    from kv_events.runtime.spans import Span, Spans


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
