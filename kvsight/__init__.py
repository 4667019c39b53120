"""The public names, for engines and routers.

Names are imported on first use, so a router does not load what engines need, nor the other way round. Everything that a
router uses imports only `kvsight` and `kv_events`; what an engine uses also `engine_cache` and `publisher`. `cli` holds
the `kvsight` command, `schemas` the answers of the API.

Start at `client`, then `calls`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_cache import RadixCache
    from kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvsightError, StorageMedium
    from kv_events.hashing import sequence_hashes
    from kvsight.choice import WorkerChoice, best_worker
    from kvsight.client import AsyncClient, Client
    from kvsight.errors import KvsightConnectionError, KvsightHttpError
    from kvsight.prompts import Prompt
    from kvsight.retrying import RetryPolicy
    from publisher import EventPublisher, PublisherSettings
    from publisher.sinks.file import FileSink
    from publisher.sinks.kafka import KafkaSink
    from publisher.sinks.zmq import ZmqSink

_HOMES = {
    "AllBlocksCleared": "kv_events",
    "AsyncClient": "kvsight.client",
    "BlockRemoved": "kv_events",
    "BlockStored": "kv_events",
    "Client": "kvsight.client",
    "EventPublisher": "publisher",
    "FileSink": "publisher.sinks.file",
    "KafkaSink": "publisher.sinks.kafka",
    "KvsightConnectionError": "kvsight.errors",
    "KvsightError": "kv_events",
    "KvsightHttpError": "kvsight.errors",
    "Prompt": "kvsight.prompts",
    "PublisherSettings": "publisher",
    "RadixCache": "engine_cache",
    "RetryPolicy": "kvsight.retrying",
    "StorageMedium": "kv_events",
    "WorkerChoice": "kvsight.choice",
    "ZmqSink": "publisher.sinks.zmq",
    "best_worker": "kvsight.choice",
    "sequence_hashes": "kv_events.hashing",
}

__all__ = [
    "AllBlocksCleared",
    "AsyncClient",
    "BlockRemoved",
    "BlockStored",
    "Client",
    "EventPublisher",
    "FileSink",
    "KafkaSink",
    "KvsightConnectionError",
    "KvsightError",
    "KvsightHttpError",
    "Prompt",
    "PublisherSettings",
    "RadixCache",
    "RetryPolicy",
    "StorageMedium",
    "WorkerChoice",
    "ZmqSink",
    "best_worker",
    "sequence_hashes",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvsight' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
