"""Why an address cannot be reached. ZMQ connects again and again, but never reports why it cannot."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

from kv_events.endpoints import is_ipv6

_TIMEOUT_S = 2.0
_ENGINE_BINDS = "an engine listens only if its `endpoint` is tcp://*:PORT: with an address in place of * it connects"
"""Why nothing may listen although the engine runs."""


async def why_unreachable(endpoint: str, located: str | None = None) -> str | None:
    """Open a connection to a ZMQ address and close it. Returns why the engine's events cannot be read there.

    located: where the endpoint leads. None: its name is looked up.

    For an address that has no engine's handshake although something accepts connections there. None: nothing is known
    about addresses of this kind.
    """
    scheme, _, address = (located or endpoint).partition("://")
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            if scheme == "tcp":
                host, _, port = address.rpartition(":")
                family = socket.AF_INET6 if is_ipv6(located or endpoint) else socket.AF_INET  # as ZMQ does
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port), family=family)
            elif scheme == "ipc":
                _, writer = await asyncio.open_unix_connection(address)
            else:
                return None
    except TimeoutError:
        return f"cannot connect to {endpoint}: no answer within {_TIMEOUT_S:.0f} s"
    except (OSError, ValueError) as error:
        return f"cannot connect to {endpoint}: {_reason(error)}"
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return f"{endpoint} accepts connections, but has not answered as a ZMQ publisher"


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, socket.gaierror):
        return "the host name is unknown"
    if isinstance(error, ConnectionRefusedError):
        return f"connection refused; {_ENGINE_BINDS}"
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno).lower()
    return str(error)
