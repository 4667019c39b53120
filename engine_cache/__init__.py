"""The engine side: radix caches that hold KV pages and say so in events.

Owns keys, trees, eviction, the pools below them and the copies between those; imports `kv_events` and nothing else of
the project. Trees and allocators work on numpy index arrays; torch is imported by the modules of `pools` that hold
tensors, never from here. Start at `base.py`, which is the interface, then `radix.py`; for tiers `hiradix.py`, below it
the package `tiers`, and what moves the data: `transfer.py`, with more kinds of state `hybrid_transfer.py`; for
recurrent states `mamba.py`, and with tiers `himamba.py`; for states of any kind in one tree `unified/cache.py`.
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
from engine_cache.copying import CopyEngine, Lane, ManualCopyEngine, ThreadCopyEngine
from engine_cache.errors import CacheStateError, PoolError, PoolExhaustedError, StackError, TransferError
from engine_cache.himamba import HiMambaRadixCache
from engine_cache.hiradix import HiRadixCache
from engine_cache.mamba import MambaRadixCache
from engine_cache.pool_entry import HostPoolGroup, PoolEntry
from engine_cache.pools import MambaSlotAllocator, PagedTokenToKVPoolAllocator, ReqToTokenPool
from engine_cache.pools.host_rows import BytelessHostPool
from engine_cache.pools.swa_allocator import SWATokenToKVPoolAllocator
from engine_cache.radix import RadixCache
from engine_cache.storage_operations import StoragePolicy
from engine_cache.tiers.backup import WRITE_POLICIES
from engine_cache.transfer import HiCacheController, HybridCacheController
from engine_cache.tree.events import KVCacheEventMixin, ResidentPage
from engine_cache.tree.eviction import EVICTION_POLICIES
from engine_cache.tree.key import RadixKey
from engine_cache.tree.node import TreeNode, compute_node_hash_values, split_node_hash_value
from engine_cache.types import IndexArray
from engine_cache.unified import (
    AuxiliaryComponent,
    ComponentType,
    MambaComponent,
    SWAComponent,
    TreeComponent,
    UnifiedRadixCache,
)

__all__ = [
    "EVICTION_POLICIES",
    "WRITE_POLICIES",
    "AuxiliaryComponent",
    "BasePrefixCache",
    "BytelessHostPool",
    "CacheStateError",
    "ComponentType",
    "CopyEngine",
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
    "ResidentPage",
    "SWAComponent",
    "SWATokenToKVPoolAllocator",
    "StackError",
    "StoragePolicy",
    "ThreadCopyEngine",
    "TransferError",
    "TreeComponent",
    "TreeNode",
    "UnifiedRadixCache",
    "compute_node_hash_values",
    "split_node_hash_value",
]
