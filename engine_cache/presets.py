"""The five cache classes. Each chooses components, tiers and rules of `TreeCache`."""

from collections.abc import Callable, Sequence
from typing import TypedDict, Unpack

import numpy as np

from engine_cache.base import InitLoadBackParams, Request
from engine_cache.cache import TreeCache
from engine_cache.components.component import AuxiliaryComponent
from engine_cache.components.mamba import NodeStates, StatePool
from engine_cache.pools.allocators import (
    MambaSlotAllocator,
    PagedTokenToKVPoolAllocator,
    ReqToTokenPool,
    SWATokenToKVPoolAllocator,
)
from engine_cache.tiers.transfer import HiCacheController, HybridCacheController
from engine_cache.tree.node import ComponentType, TreeNode, path_down
from engine_cache.types import IndexArray, no_indices
from engine_cache.variants import MAMBA, RADIX, UNIFIED
from kv_events.errors import InvalidValueError


class CacheOptions(TypedDict, total=False):
    """Options of every cache. See `TreeCache`."""

    req_to_token_pool: ReqToTokenPool | None
    enable_kv_cache_events: bool
    emit_group_events: bool
    is_eagle: bool
    disable: bool
    seed_of_extra_key: Callable[[str], int]


class RadixOptions(CacheOptions, total=False):
    """Options of caches with a choice of eviction policies."""

    eviction_policy: str


class StateOptions(CacheOptions, total=False):
    """Options of caches with recurrent states. See `MambaComponent`."""

    mamba_pool: StatePool | None
    enable_mamba_extra_buffer: bool
    mamba_cache_chunk_size: int


class RadixCache(TreeCache):
    """A radix tree over device pages. The options of all caches are those of `TreeCache`."""

    def __init__(
        self, *, page_size: int, allocator: PagedTokenToKVPoolAllocator | None = None, **options: Unpack[RadixOptions]
    ) -> None:
        super().__init__(page_size=page_size, allocator=allocator, variant=RADIX, **options)


class HiRadixCache(TreeCache):
    """A radix tree over device and host pages, with an optional storage backend behind them.

        root ── A ──┬── B ── C'      A, B: on the device; ' : evicted, on the host only
                    └── D'           nodes on the device always form a prefix of the tree

    `insert` adds pages, `evict` moves them to the host or deletes them, and `init_load_back` loads them back. Copies
    run concurrently: the scheduler calls `ready_to_load_host_cache` before a batch and `check_hicache_events` between
    batches. The cache must be reset after a TransferError.

    controller: moves the pages; its KV device allocator must be `allocator`. write_policy: `write_through` (copy at the
    first hit), `write_through_selective` (copy at the second hit) or `write_back` (copy at eviction).
    load_back_threshold: minimum number of units of a load-back that includes no state.
    """

    def __init__(
        self,
        *,
        page_size: int,
        allocator: PagedTokenToKVPoolAllocator,
        controller: HiCacheController,
        write_policy: str = "write_through",
        load_back_threshold: int = 10,
        **options: Unpack[RadixOptions],
    ) -> None:
        super().__init__(page_size=page_size, allocator=allocator, variant=RADIX, **options)
        self._add_host_tier(controller, write_policy, load_back_threshold)


class MambaRadixCache(TreeCache):
    """A radix tree over device pages and the recurrent states at the ends of some of its nodes.

        root ── A ──┬── B*          *: has a state, which is valid exactly at the end of its node
                    └── C ── D*     a prompt that leaves D* in its middle can continue from the root only

    A page of KV can be used by every prompt that shares it, but a state cannot be divided. A match therefore ends at
    the deepest node with a state. A node that was split, or that lost its state, is a *tombstone*. A tombstone without
    children is deleted. States and KV are evicted separately, the least recently used first.

    The options of the states are those of `MambaComponent`.
    """

    def __init__(
        self,
        *,
        page_size: int,
        mamba_allocator: MambaSlotAllocator,
        allocator: PagedTokenToKVPoolAllocator | None = None,
        mamba_pool: StatePool | None = None,
        enable_mamba_extra_buffer: bool = False,
        mamba_cache_chunk_size: int = 64,
        **options: Unpack[CacheOptions],
    ) -> None:
        self.mamba_allocator = mamba_allocator
        states = NodeStates(mamba_allocator, mamba_pool, enable_mamba_extra_buffer, mamba_cache_chunk_size)
        super().__init__(
            page_size=page_size,
            allocator=allocator,
            components=[states],
            variant=MAMBA,
            eviction_policy="lru",
            **options,
        )


class HiMambaRadixCache(MambaRadixCache):
    """A radix tree over device and host pages and recurrent states, with an optional storage backend behind them.

        root ── A* ──┬── B ── C°'     *: a state on the device   °: one on the host   ': KV on the host only
                     └── D*°

    KV moves as in `HiRadixCache`. The state at a node's end moves with it in one operation, which succeeds or fails as
    a whole. On each tier a state can be evicted before its KV, which is not an event. A match ends at the deepest state
    on either tier.

    controller: moves KV and, as its sidecar MAMBA, states; its device allocators must be `allocator` and
    `mamba_allocator`. The other options are those of `HiRadixCache` and `MambaRadixCache`.
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
        **options: Unpack[StateOptions],
    ) -> None:
        super().__init__(page_size=page_size, allocator=allocator, mamba_allocator=mamba_allocator, **options)
        self._add_host_tier(controller, write_policy, load_back_threshold)


class UnifiedRadixCache(TreeCache):
    """One radix tree for every kind of state, with one to three tiers.

        root ── A ── B* ── C°'     nodes consist of KV; some of them have data of other kinds
                                   (*: on the device, °: on the host;  ': KV on the host only)

    KV moves as in `HiRadixCache`. Data of the other kinds moves with it in one operation, or is evicted or restored
    alone, which is not an event. A match ends only where all kinds can continue.

    components: the kinds of state besides Full KV, each at most once. allocator: owner of the device rows; with SWA,
    the allocator of its component. Without `init_hicache` the device is the only tier.
    """

    def __init__(
        self,
        *,
        page_size: int,
        allocator: PagedTokenToKVPoolAllocator | SWATokenToKVPoolAllocator,
        components: Sequence[AuxiliaryComponent] = (),
        **options: Unpack[RadixOptions],
    ) -> None:
        kinds = [ComponentType.FULL, *(component.kind for component in components)]
        if len(set(kinds)) != len(kinds):
            raise InvalidValueError("components", [kind.name for kind in kinds], "each kind once, FULL not named")
        if isinstance(allocator, SWATokenToKVPoolAllocator) != (ComponentType.SWA in kinds):
            expected = "one with SWA rows exactly for an SWA component"
            raise InvalidValueError("allocator", type(allocator).__name__, expected)
        super().__init__(page_size=page_size, allocator=allocator, components=components, variant=UNIFIED, **options)

    def init_hicache(
        self, controller: HiCacheController, write_policy: str = "write_through", load_back_threshold: int = 10
    ) -> None:
        """Add a host tier, once and while the cache is empty.

        controller: moves KV and, as its sidecars, the data of all components; it must use their device allocators.
        write_policy, load_back_threshold: as in `HiRadixCache`.
        """
        if self.host is not None or self.root_node.children:
            raise InvalidValueError("controller", controller, "the first one, before anything is cached")
        self._add_host_tier(controller, write_policy, load_back_threshold)

    def component(self, kind: ComponentType) -> AuxiliaryComponent:
        """Return the component of an auxiliary kind. Raises InvalidValueError if the cache does not have it."""
        for component in self.auxiliaries:
            if component.kind is kind:
                return component
        raise InvalidValueError("kind", kind.name, f"one of {[component.kind.name for component in self.auxiliaries]}")

    def init_load_back(self, params: InitLoadBackParams) -> tuple[IndexArray, TreeNode]:
        """Load back the missing part of a match.

        Returns the rows by which the request's prefix grows, and the node from which it continues. `req.last_node` must
        be the device node of the match, and locked. If nothing was loaded, the request continues there, and may own a
        state slot already.

        Raises InvalidValueError without a request or if that node is not above the match, and PoolExhaustedError if
        there is no slot for the state that the request starts from.
        """
        node, req = params.best_match_node, params.req
        if req is None or req.last_node is None:
            raise InvalidValueError("req", req, "a request with a last_node")
        start = req.last_node
        added = path_down(node, lambda step: step is not start)
        if node.former_parent is None and (added[0].parent if added else node) is not start:
            raise InvalidValueError("req.last_node", f"node {start.id}", f"a node on the way to node {node.id}")
        is_requested = node.value is None or params.host_hit_length > 0
        if not is_requested and req.swa_host_hit_length <= 0 and req.mamba_host_hit_length <= 0:
            return no_indices(), start
        self._copy_state(req, node)  # a state that is on the device already is copied, not loaded
        if self._is_usable(node) and self.load_back(node, params.mem_quota, req) is not None:
            rows = [step.value for step in added if step.value is not None]
            assert len(rows) == len(added), "a node was loaded, but is not on the device"
            return np.concatenate([no_indices(), *rows]), node if rows else start
        self._copy_state(req, start)
        return no_indices(), start

    def _copy_state(self, req: Request, node: TreeNode) -> None:
        if self.states is not None:
            self._requests.copy_on_write(req, self.states.data(node).value, [node])

    def _is_usable(self, node: TreeNode) -> bool:
        """Return whether a match can still end at a node, which may have lost data or been deleted since."""
        if node.former_parent is not None:
            return False
        path = self.tree.path_to_root(node)[::-1]
        return self._walks.usable(path).num_best == len(path)
