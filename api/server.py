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


def run_server(app: ASGIApp, settings: ApiSettings) -> None:
    """Serve until SIGINT or SIGTERM; requests under way get five seconds to end, then the lifespan ends.

    Raises CannotListenError (PortInUseError where that is why) before the application starts.
    """
    with _listen(settings.host, settings.port) as bound, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(uvicorn.Server(_config(app)).serve([bound]))


@asynccontextmanager
async def running_server(app: ASGIApp, settings: ApiSettings) -> AsyncIterator[str]:
    """Serve in the background of a block, which gets the URL; signals stay the caller's business.

    Raises CannotListenError before the application starts.
    """
    with _listen(settings.host, settings.port) as bound:
        server = _GuestServer(_config(app))
        serving = asyncio.create_task(server.serve([bound]), name="http")
        try:
            while not server.started and not serving.done():  # noqa: ASYNC110  (uvicorn has no event to wait for)
                await asyncio.sleep(_POLL_S)
            yield _url(bound)
        finally:
            server.should_exit = True
            await serving


class _GuestServer(uvicorn.Server):
    """A server inside somebody else's program."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(app, lifespan="on", access_log=False, log_config=None, timeout_graceful_shutdown=_GRACE_S)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(host, port) from None
        raise CannotListenError(host, port, error.strerror or str(error)) from None


def _url(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
