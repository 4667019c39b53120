"""Protection from web pages of other sites, which a user's browser may let send requests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from starlette.types import Scope

from api.access.guard import Check, scope_of
from api.problems import ProblemError, ProblemKind
from kv_events.errors import InvalidValueError

_HOST = re.compile(rb"[\w.~!$&'()*+,;=%:\[\]-]*")  # characters of RFC 3986
_WITHOUT_HOST = ("0.9", "1.0")
"""Versions of HTTP in which `Host` may be missing."""
_OWN = (b"same-origin", b"none")
"""Values of `Sec-Fetch-Site`: the page of this service, and what a user does without any page."""
_PROBED = frozenset({"/health", "/ready"})
"""Paths that probes ask by the address of a container."""

IsAllowedHost = Callable[[str], bool]
"""Whether a `Host` header, with or without a port, names this service."""


def check_origin(is_allowed_host: IsAllowedHost) -> Check:
    """Return the check of heads: faulty ones, other hosts, and changes that pages of other sites ask for are refused.

    `FastPath` answers without it: it takes only good heads with an allowed host, and changes nothing.
    """

    def check(scope: Scope) -> ProblemError | None:
        if problem := refusal_of(scope["headers"], scope["http_version"]):
            return problem
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if scope["path"] not in _PROBED and not is_allowed_host(host):
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
