"""Why an address cannot be reached. ZMQ connects again and again, but never reports why it cannot."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

_TIMEOUT_S = 2.0


async def why_unreachable(endpoint: str) -> str | None:
    """Open a connection to a ZMQ address and close it. Returns why the engine's events cannot be read there.

    For an address that has no engine's handshake although something accepts connections there. None: nothing is known
    about addresses of this kind.
    """
    scheme, _, address = endpoint.partition("://")
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            if scheme == "tcp":
                host, _, port = address.rpartition(":")
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
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
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno).lower()
    return str(error)
