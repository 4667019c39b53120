"""What the server answers while kernels are compiled, which happens once on a machine."""

import asyncio
import socket

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


def compile_and_answer(settings: ApiSettings, bound: socket.socket) -> None:
    """Compile the kernels that are missing. Meanwhile, `/health` is 200 and every request for data 503.

    bound: the socket to answer on, which stays open.
    """

    async def serve() -> None:
        async with running_server(_starting_app(), settings, bound.dup()):
            await run_in_daemon_thread(load.compile_missing)

    asyncio.run(serve())


def _starting_app() -> Starlette:
    async def health(_request: Request) -> Response:
        return json_response(Status(status="ok"))

    async def refuse(_request: Request) -> Response:
        return ProblemError(503, ProblemKind.KERNELS_LOADING, load.progress(), retry_after_s=1).response()

    every_path = Route("/{path:path}", refuse, methods=_METHODS)
    return Starlette(routes=[Route("/health", health), *static_routes(), every_path])
