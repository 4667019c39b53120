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
from engine_cache.cache import TreeCache
from engine_cache.components.component import LruOrder
from engine_cache.mamba import MambaOptions, node_states
from engine_cache.pools.allocators import MambaSlotAllocator, PagedTokenToKVPoolAllocator
from engine_cache.rules import MAMBA
from engine_cache.storage.base import PoolName
from engine_cache.tiers.transfer import HybridCacheController
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
        **options: Unpack[MambaOptions],
    ) -> None:
        self._states, others = node_states(page_size, mamba_allocator, options)
        self.mamba_allocator = mamba_allocator
        super().__init__(
            page_size=page_size,
            allocator=allocator,
            components=[self._states],
            rules=MAMBA,
            eviction_policy="lru",
            **others,
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

    def evict_full(self, num_tokens: int) -> EvictResult:
        """Evict device leaves, least recently used first, until `num_tokens` units are free or no leaf is left."""
        return self.evict(EvictParams(num_tokens))

    def evict_mamba_host(self, mamba_num: int) -> int:
        """Free states on the host, least recently used first. Returns their number.

        A host leaf loses all its data. Other nodes lose only the state, which is not an event.
        """
        assert self.host is not None
        return self.host.leaves.evict_component(self._states, mamba_num)
