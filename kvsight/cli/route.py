"""`kvsight route` and `kvsight endpoint-picker`"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from kv_events.errors import InvalidValueError
from kv_events.http.service import DEFAULT_URL
from kv_events.limits import URL_PATTERN
from kvsight.cli.shared.console import UsageError, err
from kvsight.cli.shared.flags import LOG_LINES, ApiToken, Url, with_flags
from kvsight.cli.shared.process import stop_signals
from kvsight.extras import require

_Workers = Annotated[
    list[str] | None, typer.Option(help="A worker, if kvsight lacks its address: NAME=http://HOST:PORT.")
]

_GRACE_S = 2.5
"""Half of the time that requests get to finish at the end: aiohttp waits so long twice."""


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

    workers = dict[str, str]()
    for text in worker or []:
        name, _, address = text.partition("=")
        if not name or not re.match(URL_PATTERN, address):
            raise InvalidValueError("--worker", text, "NAME=http://HOST:PORT")
        if workers.setdefault(name, address) != address:
            raise UsageError(f"--worker: {name} is given twice, as {workers[name]} and as {address}")

    async def serve() -> None:
        from aiohttp import web

        from kvsight.routers.placement import Placement
        from kvsight.routers.proxy import Gateway, RouteProxy

        placement = Placement(url, token=api_token, workers=workers)
        app = RouteProxy(placement, Gateway(gateway) if gateway else None).app()
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_GRACE_S)
        stop = stop_signals()
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            err.print(f"kvsight routes on http://{host}:{runner.addresses[0][1]}")
            await stop.wait()
        except OSError as error:
            from api.server import CannotListenError

            raise CannotListenError(host, port, error) from None
        finally:
            await runner.cleanup()

    uvloop.run(serve())


def endpoint_picker(
    url: Url = DEFAULT_URL,
    api_token: ApiToken = None,
    tenant: Annotated[str | None, typer.Option(help="The tenant, if it is not the default one.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on, if Envoy runs elsewhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: a free one.", min=0, max=65_535)] = 9002,
    deadline_ms: Annotated[int, typer.Option(help="Longest wait for a choice, in ms.", min=1, max=60_000)] = 250,
    tls_cert_file: Annotated[Path | None, typer.Option(help="Certificate, to serve TLS only.")] = None,
    tls_key_file: Annotated[Path | None, typer.Option(help="Its key, if that is in another file.")] = None,
) -> None:
    """Choose endpoints for Envoy, which asks over gRPC.

    It is an endpoint picker of the Gateway API Inference Extension. Without an answer of kvsight in time, candidates
    take turns, or Envoy chooses. No request fails because of that.

    Example: kvsight endpoint-picker --url http://localhost:8000
    """
    require("envoy", "kvsight endpoint-picker")
    if tls_key_file is not None and tls_cert_file is None:
        raise UsageError("--tls-key-file needs --tls-cert-file")
    import uvloop

    from kvsight.routers.endpoint_picker import serving
    from kvsight.routers.placement import Placement

    async def serve() -> None:
        stop = stop_signals()
        certificate = None if tls_cert_file is None else (tls_cert_file, tls_key_file or tls_cert_file)
        placement = Placement(url, token=api_token, deadline_s=deadline_ms / 1000, tenant=tenant)
        async with serving(placement, f"{host}:{port}", certificate) as bound:
            err.print(f"picks endpoints on {host}:{bound}; Ctrl-C stops")
            await stop.wait()

    uvloop.run(serve())
