"""`kvsight route`"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from kv_events.errors import InvalidValueError
from kv_events.http.service import DEFAULT_URL
from kvsight.cli.shared.console import UsageError, err
from kvsight.cli.shared.flags import LOG_LINES, ApiToken, Url, with_flags
from kvsight.cli.shared.process import stop_signals
from kvsight.extras import require
from kvsight.routers.placement import DEADLINE_S, Placement


@with_flags(LOG_LINES)
def route(
    url: Url = DEFAULT_URL,
    token: ApiToken = None,
    host: Annotated[str, typer.Option(help="Address to listen on: 0.0.0.0 if callers run elsewhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on. 0: any free one.", min=0, max=65_535)] = 9000,
    worker: Annotated[
        list[str] | None, typer.Option(help="Address of a worker, if kvsight lacks it: NAME=http://HOST:PORT.")
    ] = None,
    deadline_s: Annotated[
        float, typer.Option(help="Seconds to wait for kvsight, if tokens take longer.", min=0.001, max=60)
    ] = DEADLINE_S,
    *,
    flags: dict[str, Any],
) -> None:
    """Send requests for engines to the worker that kvsight chooses.

    A small reverse proxy for OpenAI-compatible engines, for trying out and for small fleets. Its workers are those with
    an endpoint in GET /workers, and those of --worker. If kvsight does not answer within the deadline, they take turns.
    A worker that fails before the first byte is left out for five seconds, and another one is asked.

    Example: kvsight route --url http://localhost:8000 --port 9000
    """
    require("serve", "kvsight route")
    import uvloop

    placement_of = {"url": url, "token": token, "deadline_s": deadline_s, "workers": _addresses(worker or [])}
    uvloop.run(_serve(host, port, placement_of))


async def _serve(host: str, port: int, placement_of: Mapping[str, Any]) -> None:
    from aiohttp import web

    from kvsight.routers.proxy import RouteProxy

    stop = stop_signals()
    runner = web.AppRunner(RouteProxy(Placement(**placement_of)).app(), handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}") from None
        bound = runner.addresses[0][1]
        err.print(f"kvsight routes on http://{host}:{bound}")
        await stop.wait()
    finally:
        await runner.cleanup()


def _addresses(workers: Sequence[str]) -> dict[str, str]:
    """Return name -> address of the flags. Raises InvalidValueError."""
    found = {}
    for text in workers:
        name, _, address = text.partition("=")
        if not name or not address.startswith(("http://", "https://")):
            raise InvalidValueError("--worker", text, "NAME=http://HOST:PORT")
        found[name] = address
    return found
