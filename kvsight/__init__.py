"""The face of the project: what people use from their own process.

`from kvsight import EventPublisher, RadixCache` imports only what is asked for, when it is asked for, so that an engine
does not load the router's side, nor a router the engine's. The `kvsight` command lives in `cli`, one file a subcommand.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_cache import RadixCache
    from indexer.index import OverlapIndex
    from kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvsightError, StorageMedium
    from kv_events.hashing import sequence_hashes
    from publisher import EventPublisher, PublisherSettings
    from publisher.sinks.file import FileSink
    from publisher.sinks.kafka import KafkaSink

_HOMES = {
    "AllBlocksCleared": "kv_events",
    "BlockRemoved": "kv_events",
    "BlockStored": "kv_events",
    "EventPublisher": "publisher",
    "FileSink": "publisher.sinks.file",
    "KafkaSink": "publisher.sinks.kafka",
    "KvsightError": "kv_events",
    "OverlapIndex": "indexer.index",
    "PublisherSettings": "publisher",
    "RadixCache": "engine_cache",
    "StorageMedium": "kv_events",
    "sequence_hashes": "kv_events.hashing",
}

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EventPublisher",
    "FileSink",
    "KafkaSink",
    "KvsightError",
    "OverlapIndex",
    "PublisherSettings",
    "RadixCache",
    "StorageMedium",
    "sequence_hashes",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvsight' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
