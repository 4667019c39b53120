"""Checks for problem documents (RFC 9457), and what clients need."""

import ssl
from typing import Any

import httpx

WITHOUT_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""`verify` of a client without TLS: to load the certificates of the machine takes 25 ms."""


def succeeds(url: str) -> bool:
    """Return whether a server listens and a GET request succeeds."""
    try:
        return httpx.get(url, verify=WITHOUT_TLS).is_success
    except httpx.TransportError:
        return False


def check_problem(
    response: httpx.Response, status: int, kind: str | None = None, field: str | None = None
) -> dict[str, Any]:
    """Check that a response is a problem document and return it. kind, field: of the document; None: any."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = response.json()
    assert document["status"] == status
    assert document["error"] == document["detail"]
    assert document["type"]
    assert document["title"]
    assert kind is None or document["type"] == f"urn:kvsight:problem:{kind}"
    assert field is None or document["field"] == field
    return document
