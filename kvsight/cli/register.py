"""`kvsight register` and `kvsight unregister`"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kv_events.http.service import DEFAULT_URL
from kv_events.runtime.words import names
from kvsight.cli.shared.console import EngineFile, Model, UsageError, print_lines
from kvsight.cli.shared.flags import ApiToken, Url

if TYPE_CHECKING:
    from kvsight.client import Client

_TIMEOUT_S = 20.0  # the service looks names up, and waits until queries know the engine
_MORE = (
    *("block_size", "dp_rank", "replay_endpoint", "eagle", "count_copies", "attention_chunk_size"),
    *("capacity", "metrics_url"),
)


def register(
    engine: Annotated[list[str] | None, typer.Argument(help="NAME=tcp://HOST:PORT,... as for serve.")] = None,
    config: EngineFile = None,
    model: Model = None,
    url: Url = DEFAULT_URL,
    api_token: ApiToken = None,
) -> None:
    """Let a running indexer read engines.

    Registers every rank of each engine, as POST /register does. The fields after the name and the address are those of
    `kvsight serve --engine`: model, replay (a port or an address), ranks, block_size, tenant and others. What is
    registered already stays as it is.

    Example: kvsight register --model my-model engine-0=tcp://gpu-0:5557,replay=5558
    """
    from bridge import engines_of
    from kvsight.client import Client

    engines = engines_of(config, engine or [], model)
    if not engines:
        raise UsageError("no engine: give NAME=tcp://HOST:PORT, or --config")
    for each in engines:
        if each.worker is None or each.topic or each.bind or each.url or each.republish:
            needs = "topic, bind, url, republish or without a name"
            raise UsageError(f"{each.endpoint}: only serve and bridge have --engine with {needs}")
    with Client(url, token=api_token, timeout_s=_TIMEOUT_S) as client:
        for each in engines:
            for rank in (each.of_rank(offset) for offset in range(each.num_ranks)):
                client.register(
                    str(rank.worker),
                    rank.endpoint,
                    str(rank.model),
                    tenant=rank.tenant,
                    lora_name=rank.lora_name or None,
                    cache_salt=rank.cache_salt or None,
                    more={name: getattr(rank, name) for name in _MORE},
                )
                print_lines([f"{rank.worker} rank {rank.dp_rank} of model {rank.model} is read from {rank.endpoint}"])


def unregister(
    worker: Annotated[str, typer.Argument(help="Name of the worker.")],
    model: Annotated[str | None, typer.Option(help="Its model, if several have the name.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Its tenant, if several have the name.")] = None,
    rank: Annotated[int | None, typer.Option(help="Only this rank.", min=0)] = None,
    url: Url = DEFAULT_URL,
    api_token: ApiToken = None,
) -> None:
    """Let a running indexer forget a worker.

    Its pages leave all answers. An engine that the indexer reads is read no longer. A worker of a log is forgotten if
    it is expired, and comes back with its next batch.

    Example: kvsight unregister engine-0
    """
    from kvsight.client import Client

    with Client(url, token=api_token, timeout_s=_TIMEOUT_S) as client:
        of_model, of_tenant = _namespace(client, worker, model, tenant)
        client.unregister(worker, of_model, dp_rank=rank, tenant=of_tenant)
        print_lines([f"{worker}{'' if rank is None else f' rank {rank}'} of model {of_model} is forgotten"])


def _namespace(client: Client, worker: str, model: str | None, tenant: str | None) -> tuple[str, str]:
    """Return the only model and tenant of a worker. Raises UsageError."""
    known = client.workers(model, tenant)
    found = sorted({(each.model_name, each.routing_group) for each in known if each.instance_id == worker})
    if len(found) == 1:
        return found[0]
    if found:
        several = names([f"{of_model} of tenant {of_tenant}" for of_model, of_tenant in found])
        raise UsageError(f"{worker} serves {several}: give --model or --tenant")
    others = sorted({each.instance_id for each in known})
    of_model = f" of model {model}" if model else ""
    raise UsageError(f"no worker {worker}{of_model} is known; known: {names(others) or 'none'}")
