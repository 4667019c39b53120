"""The engine side: radix caches that hold KV pages and report them in events.

    presets        five cache classes: each chooses components, tiers and rules
    cache          TreeCache, the common implementation
    tiers          device, host, storage; all except the device are optional
    components     the kinds of state: full KV, recurrent states, sliding windows
    tree           a radix tree: keys, nodes, LRU and eviction order, events

Owns the caches, their pools and the copies between pools. Imports `kv_events` and nothing else of the project. Trees
and allocators use numpy index arrays. Only the modules of `pools` that hold tensors import torch, and this module does
not import them. Start at `base.py`, which is the interface, then `cache.py`.
"""

from engine_cache.base import (
    BasePrefixCache,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InitLoadBackParams,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    Request,
)
from engine_cache.cache import TreeCache
from engine_cache.components.component import TreeComponent
from engine_cache.components.mamba import MambaComponent
from engine_cache.components.swa import SWAComponent
from engine_cache.errors import CacheStateError, PoolError, PoolExhaustedError, StackError, TransferError
from engine_cache.pools.allocators import MambaSlotAllocator, PagedTokenToKVPoolAllocator
from engine_cache.pools.entry import HostPoolGroup, PoolEntry
from engine_cache.pools.host_rows import BytelessHostPool
from engine_cache.pools.req_to_token import ReqToTokenPool
from engine_cache.pools.swa_allocator import SWATokenToKVPoolAllocator
from engine_cache.presets import HiMambaRadixCache, HiRadixCache, MambaRadixCache, RadixCache, UnifiedRadixCache
from engine_cache.storage.operations import StoragePolicy
from engine_cache.tiers.backup import WRITE_POLICIES
from engine_cache.tiers.copying import Lane, ManualCopyEngine, ThreadCopyEngine
from engine_cache.tiers.transfer import HiCacheController, HybridCacheController
from engine_cache.tree.events import KVCacheEventMixin
from engine_cache.tree.eviction import EVICTION_POLICIES
from engine_cache.tree.key import RadixKey
from engine_cache.tree.node import ComponentType, TreeNode
from engine_cache.types import IndexArray

__all__ = [
    "EVICTION_POLICIES",
    "WRITE_POLICIES",
    "BasePrefixCache",
    "BytelessHostPool",
    "CacheStateError",
    "ComponentType",
    "DecLockRefParams",
    "DecLockRefResult",
    "EvictParams",
    "EvictResult",
    "HiCacheController",
    "HiMambaRadixCache",
    "HiRadixCache",
    "HostPoolGroup",
    "HybridCacheController",
    "IncLockRefResult",
    "IndexArray",
    "InitLoadBackParams",
    "InsertParams",
    "InsertResult",
    "KVCacheEventMixin",
    "Lane",
    "MambaComponent",
    "MambaRadixCache",
    "MambaSlotAllocator",
    "ManualCopyEngine",
    "MatchPrefixParams",
    "MatchResult",
    "PagedTokenToKVPoolAllocator",
    "PoolEntry",
    "PoolError",
    "PoolExhaustedError",
    "RadixCache",
    "RadixKey",
    "ReqToTokenPool",
    "Request",
    "SWAComponent",
    "SWATokenToKVPoolAllocator",
    "StackError",
    "StoragePolicy",
    "ThreadCopyEngine",
    "TransferError",
    "TreeCache",
    "TreeComponent",
    "TreeNode",
    "UnifiedRadixCache",
]
