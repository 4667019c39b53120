"""`kvsight query`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kvsight.cli.console import out, print_json, read_json_object

_TIMEOUT_S = 30.0  # people wait longer than routers


def query(
    prompt: Annotated[
        Path, typer.Argument(help='JSON file: {"model_name": "m", "token_ids": [1, 2, ...]}. "-" reads stdin.')
    ],
    url: Annotated[str, typer.Option(help="Address of the API.", envvar="KVSIGHT_URL")] = "http://127.0.0.1:8000",
    api_token: Annotated[
        str | None, typer.Option(help="Bearer token, if the API requires one.", envvar="KVSIGHT_API_TOKEN")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the API's answer as JSON.")] = False,
) -> None:
    """Ask a running indexer how much of a prompt each worker holds.

    The file is the body of POST /query, or of POST /query_by_hash if it contains seq_hashes, block_hashes or
    block_hash.
    """
    from kvsight.client import Client

    question = read_json_object(prompt)
    with Client(url, token=api_token, timeout_s=_TIMEOUT_S) as client:
        answer = client.query_raw(question)
    if as_json:
        print_json(answer)
    else:
        out.print(answer_table(answer))


def answer_table(answer: dict[str, Any]) -> Table:
    """A table of the tokens that each worker holds, from an answer in either dialect."""
    instances = answer.get("instances")
    if instances is None:  # {tenant: {instance: ...}}
        instances = {name: tiers for tenant in answer.values() for name, tiers in tenant.items()}
    table = Table(title="tokens held, on a tier or a faster one")
    table.add_column("worker")
    for column in ("gpu", "cpu", "disk", "external"):
        table.add_column(column, justify="right")
    table.add_column("state")
    for name, tiers in sorted(instances.items(), key=lambda item: -item[1]["longest_matched"]):
        lower = {key.lower(): value for key, value in tiers.items()}
        counts = [str(lower.get(tier, "")) for tier in ("gpu", "cpu", "disk", "external")]
        table.add_row(name, *counts, str(lower.get("state", "")))
    return table
