"""Authentication by bearer token."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from api.docs_page import DOCS_PATHS
from api.page.site import SITE_PATHS
from api.problems import ProblemError

OPEN_PATHS = DOCS_PATHS | SITE_PATHS | {"/health", "/ready", "/metrics"}
"""Paths of probes, scrapers, the documentation and the files of the page. Their answers contain no secrets."""


def authorization(token: str) -> bytes:
    """Return the header `Authorization` that a caller must send."""
    return b"Bearer " + token.encode()


class BearerToken:
    """Middleware that accepts requests with the token and requests for `OPEN_PATHS`."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = authorization(token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._is_known(scope):
            problem = ProblemError(401, "unauthorized", "Authorization: expected a Bearer token that this server knows")
            await problem.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._expected)
