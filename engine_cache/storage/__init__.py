"""Storage backends behind the host tier: a local directory, and a Mooncake store shared by engines.

Contains the interface of backends (`base`), the names of pages (`object_names`) and the backends themselves. Start at
`base.py`. `directory.py` needs torch and `mooncake.py` the Mooncake client, so this module imports neither.
"""

from engine_cache.storage.base import (
    HiCacheStorage,
    PagedHostPool,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
    StorageClosedError,
    StorageStats,
    ZeroCopyHostPool,
)
from engine_cache.storage.object_names import PageLayout, StorageIdentity, page_key, page_keys

__all__ = [
    "HiCacheStorage",
    "PageLayout",
    "PagedHostPool",
    "PoolHitPolicy",
    "PoolName",
    "PoolTransfer",
    "PoolTransferResult",
    "StorageClosedError",
    "StorageIdentity",
    "StorageStats",
    "ZeroCopyHostPool",
    "page_key",
    "page_keys",
]
