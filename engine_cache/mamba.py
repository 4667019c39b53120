"""MambaRadixCache: the prefix cache of a model with recurrent layers, on one tier.

    root ── A ──┬── B*          *: has a state, which is valid exactly at the end of its node
                └── C ── D*     a prompt that leaves D* in its middle can go on from nowhere but the root

A page of KV is of use wherever a prompt shares it; a recurrent state cannot be cut. So a match ends at the deepest node
with a state, a node that is split or has lost its state is a *tombstone*, and a tombstone without children is of no
use to anybody and goes. States and KV are evicted apart, each in its own order of use.
"""

from __future__ import annotations

from typing import Unpack

import numpy as np

from engine_cache.base import (
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from engine_cache.checks import check_mamba_states, check_no_tombstone_leaf
from engine_cache.errors import CacheStateError
from engine_cache.options import CacheOptions
from engine_cache.pools.allocators import MambaSlotAllocator, PagedTokenToKVPoolAllocator
from engine_cache.state_requests import StatePool, StateRequests
from engine_cache.tree.events import LAST_PAGE
from engine_cache.tree.key import RadixKey
from engine_cache.tree.lru import LruList
from engine_cache.tree.node import MambaNode, TreeNode, hybrid
from engine_cache.types import IndexArray
from kv_events.errors import InvalidValueError
from kv_events.schema import StorageMedium
from kv_events.streams import MAMBA_GROUP

_MAMBA_LIST = 0


class MambaOptions(CacheOptions, total=False):
    """What any cache with states may be given. `MambaRadixCache` says what each means, and what holds without it."""

    mamba_pool: StatePool | None
    enable_mamba_extra_buffer: bool
    mamba_cache_chunk_size: int


class MambaRadixCache(StateRequests):
    """A radix tree over device pages and the states at the ends of some of its nodes.

    mamba_allocator: owner of the slots of states. mamba_pool: the states themselves, copied when a running request
    shares its own; without one only slots move. enable_mamba_extra_buffer: requests track a state at a page's end
    beside the running one, as a page size above 1 and bigram keys need. mamba_cache_chunk_size: tokens between points
    at which an engine can save a state. The rest is as in `RadixCache`, but least recently used always goes first.
    """

    event_groups = (MAMBA_GROUP,)

    def __init__(
        self,
        *,
        page_size: int,
        mamba_allocator: MambaSlotAllocator,
        mamba_pool: StatePool | None = None,
        allocator: PagedTokenToKVPoolAllocator | None = None,
        enable_mamba_extra_buffer: bool = False,
        mamba_cache_chunk_size: int = 64,
        **options: Unpack[CacheOptions],
    ) -> None:
        if not enable_mamba_extra_buffer and page_size != 1:
            raise InvalidValueError("page_size", page_size, "1 without enable_mamba_extra_buffer")
        if not enable_mamba_extra_buffer and options.get("is_eagle"):
            raise InvalidValueError("is_eagle", True, "False without enable_mamba_extra_buffer")
        if mamba_cache_chunk_size < 1:
            raise InvalidValueError("mamba_cache_chunk_size", mamba_cache_chunk_size, "a positive integer")
        self.mamba_allocator = mamba_allocator
        self.mamba_pool = mamba_pool
        self.enable_mamba_extra_buffer = enable_mamba_extra_buffer
        self.mamba_cache_chunk_size = mamba_cache_chunk_size
        super().__init__(page_size=page_size, allocator=allocator, eviction_policy="lru", **options)

    def reset(self) -> None:
        self.mamba_lru_list = LruList[MambaNode](_MAMBA_LIST)
        self._mamba_evictable_size = 0
        self._mamba_protected_size = 0
        super().reset()
        hybrid(self.root_node).mamba_lock_ref = 1

    def mamba_evictable_size(self) -> int:
        """States on the device that eviction could free."""
        return self._mamba_evictable_size

    def mamba_protected_size(self) -> int:
        """States on the device that locks hold."""
        return self._mamba_protected_size

    def check(self, request_indices: IndexArray | None = None, request_slots: IndexArray | None = None) -> None:
        """As in `RadixCache`, and recount states, their locks and both lists.

        request_slots: slots that running requests own; given, the slots of the allocator must add up.
        """
        super().check(request_indices)
        check_no_tombstone_leaf(self)
        check_mamba_states(self, request_slots)

    # --- match and insert -------------------------------------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The longest prefix that ends at a state; the nodes on the way to it have been used now, others not.

        With `cow_mamba`, raises PoolExhaustedError if the request has no slot and none can be freed for it.
        """
        if params.cow_mamba and params.req is None:
            raise InvalidValueError("req", None, "the request that takes the state, with cow_mamba")
        key, _ = self._whole_pages(params.key, None)
        path, _ = self._descend(key)
        used = path[: self._num_usable(path)]
        branching_seqlen = self._branching_seqlen(path, len(used))
        self._touch(used)
        if params.req is not None and params.cow_mamba:
            best = hybrid(used[-1] if used else self.root_node)
            self.copy_on_write(params.req, best.mamba_value, [best])
        return self._match_result(used)._replace(mamba_branching_seqlen=branching_seqlen)

    def _match_result(self, used: list[TreeNode]) -> MatchResult:
        """The match that ends at the last of these nodes, or at the root."""
        best = used[-1] if used else self.root_node
        return MatchResult(self._device_rows(used), best, best, best)

    def _num_usable(self, path: list[TreeNode]) -> int:
        """Leading nodes of the path up to the deepest with a state."""
        return next((i for i in range(len(path), 0, -1) if hybrid(path[i - 1]).mamba_value is not None), 0)

    def _branching_seqlen(self, path: list[TreeNode], num_used: int) -> int | None:
        """Units of the path in whole chunks, if it goes on behind the nodes that can be used."""
        if num_used == len(path):
            return None
        matched = sum(len(node.key) for node in path)
        return matched // self.mamba_cache_chunk_size * self.mamba_cache_chunk_size or None

    def insert(self, params: InsertParams) -> InsertResult:
        """Take over the rows of those pages that are not there yet and, if the key's end has no state, `mamba_value`.

        Frees the duplicates among the rows behind `prev_prefix_len`. Raises InvalidValueError unless there is a row for
        each unit of a key of whole pages, and a state.
        """
        if self.disable:
            return InsertResult(0, mamba_exist=True)
        key, value = self._whole_pages(params.key, params.value)
        if value is None or len(value) != len(key):
            rows = 0 if value is None else len(value)
            raise InvalidValueError("value", f"{rows} rows", f"one for each of {len(key)} units in whole pages")
        if not len(key):
            return InsertResult(0, mamba_exist=True)
        if params.mamba_value is None or len(params.mamba_value) != 1:
            raise InvalidValueError("mamba_value", params.mamba_value, "one slot")
        return self._insert_helper(key, value, params.mamba_value, params)

    def _insert_helper(
        self, key: RadixKey, value: IndexArray, mamba_value: IndexArray, params: InsertParams
    ) -> InsertResult:
        path, done = self._descend(key, touch=True)
        prefix_len = self._merge_overlap(path, value[:done], params.prev_prefix_len)
        if done < len(key):
            parent = path[-1] if path else self.root_node
            path.append(self._add_leaf(parent, key, value, done, params.priority))
        end = hybrid(path[-1])
        mamba_exist = end.mamba_value is not None
        if not mamba_exist:
            self._attach_state(end, mamba_value)
        for node in path:  # at last, since a hit may start a backup, which takes the state along
            self._count_hit(node, params)
        return InsertResult(prefix_len, len(key), mamba_exist)

    def _merge_overlap(self, path: list[TreeNode], value: IndexArray, prev_prefix_len: int) -> int:
        """Free the rows of `value` that `path` has its own for, but for those that are the tree's own; how many units
        it had. value: one row a unit of the path."""
        self._free(value[prev_prefix_len:])
        return len(value)

    def _touch(self, path: list[TreeNode]) -> None:
        super()._touch(path)
        for node in map(hybrid, path):
            if node.mamba_value is not None:
                self.mamba_lru_list.move_to_newest(node)

    def _new_node(self, key: RadixKey, value: IndexArray | None, parent: TreeNode | None, priority: int) -> TreeNode:
        return MambaNode(next(self._node_ids), key, value, parent, next(self._clock), priority)

    def _attach_state(self, node: MambaNode, mamba_value: IndexArray) -> None:
        """Give a tombstone that was just used a state; the tree owns the slot from now on."""
        node.mamba_value = mamba_value.astype(np.int64)
        self.mamba_lru_list.append(node)
        self._record_group_store(MAMBA_GROUP, node, StorageMedium.GPU, LAST_PAGE)
        if node.mamba_lock_ref:
            self._mamba_protected_size += 1
        else:
            self._mamba_evictable_size += 1

    # --- eviction and locks -----------------------------------------------------------------------------------------

    def evict(self, params: EvictParams) -> EvictResult:
        """Free at least `num_tokens` units of KV, then `mamba_num` more states, as far as unlocked nodes hold them."""
        full, mamba = self.evict_full(params.num_tokens), self.evict_mamba(params.mamba_num)
        return EvictResult(
            full.num_tokens_evicted + mamba.num_tokens_evicted, full.mamba_num_evicted + mamba.mamba_num_evicted
        )

    def evict_full(self, num_tokens: int) -> EvictResult:
        """Delete leaves, least recently used first, until `num_tokens` units of KV are free or no leaf is left."""
        tokens, states = self._evictable_size, self._mamba_evictable_size
        while tokens - self._evictable_size < num_tokens and (leaf := self.evictable_leaves.pop()) is not None:
            self._evict_leaf_node(leaf)
        return EvictResult(tokens - self._evictable_size, states - self._mamba_evictable_size)

    def evict_mamba(self, mamba_num: int) -> EvictResult:
        """Free `mamba_num` states, least recently used first: of an inner node the state alone, which is no event, of a
        leaf all it has."""
        tokens, states = self._evictable_size, self._mamba_evictable_size
        node = self.mamba_lru_list.oldest()
        while node is not None and states - self._mamba_evictable_size < mamba_num:
            # stays in the list: what goes along with a node are tombstones
            following = self.mamba_lru_list.newer_than(node)
            if node.mamba_lock_ref == 0:
                self._evict_state(node)
            node = following
        return EvictResult(tokens - self._evictable_size, states - self._mamba_evictable_size)

    def _evict_state(self, node: MambaNode) -> None:
        if node.children:
            self._free_state(node)
        else:
            self._evict_leaf_node(node)

    def _evict_leaf_node(self, leaf: TreeNode) -> TreeNode:
        """Delete an unlocked leaf, and the tombstones above it that become unlocked leaves; the node that is left."""
        parent = self._delete_leaf(leaf)
        while self._is_evictable_leaf(parent) and hybrid(parent).mamba_value is None:
            parent = self._delete_leaf(parent)
        return parent

    def _delete_leaf(self, leaf: TreeNode) -> TreeNode:
        node = hybrid(leaf)
        if node.mamba_value is not None:
            self._free_state(node)
        return super()._delete_leaf(leaf)

    def _free_state(self, node: MambaNode) -> None:
        """Take the state of a node that is not locked itself."""
        assert node.mamba_value is not None
        assert node.mamba_lock_ref == 0
        self.mamba_allocator.free(node.mamba_value)
        self.mamba_lru_list.remove(node)
        node.mamba_value = None
        self._record_group_remove(MAMBA_GROUP, node, StorageMedium.GPU, LAST_PAGE)
        self._mamba_evictable_size -= 1

    def inc_lock_ref(self, node: TreeNode) -> IncLockRefResult:
        """Forbid eviction of the node's state, and of the KV of the node and everything above it. Raises
        CacheStateError for a node of another tree."""
        result = super().inc_lock_ref(node)
        if node is not self.root_node:
            self._lock_state(hybrid(node))
        return result

    def _lock_state(self, node: MambaNode) -> None:
        # counted on a tombstone too, so that unlocking mirrors locking whatever was attached in between
        node.mamba_lock_ref += 1
        if node.mamba_lock_ref == 1 and node.mamba_value is not None:
            self._mamba_evictable_size -= 1
            self._mamba_protected_size += 1

    def dec_lock_ref(self, node: TreeNode) -> DecLockRefResult:
        """Take one `inc_lock_ref` of this very node back. Raises CacheStateError if there is none, or for a node of
        another tree."""
        if node is self.root_node:
            return DecLockRefResult(0)
        if hybrid(node).mamba_lock_ref < 1:
            raise CacheStateError(f"node {node.id} unlocked with mamba_lock_ref 0, expected at least 1")
        result = super().dec_lock_ref(node)
        self._unlock_state(hybrid(node))
        return result

    def _unlock_state(self, node: MambaNode) -> None:
        node.mamba_lock_ref -= 1
        if node.mamba_value is None:
            if self._is_evictable_leaf(node):  # it lost its last child while it was locked
                self._evict_leaf_node(node)
        elif node.mamba_lock_ref == 0:
            self._mamba_evictable_size += 1
            self._mamba_protected_size -= 1
