"""The contract of both sides: what engines publish and what routers read.

Owns the event structs and records (`schema`, `codec`), the names of pages (`hashing`, on the kernels of `xxh3`), the
digest that proves a view right (`digest`), the logs that need no broker (`event_log`, `memory_log`), the table of pages
that both sides keep (`page_table`), and the bounds on all that comes from outside (`limits`). Imports nothing of the
project, and neither torch nor aiokafka nor FastAPI.

Start at `schema`, then `codec`.
"""

from kv_events.errors import InvalidValueError, KvsightError, RecordRejectedError
from kv_events.schema import (
    MEDIA,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineEvent,
    StorageMedium,
)

__all__ = [
    "MEDIA",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EngineEvent",
    "InvalidValueError",
    "KvsightError",
    "RecordRejectedError",
    "StorageMedium",
]
