"""Authentication by bearer token, and what each token permits."""

from __future__ import annotations

import math
from collections.abc import Set

from starlette.types import ASGIApp, Receive, Scope, Send

from api.access.rate_limits import OF_REQUEST
from api.access.tokens import TokenRegistry
from api.problems import ProblemError, ProblemKind
from api.static_files import STATIC_PATHS

OPEN_PATHS = STATIC_PATHS | {"/health", "/ready", "/metrics"}
"""Paths of probes, scrapers and files. Their answers contain no secrets."""

_READING_POSTS = frozenset({"/query", "/query_by_hash", "/query/batch", "/explain", "/tokenize", "/shards/query"})
_SCOPES = {"/decisions": "decisions", "/register": "register", "/unregister": "register", "/dump": "dump"}


def scope_of(method: str, path: str) -> str:
    """Return the scope that a request needs. What is not known to read needs `admin`."""
    if path in _SCOPES:
        return _SCOPES[path]
    if method in ("GET", "HEAD", "OPTIONS") or path in _READING_POSTS:
        return "read"
    return "resync" if path.startswith("/workers/") and path.endswith("/resync") else "admin"


class BearerToken:
    """Middleware that accepts requests whose token permits them, and all requests for `open_paths`."""

    def __init__(self, app: ASGIApp, tokens: TokenRegistry, open_paths: Set[str] = OPEN_PATHS) -> None:
        self._app = app
        self._tokens = tokens
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._refusal(scope) if scope["type"] == "http" and scope["path"] not in self._open_paths else None
        if problem is None:
            await self._app(scope, receive, send)
        else:
            await problem.response()(scope, receive, send)

    def _refusal(self, scope: Scope) -> ProblemError | None:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        caller = self._tokens.caller(given)
        if caller is None:
            return ProblemError(
                401, ProblemKind.UNAUTHORIZED, "Authorization: expected a Bearer token that this server knows"
            )
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
