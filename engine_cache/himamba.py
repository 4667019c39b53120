"""HiMambaRadixCache: the prefix cache of a model with recurrent layers, on device and host, with an optional storage
backend behind them.

    root ── A* ──┬── B ── C°'     *: a state on the device   °: one on the host   ': KV on the host only
                 └── D*°

KV moves as in `HiRadixCache`. The state at a node's end moves with it in one operation, which succeeds or fails as a
whole. On each tier a state can be evicted before its KV, which is not an event. A match ends at the deepest state on
either tier.
"""

from __future__ import annotations

from typing import Unpack

from engine_cache.base import EvictParams, EvictResult
from engine_cache.cache import CacheOptions, TreeCache
from engine_cache.components.component import LruOrder
from engine_cache.components.mamba import StatePool
from engine_cache.mamba import node_states
from engine_cache.pools.allocators import MambaSlotAllocator, PagedTokenToKVPoolAllocator
from engine_cache.rules import MAMBA
from engine_cache.storage.base import PoolName
from engine_cache.tiers.transfer import HybridCacheController
from engine_cache.tree.node import TreeNode
from kv_events.errors import InvalidValueError


class HiMambaRadixCache(TreeCache):
    """A radix tree over device and host pages, and the states at the ends of some of its nodes.

    controller: moves KV and, as its sidecar MAMBA, states; its device allocators must be `allocator` and
    `mamba_allocator`. write_policy, load_back_threshold: as in `HiRadixCache`; the threshold does not apply to a load
    that includes a state. The other options are those of `MambaRadixCache`. The cache must be reset after a
    TransferError.
    """

    def __init__(
        self,
        *,
        page_size: int,
        allocator: PagedTokenToKVPoolAllocator,
        mamba_allocator: MambaSlotAllocator,
        controller: HybridCacheController,
        write_policy: str = "write_through",
        load_back_threshold: int = 10,
        mamba_pool: StatePool | None = None,
        enable_mamba_extra_buffer: bool = False,
        mamba_cache_chunk_size: int = 64,
        **options: Unpack[CacheOptions],
    ) -> None:
        self._states = node_states(
            page_size, mamba_allocator, mamba_pool, enable_mamba_extra_buffer, mamba_cache_chunk_size, options
        )
        self.mamba_allocator = mamba_allocator
        super().__init__(
            page_size=page_size,
            allocator=allocator,
            components=[self._states],
            rules=MAMBA,
            eviction_policy="lru",
            **options,
        )
        entry = controller.entry(PoolName.MAMBA)
        if entry.device_allocator is not mamba_allocator:
            raise InvalidValueError("mamba_allocator", mamba_allocator, "the controller's own for MAMBA")
        if entry.host_pool.page_size != 1:
            raise InvalidValueError("page size of the host pool of states", entry.host_pool.page_size, "1")
        self._add_host_tier(controller, write_policy, load_back_threshold)

    @property
    def mamba_lru_list(self) -> LruOrder:
        """Nodes with a state on the device, in order of use."""
        return self._states.device_lru_list

    @property
    def host_mamba_lru_list(self) -> LruOrder:
        """Nodes with a state on the host that no transfer uses, in order of use."""
        return self._states.host_lru_list

    def evict_full(self, num_tokens: int) -> EvictResult:
        """Evict device leaves, least recently used first, until `num_tokens` units of KV are free or no leaf is
        left."""
        return self.evict(EvictParams(num_tokens))

    def evict_mamba_host(self, mamba_num: int) -> int:
        """Free states on the host, least recently used first. Returns their number.

        A host leaf loses all its data. Other nodes lose only the state, which is not an event.
        """
        assert self.host is not None
        return self.host.leaves.evict_component(self._states, mamba_num)

    def write_state_backup(self, node: TreeNode) -> bool:
        """Start to copy to the host a state that arrived at a node after its KV was copied, whether or not that copy is
        acknowledged.

        Returns False if there is nothing to copy or no room.
        """
        assert self.host is not None
        return self.host.backups.write_late(node)
