"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

Url: TypeAlias = Annotated[str, typer.Option(help="Address of the API.", envvar="KVSIGHT_URL")]
ApiToken: TypeAlias = Annotated[
    str | None, typer.Option(help="Bearer token, if the API requires one.", envvar="KVSIGHT_API_TOKEN")
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
