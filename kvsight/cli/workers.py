"""`kvsight workers`"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from kv_events.http.service import DEFAULT_URL
from kvsight.cli.console import err, out, print_json, print_lines
from kvsight.cli.options import ApiToken, AsJson, Url
from kvsight.cli.streams import namespace_text, rows_of, streams_lines
from kvsight.errors import KvsightConnectionError

if TYPE_CHECKING:
    from kv_events.http.workers import Worker
    from kvsight.client import Client

_TIMEOUT_S = 30.0


def workers(
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant (routing group).")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between two tables.", min=0.1, max=3600)] = 1.0,
    url: Url = DEFAULT_URL,
    api_token: ApiToken = None,
    as_json: AsJson = False,
) -> None:
    """List the workers that a running indexer knows.

    Each row is one rank of a worker: the state of its view, when it was last heard, and the pages that it holds on
    each tier. --json prints the answer of GET /workers, with --watch one answer in each line.

    Example: kvsight workers --watch
    """
    from kvsight.client import Client

    with Client(url, token=api_token, timeout_s=_TIMEOUT_S) as client:
        if not watch:
            _show(client.workers(model, tenant), model, tenant, as_json)
        else:
            _watch(client, model, tenant, interval, as_json)


def _show(found: list[Worker], model: str | None, tenant: str | None, as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        print_lines(_lines(found, model, tenant))


def _lines(found: Iterable[Worker], model: str | None, tenant: str | None) -> Iterator[str]:
    rows = rows_of(found)
    if rows:
        yield from streams_lines(rows, out.width)
    else:
        yield "no worker is known" + (f" for {namespace_text(model, tenant or 'default', 0)}" if model else "")


def _watch(client: Client, model: str | None, tenant: str | None, interval: float, as_json: bool) -> None:
    """Print again and again. An outage of the service is reported once and waited out."""
    import msgspec

    is_away = False
    try:
        while True:
            try:
                found = client.workers(model, tenant)
            except KvsightConnectionError as error:
                if not is_away:
                    err.print(f"{error}; trying again", markup=False)
                is_away = True
            else:
                is_away = False
                if as_json:
                    print_lines([msgspec.json.encode(found).decode()])
                else:
                    out.clear()  # nothing unless stdout is a terminal
                    print_lines([time.strftime("%H:%M:%S"), *_lines(found, model, tenant), ""])
            time.sleep(interval)
    except KeyboardInterrupt:
        return
