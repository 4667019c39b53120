"""Heads of query requests. A kernel finds the lines that matter; what they say about the caller is looked up here."""

import re
from collections.abc import Callable, Collection, Set
from typing import NamedTuple

import numpy as np

from api.access.guard import refusal_of, scope_of
from api.access.rate_limits import RateLimit
from api.access.tokens import TokenRegistry
from api.fast.kernels.head import FETCH_SITE, NUM_FOUND, ORIGIN, PASS_ON, TRACE_PARENT, TRACE_STATE, read_head
from api.queries.body_formats import CONTENT_TYPES
from kv_events.records import Headers
from kv_events.runtime.tracing import trace_headers

_HTTP_VERSION = "1.1"
_MAX_KEPT, _MAX_KEPT_BYTES = 4096, 1024
"""Bounds on the callers that are kept, and on the lines of one. Others are looked up each time."""
_MOST_DIGITS = 18
_LONGEST_LINE = 512  # of a request without a body
_NO_TYPE = b"application/json"  # of requests without a body


class Caller(NamedTuple):
    """What the head says about the caller and the body. Many requests have the same."""

    lines: tuple[bytes, bytes, bytes]
    """Values of `Content-Type`, of `Host`, and of `Authorization` if tokens are required."""
    content_type: str
    """Without parameters, in lower case."""
    limit: RateLimit | None = None
    """Bound on the requests with this token."""
    scopes: Set[str] = frozenset({"read"})
    """What the token permits."""


class Head(NamedTuple):
    """An accepted head."""

    path: str
    """Empty: the request has no body, see `parameters`."""
    caller: Caller
    content_length: int
    trace: Headers = ()
    """Context of the caller's trace, if the process sends traces."""
    is_of_page: bool = False
    """Whether a page of a browser may have asked."""
    parameters: tuple[bytes | None, ...] = ()
    """Groups of `BodylessRoute.line`."""


class HeadReader:
    """Reads the heads of POST requests to some paths, and of some requests without a body. One thread calls it."""

    def __init__(
        self,
        paths: Collection[str],
        tokens: TokenRegistry,
        max_body_bytes: int,
        *,
        with_traces: bool = False,
        is_allowed_host: Callable[[str], bool] = lambda _host: True,
        bodyless: tuple[re.Pattern[bytes], str] | None = None,
    ) -> None:
        """tokens: those whose scope for the path is required. max_body_bytes: largest accepted Content-Length.

        is_allowed_host: of the header `Host`. bodyless: the first line of requests without a body, and their scope.
        """
        self._is_allowed_host = is_allowed_host
        self._paths = {request_line(path): path for path in paths}
        self._scopes = {path: scope_of("POST", path) for path in paths}
        self._bodyless = bodyless
        self._longest = max(map(len, self._paths), default=0) if bodyless is None else _LONGEST_LINE
        self._tokens = tokens
        self._max_body_bytes = max_body_bytes
        self._with_traces = with_traces
        self.generation = 0
        """Changes whenever `forget` is called."""
        self._found = np.empty((NUM_FOUND, 2), np.int64)
        self._callers: dict[tuple[bytes, bytes, bytes], Caller | None] = {}

    def read(self, data: bytes) -> tuple[Head, int] | None:
        """Read the head of a request, and return it with its end, or None if the request must be passed to FastAPI."""
        start = data.find(b"\n", 0, self._longest) + 1
        path = self._paths.get(data[:start])
        if path is None and self._bodyless is not None:
            return self._read_bodyless(*self._bodyless, data, start)
        end = PASS_ON if path is None else read_head(data, start, len(data), self._found)
        if path is None or end == PASS_ON:
            return None
        length, content_type, host, token, *_ = values = self._values(data)
        if not length.isdigit() or len(length) > _MOST_DIGITS or int(length) > self._max_body_bytes:
            return None
        caller = self._caller((content_type, host, token if self._tokens.are_required else b""))
        if caller is None or self._scopes[path] not in caller.scopes:
            return None
        trace = _trace(values) if self._with_traces else ()
        return Head(path, caller, int(length), trace, _is_of_page(values)), end

    def _read_bodyless(
        self, pattern: re.Pattern[bytes], scope: str, data: bytes, start: int
    ) -> tuple[Head, int] | None:
        line = pattern.fullmatch(data, 0, start)
        end = PASS_ON if line is None else read_head(data, start, len(data), self._found)
        if line is None or end == PASS_ON:
            return None
        length, _, host, token, *_ = values = self._values(data)
        caller = self._caller((_NO_TYPE, host, token if self._tokens.are_required else b""))
        if length not in (b"", b"0") or caller is None or scope not in caller.scopes:
            return None
        return Head("", caller, 0, (), _is_of_page(values), line.groups()), end

    def _values(self, data: bytes) -> list[bytes]:
        """Return the values of the lines that matter, "" for those that are missing."""
        return [data[first:last] for first, last in self._found.tolist()]

    def forget(self) -> None:
        """Look up all callers again, because the tokens have changed."""
        self._callers.clear()
        self.generation += 1

    def _caller(self, lines: tuple[bytes, bytes, bytes]) -> Caller | None:
        if lines in self._callers:
            return self._callers[lines]
        found = self._accepted(lines)
        if sum(map(len, lines)) <= _MAX_KEPT_BYTES:
            if len(self._callers) == _MAX_KEPT:
                self._callers.clear()
            self._callers[lines] = found
        return found

    def _accepted(self, lines: tuple[bytes, bytes, bytes]) -> Caller | None:
        content_type, host, token = lines
        if refusal_of([(b"host", host)] if host else [], _HTTP_VERSION) is not None:
            return None
        if not self._is_allowed_host(host.decode("latin-1")):
            return None
        principal = self._tokens.caller(token)
        if principal is None:
            return None
        known = content_type.partition(b";")[0].strip().lower().decode("latin-1")
        # others are refused before the body arrives
        return Caller(lines, known, principal.limit, principal.scopes) if known in CONTENT_TYPES else None


def request_line(path: str) -> bytes:
    """Return the first line of requests to a path."""
    return b"POST %b HTTP/1.1\r\n" % path.encode()


def _is_of_page(values: list[bytes]) -> bool:
    return bool(values[ORIGIN] or values[FETCH_SITE])


def _trace(values: list[bytes]) -> Headers:
    return trace_headers([("traceparent", values[TRACE_PARENT]), ("tracestate", values[TRACE_STATE])])
