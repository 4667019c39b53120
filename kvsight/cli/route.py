"""`kvsight route`"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kv_events.errors import InvalidValueError
from kv_events.http.service import DEFAULT_URL
from kvsight.cli.shared.console import err
from kvsight.cli.shared.flags import LOG_LINES, ApiToken, Url, with_flags
from kvsight.cli.shared.process import stop_signals
from kvsight.extras import require

_Workers = Annotated[
    list[str] | None, typer.Option(help="A worker, if kvsight lacks its address: NAME=http://HOST:PORT.")
]


@with_flags(LOG_LINES)
def route(
    url: Url = DEFAULT_URL,
    api_token: ApiToken = None,
    host: Annotated[str, typer.Option(help="Address to listen on: 0.0.0.0 if callers run elsewhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on. 0: any free one.", min=0, max=65_535)] = 9000,
    worker: _Workers = None,
    gateway: Annotated[
        str | None, typer.Option(help="Address of an SMG gateway, if one passes requests on to the engines.")
    ] = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Send each request to the engine that kvsight chooses.

    A small reverse proxy for OpenAI-compatible engines, for trying out and for small fleets. Its workers are those with
    an endpoint in GET /workers, and those of --worker. If kvsight does not answer within 0.25 s, they take turns. A
    worker that fails before the first byte is left out for five seconds, and another one is asked.

    Example: kvsight route --url http://localhost:8000 --port 9000
    """
    require("serve", "kvsight route")
    import uvloop

    workers = {}
    for text in worker or []:
        name, _, workers[name] = text.partition("=")
        if not name or not workers[name].startswith(("http://", "https://")):
            raise InvalidValueError("--worker", text, "NAME=http://HOST:PORT")

    async def serve() -> None:
        from aiohttp import web

        from kvsight.routers.gateway import Gateway
        from kvsight.routers.placement import Placement
        from kvsight.routers.proxy import RouteProxy

        placement = Placement(url, token=api_token, workers=workers)
        app = RouteProxy(placement, Gateway(gateway) if gateway else None).app()
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        stop = stop_signals()
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            err.print(f"kvsight routes on http://{host}:{runner.addresses[0][1]}")
            await stop.wait()
        finally:
            await runner.cleanup()

    uvloop.run(serve())
