"""The contract of both sides: what engines publish and what routers read.

Owns the event structs and records (`schema`, `codec`), the hashes of pages (`hashing`, with the kernels of `xxh3`), the
digest that verifies a view (`digest`), the logs that need no broker (`log`), the hash table of
pages that both sides use (`page_table`), and the limits on everything that comes from outside (`limits`). Imports no
other package of the project, and neither torch nor aiokafka nor FastAPI.

Start at `schema`, then `codec`.
"""

from kv_events.errors import InvalidValueError, KvsightError, RecordRejectedError
from kv_events.schema import MEDIA, AllBlocksCleared, BlockRemoved, BlockStored, EngineEvent, StorageMedium

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
