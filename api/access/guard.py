"""Who may ask: a middleware of checks, of bearer tokens and of what a page of another site lets a browser send."""

import math
import re
from collections.abc import Callable, Iterable, Sequence, Set
from typing import TypeAlias
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from api.access.rate_limits import OF_REQUEST
from api.access.tokens import TokenRegistry
from api.problems import ProblemError, ProblemKind
from api.static_files import STATIC_PATHS
from kv_events.errors import InvalidValueError

OPEN_PATHS = STATIC_PATHS | {"/health", "/ready", "/metrics"}
"""Paths of probes, scrapers and files. Their answers contain no secrets."""

_READING_POSTS = frozenset(
    {"/query", "/query_by_hash", "/query/batch", "/explain", "/tokenize", "/shards/query"}
    | {"/select", "/potential_loads", "/overlap_scores"}
)
_SCOPES = {"/decisions": "decisions", "/select_and_reserve": "decisions", "/reservations": "decisions"} | {
    "/register": "register",
    "/unregister": "register",
    "/dump": "dump",
}

_HOST = re.compile(rb"[\w.~!$&'()*+,;=%:\[\]-]*")  # characters of RFC 3986
_WITHOUT_HOST = ("0.9", "1.0")
"""Versions of HTTP in which `Host` may be missing."""
_OWN = (b"same-origin", b"none")
"""Values of `Sec-Fetch-Site`: the page of this service, and what a user does without any page."""
PROBES = frozenset({"/health", "/ready"})
"""Paths that probes ask, by the address of a container."""

Check: TypeAlias = Callable[[Scope], ProblemError | None]
"""Returns why a request is refused, or None."""


def scope_of(method: str, path: str) -> str:
    """Return the scope that a request needs. What is not known to read needs `admin`."""
    if path in _SCOPES:
        return _SCOPES[path]
    if path.startswith("/reservations/"):
        return "decisions"
    if method in ("GET", "HEAD", "OPTIONS") or path in _READING_POSTS:
        return "read"
    if path.startswith("/workers/") and path.endswith("/resync") and method == "POST":
        return "resync"
    return "register" if path == "/workers" or path.startswith("/workers/") else "admin"


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


def check_origin(is_allowed_host: Callable[[str], bool]) -> Check:
    """Return the check of heads: faulty ones, other hosts, and changes that pages of other sites ask for are refused.

    is_allowed_host: whether a `Host` header, with or without a port, names this service.
    `FastPath` answers without it: it takes only good heads with an allowed host, and no change that a page asks for.
    """

    def check(scope: Scope) -> ProblemError | None:
        if problem := refusal_of(scope["headers"], scope["http_version"]):
            return problem
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if scope["path"] not in PROBES and not is_allowed_host(host):
            detail = f"Host: {host[:80]!r} is not among --allowed-hosts"
            return ProblemError(421, ProblemKind.OTHER_HOST, detail)
        if scope_of(scope["method"], scope["path"]) != "read" and is_from_another_site(headers, host):
            return ProblemError(403, ProblemKind.OTHER_SITE, "Origin: a page of another site asks for a change")
        return None

    return check


def is_from_another_site(headers: dict[bytes, bytes], host: str) -> bool:
    """Return whether a browser sent the request for a page of another origin. host: the request's `Host`.

    Browsers send `Sec-Fetch-Site` over HTTPS and to the same machine only, but `Origin` with every POST of a page.
    """
    site = headers.get(b"sec-fetch-site")
    if site is not None:
        return site not in _OWN
    origin = headers.get(b"origin")
    return origin is not None and urlsplit(origin.decode("latin-1")).netloc.lower() != host.lower()


def refusal_of(headers: Iterable[tuple[bytes, bytes]], http_version: str) -> ProblemError | None:
    """Return why a head is refused, or None. headers: names in lower case."""
    given = [(name, value) for name, value in headers if name in (b"host", b"content-encoding")]
    hosts = [value for name, value in given if name == b"host"]
    if len(hosts) > 1:
        return ProblemError(400, None, f"Host: {len(hosts)} lines, expected one", "Host")
    if not hosts and http_version not in _WITHOUT_HOST:
        return ProblemError(400, None, "Host: missing", "Host")
    if hosts and not _HOST.fullmatch(hosts[0]):
        return ProblemError.of_value(InvalidValueError("Host", hosts[0].decode("latin-1"), "a name or address"), 400)
    for name, coding in given:
        if name == b"content-encoding" and coding.lower() != b"identity":
            fault = InvalidValueError("Content-Encoding", coding.decode("latin-1"), "identity")
            return ProblemError.of_value(fault, 415, ProblemKind.CONTENT_ENCODING)
    return None


def header(scope: Scope, name: bytes) -> bytes | None:
    """Return the first value of a header, or None."""
    return next((value for each, value in scope["headers"] if each == name), None)
