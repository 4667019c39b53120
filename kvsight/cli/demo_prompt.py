"""`kvsight demo-prompt`"""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer


def demo_prompt(
    model: Annotated[str, typer.Option(help="Model to name in the query.", envvar="KVSIGHT_MODEL")] = "demo-model",
) -> None:
    """Print a query for which each `kvsight engine` holds a part.

    How much depends on the engine's `--seed`: 0 holds all 2048 tokens, 1 a half, 2 a quarter, 3 an eighth. The output
    is the body of POST /query: `kvsight demo-prompt | kvsight query -`.
    """
    from simulation.workload import demo_prompt as prompt

    typer.echo(msgspec.json.encode({"model_name": model, "token_ids": prompt().tolist()}))
