"""Rules for the head of any request, whatever it asks for."""

from __future__ import annotations

import re
from collections.abc import Iterable

from api.problems import ProblemError, ProblemKind
from kv_events.errors import InvalidValueError

_HOST = re.compile(rb"[\w.~!$&'()*+,;=%:\[\]-]*")  # characters of RFC 3986
_WITHOUT_HOST = ("0.9", "1.0")
"""Versions of HTTP in which `Host` may be missing."""


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
