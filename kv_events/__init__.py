"""The contract of both sides: what engines publish and what routers read.

Owns the event structs and records (`schema`, `codec`), the hashes of pages (`hashing`, with the kernels of `xxh3`), the
digest that verifies a view (`digest`), the logs that need no broker (`log`), the hash table of
pages that both sides use (`page_table`), and the limits on everything that comes from outside (`limits`). Imports no
other package of the project, and neither torch nor aiokafka nor FastAPI.

Start at `schema`, then `codec`.
"""

from kv_events.errors import InvalidValueError as InvalidValueError
from kv_events.errors import KvsightError as KvsightError
from kv_events.errors import RecordRejectedError as RecordRejectedError
from kv_events.schema import MEDIA as MEDIA
from kv_events.schema import AllBlocksCleared as AllBlocksCleared
from kv_events.schema import BlockRemoved as BlockRemoved
from kv_events.schema import BlockStored as BlockStored
from kv_events.schema import EngineEvent as EngineEvent
from kv_events.schema import StorageMedium as StorageMedium
