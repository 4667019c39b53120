"""`kvsight endpoint-picker`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kv_events.http.service import DEFAULT_URL
from kvsight.cli.shared.console import UsageError, err
from kvsight.cli.shared.flags import ApiToken, Url
from kvsight.cli.shared.process import stop_signals
from kvsight.extras import require


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
