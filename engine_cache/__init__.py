"""The engine side: radix caches that hold KV pages and say so in events.

Owns keys, trees, eviction, and the pools below them; imports `kv_events` and nothing else of the project. Trees and
allocators work on numpy index arrays; torch is imported by `engine_cache.pools.device` only, never from here. Start at
`base.py`, which is the interface, then `radix.py`.
"""

from engine_cache.base import (
    BasePrefixCache,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    Request,
)
from engine_cache.errors import CacheStateError, PoolError
from engine_cache.events import KVCacheEventMixin, ResidentPage
from engine_cache.eviction import EVICTION_POLICIES
from engine_cache.key import RadixKey
from engine_cache.node import TreeNode, compute_node_hash_values, split_node_hash_value
from engine_cache.pools import PagedTokenToKVPoolAllocator, ReqToTokenPool
from engine_cache.radix import RadixCache
from engine_cache.types import IndexArray

__all__ = [
    "EVICTION_POLICIES",
    "BasePrefixCache",
    "CacheStateError",
    "DecLockRefResult",
    "EvictParams",
    "EvictResult",
    "IncLockRefResult",
    "IndexArray",
    "InsertParams",
    "InsertResult",
    "KVCacheEventMixin",
    "MatchPrefixParams",
    "MatchResult",
    "PagedTokenToKVPoolAllocator",
    "PoolError",
    "RadixCache",
    "RadixKey",
    "ReqToTokenPool",
    "Request",
    "ResidentPage",
    "TreeNode",
    "compute_node_hash_values",
    "split_node_hash_value",
]
