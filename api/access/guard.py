"""Who may ask: a middleware of checks, and the one of bearer tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from typing import TypeAlias

from starlette.types import ASGIApp, Receive, Scope, Send

from api.access.rate_limits import OF_REQUEST
from api.access.tokens import TokenRegistry
from api.problems import ProblemError, ProblemKind
from api.static_files import STATIC_PATHS

OPEN_PATHS = STATIC_PATHS | {"/health", "/ready", "/metrics"}
"""Paths of probes, scrapers and files. Their answers contain no secrets."""

_READING_POSTS = frozenset({"/query", "/query_by_hash", "/query/batch", "/explain", "/tokenize", "/shards/query"})
_SCOPES = {"/decisions": "decisions", "/register": "register", "/unregister": "register", "/dump": "dump"}


Check: TypeAlias = Callable[[Scope], ProblemError | None]
"""Returns why a request is refused, or None."""


def scope_of(method: str, path: str) -> str:
    """Return the scope that a request needs. What is not known to read needs `admin`."""
    if path in _SCOPES:
        return _SCOPES[path]
    if method in ("GET", "HEAD", "OPTIONS") or path in _READING_POSTS:
        return "read"
    return "resync" if path.startswith("/workers/") and path.endswith("/resync") else "admin"


class Guard:
    """Middleware that refuses what any of its checks refuses."""

    def __init__(self, app: ASGIApp, checks: Sequence[Check]) -> None:
        self._app = app
        self._checks = checks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for check in self._checks if scope["type"] == "http" else ():
            problem = check(scope)
            if problem is not None:
                await problem.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def check_tokens(tokens: TokenRegistry, open_paths: Set[str] = OPEN_PATHS) -> Check:
    """Return the check that a token permits a request, unless its path is among `open_paths`."""

    def check(scope: Scope) -> ProblemError | None:
        if scope["path"] in open_paths:
            return None
        caller = tokens.caller(header(scope, b"authorization") or b"")
        if caller is None:
            detail = "Authorization: expected a Bearer token that this server knows"
            return ProblemError(401, ProblemKind.UNAUTHORIZED, detail)
        needed = scope_of(scope["method"], scope["path"])
        if needed not in caller.scopes:
            return ProblemError(403, ProblemKind.FORBIDDEN, f"Authorization: the token lacks the scope {needed}")
        if caller.limit is not None:
            if wait_s := caller.limit.wait_s():
                detail = "Authorization: more requests with this token than it permits in a second"
                return ProblemError(429, ProblemKind.TOO_MANY_REQUESTS, detail, retry_after_s=math.ceil(wait_s))
            caller.limit.note()
            OF_REQUEST.set(caller.limit)
        return None

    return check


def header(scope: Scope, name: bytes) -> bytes | None:
    """Return the first value of a header, or None."""
    return next((value for each, value in scope["headers"] if each == name), None)
