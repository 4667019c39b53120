"""Stores of pages behind the host tier: a local folder, and a Mooncake store that engines share.

Owns the interface that caches and the controller use (`base`), the names pages have in a store (`object_names`) and
the stores themselves; imports the tree's node and index types and `kv_events`. Start at `base.py`. `directory.py` needs
torch and `mooncake.py` the Mooncake client: they are imported by their users, not by this module.
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
