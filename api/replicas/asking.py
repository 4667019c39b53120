"""How processes of one service ask each other: HTTP over Unix sockets in their private folder, without tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import httpx
import uvicorn
from starlette.types import ASGIApp

from api.replicas.replica import Replica

_LONGEST_S = 60.0  # `get` has a shorter limit
_MAX_CONNECTIONS = 8


class Siblings:
    """The other processes, as one of them asks them. Keeps its connections."""

    def __init__(self, replica: Replica) -> None:
        self._clients = {
            number: httpx.AsyncClient(
                base_url="http://process",
                transport=httpx.AsyncHTTPTransport(
                    verify=False,  # no TLS between them
                    uds=str(replica.socket_of(number)),
                    limits=httpx.Limits(max_connections=_MAX_CONNECTIONS),
                ),
                timeout=_LONGEST_S,
            )
            for number in replica.others()
        }

    async def get(self, number: int, target: str, timeout_s: float = 2.0) -> httpx.Response | None:
        """Return the answer of a process to a GET request, or None if none comes in time."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._clients[number].get(target)
        except (httpx.TransportError, TimeoutError):
            return None

    async def aclose(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.aclose()


class _Server(uvicorn.Server):
    """A server that leaves signals to the one of the port."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def answering(replica: Replica, app: ASGIApp) -> AsyncIterator[None]:
    """Answer the other processes in the background of a block."""
    path = replica.socket_of(replica.number)
    path.unlink(missing_ok=True)  # of a process that was killed
    config = uvicorn.Config(
        app,
        uds=str(path),
        lifespan="off",
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=1,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(), name="siblings")
    try:
        while not server.started and not serving.done():  # noqa: ASYNC110  (uvicorn has no event to wait for)
            await asyncio.sleep(0.01)
        if serving.done():
            await serving  # raises why it cannot listen
        yield
    finally:
        server.should_exit = True
        await serving
