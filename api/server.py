"""The server: uvicorn with uvloop, on a socket that is bound before anything else starts."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from api.app import Application
from api.bounded_protocol import BoundedProtocol
from api.errors import CannotListenError, PortInUseError
from api.followed_files import following
from api.hot_lane.lane import HotLane
from api.hot_lane.protocol import HotProtocol
from api.problems import ProblemError
from api.replicas.replica import Replica, headers_of
from api.settings import ApiSettings
from kv_events.event_loops import new_event_loop

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_GRACE_S = 5
_POLL_S = 0.01


def listen(settings: ApiSettings) -> socket.socket:
    """Return a listening socket, before a server accepts its connections. The caller closes it.

    Raises CannotListenError, or PortInUseError if that is the cause, and InvalidValueError for files of TLS.
    """
    if settings.tls is not None:
        settings.tls.check_server()
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(settings.host, settings.port) from None
        raise CannotListenError(settings.host, settings.port, error.strerror or str(error)) from None


@contextmanager
def reserve(settings: ApiSettings) -> Iterator[socket.socket]:
    """Yield a socket that keeps an address for `share` and does not listen.

    Raises what `listen` raises. Sockets that share a port do not notice that another service has it. So it is tried
    without sharing first, and a name of this machine keeps out another service that shares.
    """
    with listen(settings) as free:
        family, address = free.family, free.getsockname()
    with socket.socket(socket.AF_UNIX) as name, _sharing(family, address) as reserved:
        try:
            name.bind(f"\0kvsight:{address[0]}:{address[1]}")
        except OSError:
            raise PortInUseError(settings.host, address[1]) from None
        yield reserved


def share(reserved: socket.socket, settings: ApiSettings) -> socket.socket:
    """Return another socket of the same address. Once it listens, it gets its part of the connections.

    Raises InvalidValueError for files of TLS.
    """
    if settings.tls is not None:
        settings.tls.check_server()
    return _sharing(reserved.family, reserved.getsockname())


def _sharing(family: int, address: Any) -> socket.socket:
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if family == socket.AF_INET6:
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # as socket.create_server does
    bound.bind(address)
    return bound


def url_of(bound: socket.socket, settings: ApiSettings) -> str:
    """Return the URL of the server of a socket."""
    host, port = bound.getsockname()[:2]
    scheme = "http" if settings.tls is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def run_server(
    app: Starlette, settings: ApiSettings, bound: socket.socket | None = None, replica: Replica | None = None
) -> None:
    """Serve until SIGINT or SIGTERM. Requests in progress get five seconds to finish, then the lifespan ends.

    bound: result of `listen` or `share`, which is closed at the end. None: created here. replica: this process, if it
    is one of several. Raises the errors of `listen` before the application starts.
    """
    gc.freeze()  # modules and kernels live as long as the process, so the collector can skip them
    with bound or listen(settings) as bound, asyncio.Runner(loop_factory=new_event_loop) as runner:
        server = _Server(app, settings) if replica is None else _ReplicaServer(app, settings, replica)
        runner.run(server.serve([bound]))


@asynccontextmanager
async def running_server(
    app: Starlette, settings: ApiSettings, bound: socket.socket | None = None
) -> AsyncIterator[str]:
    """Serve in the background of a block, which gets the URL. Does not handle signals. See `run_server`."""
    with bound or listen(settings) as bound:
        server = _EmbeddedServer(app, settings)
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

    def __init__(self, app: Starlette, settings: ApiSettings, headers: Sequence[tuple[str, str]] = ()) -> None:
        """headers: of all answers."""
        self._app = app
        self._tls = settings.tls
        http: Any = BoundedProtocol
        if isinstance(app, Application):
            lane: HotLane = app.state.lane
            http = partial(HotProtocol, lane=lane, max_connections=settings.max_connections)
        super().__init__(
            uvicorn.Config(
                _ConnectionLimit(app, settings.max_connections, lambda: self.server_state),
                http=http,
                ws="none",
                headers=list(headers),
                lifespan="on",
                access_log=False,
                log_config=None,
                timeout_graceful_shutdown=_GRACE_S,
                **_tls_options(settings),
            )
        )

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        async with self._following_certificate():
            await super().serve(sockets)

    @asynccontextmanager
    async def _following_certificate(self) -> AsyncIterator[None]:
        """Use the certificate that is in its files, for new connections, in the background of a block."""
        files = self._tls
        if files is None:
            yield
            return

        def use(_content: tuple[bytes, ...]) -> None:
            if self.config.ssl is not None:
                files.load_server(self.config.ssl)
                logger.info("new connections have the certificate that is in %s now", files.cert)

        async with following("certificates", files.server_content(), files.server_content, use, logger):
            yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if isinstance(self._app, Application):  # other ASGI applications end their own streams
            self._app.end_streams()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End on the first signal, and at once on the second one, without a traceback of what was under way."""
        if self.should_exit:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        super().handle_exit(sig, frame)


class _ReplicaServer(_Server):
    """The server of one of several processes. Their supervisor decides when it ends at once."""

    def __init__(self, app: Starlette, settings: ApiSettings, replica: Replica) -> None:
        super().__init__(app, settings, headers_of(replica))
        self._replica = replica

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Tell the others when this process accepts connections."""
        await super().startup(sockets)
        self._replica.shared.note_serving(self._replica.number)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End. Further signals change nothing: a service manager may send one to every process, as the parent does."""
        self.should_exit = self._replica.is_ending = True


def _tls_options(settings: ApiSettings) -> dict[str, Any]:
    """Return uvicorn's options for TLS."""
    files = settings.tls
    if files is None:
        return {}
    return {"ssl_certfile": files.cert, "ssl_keyfile": files.key, "ssl_keyfile_password": files.password()}


class _EmbeddedServer(_Server):
    """A server inside another program."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _ConnectionLimit:
    """Refuses requests while there are too many connections. uvicorn's own limit would answer in plain text."""

    def __init__(self, app: Starlette, most: int, state: Callable[[], ServerState]) -> None:
        self._app = app
        self._most = most
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and len(self._state().connections) > self._most:
            detail = f"more than {self._most} connections are open (KVSIGHT_MAX_CONNECTIONS)"
            response = ProblemError(503, "overloaded", detail).response()
            response.headers["Connection"] = "close"
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)
