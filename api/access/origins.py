"""Protection from web pages of other sites, which a user's browser may let send requests."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from api.access.auth import scope_of
from api.fast.request_heads import refusal_of
from api.problems import ProblemError, ProblemKind

_OWN = (b"same-origin", b"none")
"""Values of `Sec-Fetch-Site`: the page of this service, and what a user does without any page."""
_PROBED = frozenset({"/health", "/ready"})
"""Paths that probes ask by the address of a container."""

IsAllowedHost = Callable[[str], bool]
"""Whether a `Host` header, with or without a port, names this service."""


class BrowserGuard:
    """Middleware that refuses faulty heads, requests for other hosts, and changes that pages of other sites ask for.

    `HotLane` answers without middleware. It takes only good heads with an allowed host, and changes nothing.
    """

    def __init__(self, app: ASGIApp, is_allowed_host: IsAllowedHost) -> None:
        self._app = app
        self._is_allowed_host = is_allowed_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._refusal(scope) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
        else:
            await problem.response()(scope, receive, send)

    def _refusal(self, scope: Scope) -> ProblemError | None:
        if problem := refusal_of(scope["headers"], scope["http_version"]):
            return problem
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if scope["path"] not in _PROBED and not self._is_allowed_host(host):
            detail = f"Host: {host[:80]!r} is not among --allowed-hosts"
            return ProblemError(421, ProblemKind.OTHER_HOST, detail)
        if scope_of(scope["method"], scope["path"]) != "read" and is_from_another_site(headers, host):
            return ProblemError(403, ProblemKind.OTHER_SITE, "Origin: a page of another site asks for a change")
        return None


def is_from_another_site(headers: dict[bytes, bytes], host: str) -> bool:
    """Return whether a browser sent the request for a page of another origin. host: the request's `Host`.

    Browsers send `Sec-Fetch-Site` over HTTPS and to the same machine only, but `Origin` with every POST of a page.
    """
    site = headers.get(b"sec-fetch-site")
    if site is not None:
        return site not in _OWN
    origin = headers.get(b"origin")
    return origin is not None and urlsplit(origin.decode("latin-1")).netloc.lower() != host.lower()
