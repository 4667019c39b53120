"""Connections whose TLS handshake is not finished: they count, and end, as all others do."""

import asyncio
import ssl
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from api.access.connections import HEAD_S
from api.fast.http_limits import LimitedHttpProtocol

_SHUTDOWN_S = 5.0


class TlsHandshake(asyncio.Protocol):
    """One connection, which belongs to an HTTP protocol after its handshake."""

    def __init__(self, *, http: Callable[..., LimitedHttpProtocol], context: ssl.SSLContext, **options: Any) -> None:
        self._http = http(**options)  # its time begins now
        self._context = context
        self._early = bytearray()  # what arrived with the end of the handshake: some event loops deliver it at once

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        loop = self._http.loop
        self._http.enter(transport)
        if not transport.is_closing():
            times = {"ssl_handshake_timeout": HEAD_S, "ssl_shutdown_timeout": _SHUTDOWN_S}
            handshake: Any = loop.start_tls(transport, self, self._context, server_side=True, **times)  # type: ignore[arg-type]
            # event loops read as soon as this method has returned, so the first step is made here
            self._task = loop.create_task(self._take_over(_continued(handshake, handshake.send(None))))

    async def _take_over(self, handshake: Any) -> None:
        try:
            secure = await handshake
        except OSError:  # of TLS or of the connection
            secure = None
        if secure is None or secure.is_closing():
            self._http.leave()
            return
        secure.set_protocol(self._http)
        self._http.connection_made(secure)
        if self._early:
            self._http.data_received(bytes(self._early))

    def data_received(self, data: bytes) -> None:
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._http.leave()


@types.coroutine
def _continued(coroutine: Coroutine[Any, Any, Any], waits_for: Any) -> Generator[Any, Any, Any]:
    """Go on with a coroutine that has been started. waits_for: what it yielded."""
    yield waits_for
    return (yield from coroutine)
