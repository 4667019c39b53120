"""MambaRadixCache: the prefix cache of a model with recurrent layers, on one tier.

    root ── A ──┬── B*          *: has a state, which is valid exactly at the end of its node
                └── C ── D*     a prompt that leaves D* in its middle can continue from the root only

A page of KV can be used by every prompt that shares it, but a recurrent state cannot be divided. A match therefore ends
at the deepest node with a state. A node that was split, or that lost its state, is a *tombstone*. A tombstone without
children is deleted. States and KV are evicted separately, each in its own order of use.
"""

from __future__ import annotations

from typing import Unpack

from engine_cache.base import DecLockRefParams, DecLockRefResult, EvictParams, EvictResult
from engine_cache.cache import CacheOptions, TreeCache
from engine_cache.components.component import LruOrder
from engine_cache.components.mamba import NodeStates, StatePool
from engine_cache.pools.allocators import MambaSlotAllocator, PagedTokenToKVPoolAllocator
from engine_cache.rules import MAMBA
from engine_cache.tree.node import TreeNode
from kv_events.errors import InvalidValueError


class MambaOptions(CacheOptions, total=False):
    """Options of caches with recurrent states. See `MambaRadixCache`."""

    mamba_pool: StatePool | None
    enable_mamba_extra_buffer: bool
    mamba_cache_chunk_size: int


class MambaRadixCache(TreeCache):
    """A radix tree over device pages and the states at the ends of some of its nodes.

    mamba_allocator: owner of the state slots. mamba_pool: the states, which are copied when a running request shares
    its state; with None only slots are assigned and nothing is copied. enable_mamba_extra_buffer: requests track a
    state at a page boundary in addition to the running one; page sizes above 1 and bigram keys require it.
    mamba_cache_chunk_size: tokens between the points at which an engine can save a state. The other options are those
    of `TreeCache`. The least recently used node is evicted first.
    """

    def __init__(
        self,
        *,
        page_size: int,
        mamba_allocator: MambaSlotAllocator,
        allocator: PagedTokenToKVPoolAllocator | None = None,
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

    @property
    def mamba_lru_list(self) -> LruOrder:
        """Nodes with a state, in order of use."""
        return self._states.device_lru_list

    def evict_full(self, num_tokens: int) -> EvictResult:
        """Delete leaves, least recently used first, until `num_tokens` units of KV are free or no leaf is left."""
        return self.evict(EvictParams(num_tokens))

    def dec_lock_ref(self, node: TreeNode, params: DecLockRefParams | None = None) -> DecLockRefResult:
        result = super().dec_lock_ref(node, params)
        if self.device.is_useless(node):  # a tombstone that lost its last child while it was locked
            self.device.evict_leaf(node)
        return result


def node_states(
    page_size: int, allocator: MambaSlotAllocator, options: MambaOptions
) -> tuple[NodeStates, CacheOptions]:
    """Create the component of recurrent states. Returns it and the options that do not concern it.

    Raises InvalidValueError that names the invalid argument of the cache.
    """
    pool = options.pop("mamba_pool", None)
    chunk_size = options.pop("mamba_cache_chunk_size", 64)
    has_extra_buffer = options.pop("enable_mamba_extra_buffer", False)
    if not has_extra_buffer and page_size != 1:
        raise InvalidValueError("page_size", page_size, "1 without enable_mamba_extra_buffer")
    if not has_extra_buffer and options.get("is_eagle"):
        raise InvalidValueError("is_eagle", True, "False without enable_mamba_extra_buffer")
    if chunk_size < 1:
        raise InvalidValueError("mamba_cache_chunk_size", chunk_size, "a positive integer")
    return NodeStates(allocator, state_pool=pool, chunk_size=chunk_size, enable_extra_buffer=has_extra_buffer), options
