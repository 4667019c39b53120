"""Heads of query requests, recognised by their bytes.

Clients send the same few heads again and again. httptools parses a head once, and the result is kept by its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import httptools

from api.access.guard import refusal_of
from api.access.rate_limits import RateLimit
from api.access.tokens import TokenRegistry
from api.queries.body_formats import CONTENT_TYPES
from kv_events.records import Headers
from kv_events.runtime.tracing import trace_headers

MAX_BYTES = 2048
"""Requests with a longer head are passed to FastAPI."""

_MAX_KEPT = 4096
_HTTP_VERSION = "1.1"
_UNUSUAL = frozenset({b"expect", b"transfer-encoding", b"upgrade"})


class Head(NamedTuple):
    """An accepted head."""

    path: str
    content_type: str
    """Without parameters, in lower case."""
    content_length: int
    limit: RateLimit | None = None
    """Bound on the requests with this token."""
    trace: Headers = ()
    """Context of the caller's trace, if the process sends traces."""


class HeadCache:
    """The heads of POST requests to some paths."""

    def __init__(
        self,
        paths: Collection[str],
        tokens: TokenRegistry,
        max_body_bytes: int,
        *,
        with_traces: bool = False,
        is_allowed_host: Callable[[str], bool] = lambda _host: True,
    ) -> None:
        """tokens: those whose scope `read` is required. max_body_bytes: largest accepted Content-Length.

        is_allowed_host: of the header `Host`.
        """
        self._is_allowed_host = is_allowed_host
        self._paths = {path.encode(): path for path in paths}
        self._tokens = tokens
        self._max_body_bytes = max_body_bytes
        self._with_traces = with_traces
        self.generation = 0
        """Changes whenever `forget` is called."""
        self._kept: dict[bytes, Head | None] = {}

    def find(self, head: bytes) -> Head | None:
        """Return what a head says, or None if the request must be passed to FastAPI.

        head: from the request line up to and including the empty line.
        """
        if head in self._kept:
            return self._kept[head]
        if len(self._kept) == _MAX_KEPT:
            self._kept.clear()
        found = self._kept[head] = self._accepted(_Parsed.of(head))
        return found

    def forget(self) -> None:
        """Find all heads again, because the tokens have changed."""
        self._kept.clear()
        self.generation += 1

    def _accepted(self, parsed: _Parsed | None) -> Head | None:
        if parsed is None or not parsed.is_simple_post or parsed.url not in self._paths:
            return None
        headers = parsed.headers
        if len(dict(headers)) != len(headers) or not _UNUSUAL.isdisjoint(dict(headers)):
            return None
        if refusal_of(headers, _HTTP_VERSION) is not None:
            return None
        fields = dict(headers)
        length = fields.get(b"content-length", b"")
        if not length.isdigit() or int(length) > self._max_body_bytes:
            return None
        if not self._is_allowed_host(fields.get(b"host", b"").decode("latin-1")):
            return None
        caller = self._tokens.caller(fields.get(b"authorization", b""))
        if caller is None or "read" not in caller.scopes:
            return None
        content_type = fields.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
        if content_type not in CONTENT_TYPES:
            return None  # refused before the body arrives
        trace = trace_headers((name.decode("latin-1"), value) for name, value in headers) if self._with_traces else ()
        return Head(self._paths[parsed.url], content_type, int(length), caller.limit, trace)


class _Parsed:
    """What httptools reports about a head."""

    def __init__(self) -> None:
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_simple_post = False
        self._has_more = False
        self._parser = httptools.HttpRequestParser(self)

    @classmethod
    def of(cls, head: bytes) -> _Parsed | None:
        """Parse a head. Returns None if it is not exactly one valid head."""
        parsed = cls()
        try:
            parsed._parser.feed_data(head)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return None
        finally:
            del parsed._parser  # it refers to this object, too
        return None if parsed._has_more else parsed

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_body(self, _body: bytes) -> None:
        self._has_more = True  # httptools sees an earlier end of the head

    def on_headers_complete(self) -> None:
        parser = self._parser
        self.is_simple_post = (
            parser.get_method() == b"POST" and parser.get_http_version() == _HTTP_VERSION and parser.should_keep_alive()
        )
