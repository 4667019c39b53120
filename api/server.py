"""The server: uvicorn with uvloop, on a socket that is bound before anything else starts.

If kernels must be compiled first, which happens once on a machine, it answers meanwhile that it is not ready.
"""

import asyncio
import errno
import gc
import logging
import resource
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from api.access.connections import RESERVED, BodyLimit, ConnectionLimit
from api.app import Application
from api.background import following, run_in_daemon_thread
from api.fast.connection import FastConnection
from api.fast.http_limits import LimitedHttpProtocol, TlsHandshake
from api.problems import ProblemError, ProblemKind
from api.queries.routes import json_response
from api.settings import ApiSettings
from api.static_files import static_routes
from kv_events.errors import KvsightError
from kv_events.http.service import Status
from kv_events.kernels import load
from kv_events.runtime.event_loops import new_event_loop

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_GRACE_S = 5
_POLL_S = 0.01


def listen(settings: ApiSettings) -> socket.socket:
    """Return a listening socket, before a server accepts its connections. The caller closes it.

    Raises CannotListenError, and InvalidValueError for files of TLS.
    """
    if settings.tls is not None:
        settings.tls.check_server()
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server(
            (settings.host, settings.port), family=family, backlog=_BACKLOG, reuse_port=settings.reuse_port
        )
    except OSError as error:
        raise CannotListenError(settings.host, settings.port, error) from None


def url_of(bound: socket.socket, settings: ApiSettings) -> str:
    """Return the URL of the server of a socket."""
    host, port = bound.getsockname()[:2]
    scheme = "http" if settings.tls is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def run_server(app: Starlette, settings: ApiSettings, bound: socket.socket | None = None) -> None:
    """Serve until SIGINT or SIGTERM. Requests in progress get five seconds to finish, then the lifespan ends.

    bound: result of `listen`, which is closed at the end. None: created here. Raises the errors of `listen` before the
    application starts.
    """
    gc.freeze()  # modules and kernels live as long as the process, so the collector can skip them
    with bound or listen(settings) as bound:
        server = _Server(app, settings)
        with _signals_stop(server), asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(server.serve([bound]))


@contextmanager
def _signals_stop(server: uvicorn.Server) -> Iterator[None]:
    """Let the first SIGINT or SIGTERM stop the server, and a second one end the process at once, without a traceback.

    SIGINT is raised again after the block, for the handler from before. uvicorn handles signals only once its loop
    runs: an exception that a handler raises while uvloop starts leaves a loop that cannot be closed.
    """
    caught: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        if server.should_exit:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        caught.append(number)
        server.should_exit = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if signal.SIGINT in caught:
            signal.raise_signal(signal.SIGINT)


@asynccontextmanager
async def running_server(
    app: Starlette, settings: ApiSettings, bound: socket.socket | None = None
) -> AsyncIterator[str]:
    """Serve in the background of a block, which gets the URL. Does not handle signals. See `run_server`."""
    with bound or listen(settings) as bound:
        server = _Server(app, settings)
        serving = asyncio.create_task(server.serve([bound]), name="http")
        try:
            while not server.started and not serving.done():  # noqa: ASYNC110  (uvicorn has no event to wait for)
                await asyncio.sleep(_POLL_S)
            yield url_of(bound, settings)
        finally:
            server.should_exit = True
            await serving


class _Server(uvicorn.Server):
    """Serves one application. Ends its streams before it waits for the connections to end."""

    def __init__(self, app: Starlette, settings: ApiSettings) -> None:
        self._app = app
        self._tls = settings.tls
        self._tls_context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        http: Any = LimitedHttpProtocol
        if isinstance(app, Application) and app.service.fast_path is not None:
            http = partial(FastConnection, fast_path=app.service.fast_path)
        limits = ConnectionLimit(_most_connections(settings)), BodyLimit(settings.max_body_bytes)
        http = partial(http, connection_limit=limits[0], body_limit=limits[1])
        if self._tls is not None:
            self._tls.load_server(self._tls_context)
            http = partial(TlsHandshake, http=http, context=self._tls_context)
        super().__init__(
            uvicorn.Config(
                app,
                http=http,
                ws="none",
                headers=[("x-content-type-options", "nosniff")],
                lifespan="on",
                access_log=False,
                log_config=None,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        async with self._following_certificate():
            await super().serve(sockets)

    def _following_certificate(self) -> AbstractAsyncContextManager[None]:
        """Use the certificate that is in its files, for new connections, in the background of a block."""
        files = self._tls
        if files is None:
            return nullcontext()

        def use(_content: tuple[bytes, ...]) -> None:
            files.load_server(self._tls_context)
            logger.info("new connections have the certificate that is in %s now", files.cert)

        return following("certificates", files.server_content(), files.server_content, use, logger)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if isinstance(self._app, Application):  # other ASGI applications end their own streams
            self._app.service.end_streams()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `run_server`, or to the program that embeds this server."""
        yield


def _most_connections(settings: ApiSettings) -> int:
    """Return the bound on connections. Where few files may be open, half of them are for engines and the service."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return settings.max_connections
    return min(settings.max_connections, max(RESERVED, files // 2 - 3 * RESERVED))


class CannotListenError(KvsightError):
    """The server cannot listen on its address."""

    def __init__(self, host: str, port: int, error: OSError) -> None:
        reason = "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
        super().__init__(f"cannot listen on {host} port {port}: {reason}")


_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


def load_and_answer(settings: ApiSettings, bound: socket.socket) -> None:
    """Load all kernels. Meanwhile, `/health` is 200 and every request for data 503.

    bound: the socket to answer on, which stays open. SIGINT and SIGTERM end the process.
    """
    caught: list[int] = []

    async def serve() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop(number: int) -> None:
            caught.append(number)
            task.cancel()

        for number in handlers:
            loop.add_signal_handler(number, stop, number)
        async with running_server(_starting_app(), settings, bound.dup()):
            await run_in_daemon_thread(load.load)

    load.progress()  # imports the kernels, which takes long
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with suppress(asyncio.CancelledError):
        asyncio.run(serve())
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if caught:
        raise SystemExit(128 + caught[0])


def _starting_app() -> Starlette:
    async def health(_request: Request) -> Response:
        return json_response(Status(status="ok"))

    async def refuse(_request: Request) -> Response:
        return ProblemError(503, ProblemKind.KERNELS_LOADING, load.progress(), retry_after_s=1).response()

    every_path = Route("/{path:path}", refuse, methods=_METHODS)
    return Starlette(routes=[Route("/health", health), *static_routes(), every_path])
