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

from engine_cache.base import BasePrefixCache as BasePrefixCache
from engine_cache.base import DecLockRefParams as DecLockRefParams
from engine_cache.base import DecLockRefResult as DecLockRefResult
from engine_cache.base import EvictParams as EvictParams
from engine_cache.base import EvictResult as EvictResult
from engine_cache.base import IncLockRefResult as IncLockRefResult
from engine_cache.base import InitLoadBackParams as InitLoadBackParams
from engine_cache.base import InsertParams as InsertParams
from engine_cache.base import InsertResult as InsertResult
from engine_cache.base import MatchPrefixParams as MatchPrefixParams
from engine_cache.base import MatchResult as MatchResult
from engine_cache.base import Request as Request
from engine_cache.cache import TreeCache as TreeCache
from engine_cache.components.component import TreeComponent as TreeComponent
from engine_cache.components.mamba import MambaComponent as MambaComponent
from engine_cache.components.swa import SWAComponent as SWAComponent
from engine_cache.errors import CacheStateError as CacheStateError
from engine_cache.errors import PoolError as PoolError
from engine_cache.errors import PoolExhaustedError as PoolExhaustedError
from engine_cache.errors import StackError as StackError
from engine_cache.errors import TransferError as TransferError
from engine_cache.pools.allocators import BytelessHostPool as BytelessHostPool
from engine_cache.pools.allocators import MambaSlotAllocator as MambaSlotAllocator
from engine_cache.pools.allocators import PagedTokenToKVPoolAllocator as PagedTokenToKVPoolAllocator
from engine_cache.pools.allocators import ReqToTokenPool as ReqToTokenPool
from engine_cache.pools.allocators import SWATokenToKVPoolAllocator as SWATokenToKVPoolAllocator
from engine_cache.pools.entry import HostPoolGroup as HostPoolGroup
from engine_cache.pools.entry import PoolEntry as PoolEntry
from engine_cache.presets import HiMambaRadixCache as HiMambaRadixCache
from engine_cache.presets import HiRadixCache as HiRadixCache
from engine_cache.presets import MambaRadixCache as MambaRadixCache
from engine_cache.presets import RadixCache as RadixCache
from engine_cache.presets import UnifiedRadixCache as UnifiedRadixCache
from engine_cache.storage.operations import StoragePolicy as StoragePolicy
from engine_cache.tiers.backup import WRITE_POLICIES as WRITE_POLICIES
from engine_cache.tiers.copying import Lane as Lane
from engine_cache.tiers.copying import ManualCopyEngine as ManualCopyEngine
from engine_cache.tiers.copying import ThreadCopyEngine as ThreadCopyEngine
from engine_cache.tiers.transfer import HiCacheController as HiCacheController
from engine_cache.tiers.transfer import HybridCacheController as HybridCacheController
from engine_cache.tree.events import KVCacheEventMixin as KVCacheEventMixin
from engine_cache.tree.eviction import EVICTION_POLICIES as EVICTION_POLICIES
from engine_cache.tree.key import RadixKey as RadixKey
from engine_cache.tree.node import ComponentType as ComponentType
from engine_cache.tree.node import TreeNode as TreeNode
from engine_cache.types import IndexArray as IndexArray
