"""ZMQ addresses: which side binds them, and how the ports of DP ranks follow from the first one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from kv_events.errors import InvalidValueError, KvsightError

LOCAL_SCHEMES = ("ipc://", "inproc://")
"""Prefixes of addresses on one machine. They have no wildcard."""

_MAX_PORT = 65_535
_WILDCARDS = ("*", "::", "0.0.0.0")  # noqa: S104  (looked for, not bound to)

Locate: TypeAlias = Callable[[str], Awaitable[str]]
"""Returns where to connect for an endpoint at this moment. Raises LocateError."""


class LocateError(KvsightError):
    """An endpoint leads nowhere at present."""


async def as_given(endpoint: str) -> str:
    """Leave the look-up of names to ZMQ. A `Locate`."""
    return endpoint


def has_wildcard(endpoint: str) -> bool:
    """Whether the host is a wildcard. Such an address can be bound, but no peer can connect to it."""
    return not endpoint.startswith(LOCAL_SCHEMES) and any(
        f"//{wildcard}:" in endpoint or f"//[{wildcard}]:" in endpoint for wildcard in _WILDCARDS
    )


def is_ipv6(endpoint: str) -> bool:
    """Whether the host is an IPv6 address in brackets.

    A host name counts as IPv4. ZMQ would try only the IPv6 address of a name that has both, but engines listen on IPv4
    unless told otherwise.
    """
    return endpoint.startswith("tcp://[")


def endpoint_of_rank(endpoint: str, offset: int, field: str = "endpoint") -> str:
    """Address of the DP rank `offset` places after the first: port + offset, or an `inproc` name with a suffix.

    field: the setting that an error names. Raises InvalidValueError where the address has no such port.
    """
    if offset == 0:
        return endpoint
    if endpoint.startswith("inproc://"):
        return f"{endpoint}_dp{offset}"
    host, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdecimal() or int(port) + offset > _MAX_PORT:
        raise InvalidValueError(field, endpoint, f"tcp://HOST:PORT with a port of at most {_MAX_PORT - offset}")
    return f"{host}:{int(port) + offset}"
