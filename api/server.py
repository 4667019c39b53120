"""uvicorn under uvloop, on a socket that is bound before anything else starts."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
import uvloop
from starlette.types import ASGIApp

from api.errors import CannotListenError, PortInUseError
from api.settings import ApiSettings

_BACKLOG = 2048
_GRACE_S = 5
_POLL_S = 0.01


def listen(settings: ApiSettings) -> socket.socket:
    """A socket that callers can connect to from now on; whoever serves on it comes later. To be closed.

    Raises CannotListenError, PortInUseError where that is why.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(settings.host, settings.port) from None
        raise CannotListenError(settings.host, settings.port, error.strerror or str(error)) from None


def url_of(bound: socket.socket) -> str:
    """Where callers find the server of a socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_server(app: ASGIApp, settings: ApiSettings, bound: socket.socket | None = None) -> None:
    """Serve until SIGINT or SIGTERM; requests under way get five seconds to end, then the lifespan ends.

    bound: of `listen`, closed at the end; None: made here. Raises what `listen` raises, before the application starts.
    """
    with bound or listen(settings) as bound, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(uvicorn.Server(_config(app, settings)).serve([bound]))


@asynccontextmanager
async def running_server(app: ASGIApp, settings: ApiSettings, bound: socket.socket | None = None) -> AsyncIterator[str]:
    """Serve in the background of a block, which gets the URL; signals stay the caller's business. See `run_server`."""
    with bound or listen(settings) as bound:
        server = _GuestServer(_config(app, settings))
        serving = asyncio.create_task(server.serve([bound]), name="http")
        try:
            while not server.started and not serving.done():  # noqa: ASYNC110  (uvicorn has no event to wait for)
                await asyncio.sleep(_POLL_S)
            yield url_of(bound)
        finally:
            server.should_exit = True
            await serving


class _GuestServer(uvicorn.Server):
    """A server inside somebody else's program."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _config(app: ASGIApp, settings: ApiSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="on",
        access_log=False,
        log_config=None,
        limit_concurrency=settings.max_connections,
        timeout_graceful_shutdown=_GRACE_S,
    )
