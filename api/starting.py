"""What the server answers until kernels are loaded, if they must be compiled first, which happens once on a machine."""

import asyncio
import signal
import socket
from contextlib import suppress

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from api.background import run_in_daemon_thread
from api.problems import ProblemError, ProblemKind
from api.queries.routes import json_response
from api.server import running_server
from api.settings import ApiSettings
from api.static_files import static_routes
from kv_events.http.service import Status
from kv_events.kernels import load

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
