"""MambaRadixCache: the prefix cache of a model with recurrent layers, on one tier.

    root ── A ──┬── B*          *: has a state, which is valid exactly at the end of its node
                └── C ── D*     a prompt that leaves D* in its middle can go on from nowhere but the root

A page of KV is of use wherever a prompt shares it; a recurrent state cannot be cut. So a match ends at the deepest node
with a state, a node that is split or has lost its state is a *tombstone*, and a tombstone without children is of no
use to anybody and goes. States and KV are evicted apart, each in its own order of use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

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
    Request,
)
from engine_cache.checks import check_mamba_states, check_no_tombstone_leaf
from engine_cache.errors import CacheStateError, PoolExhaustedError
from engine_cache.key import RadixKey
from engine_cache.lru import LruList
from engine_cache.node import MambaNode, TreeNode, hybrid
from engine_cache.pools.allocators import MambaSlotAllocator, PagedTokenToKVPoolAllocator
from engine_cache.pools.req_to_token import ReqToTokenPool
from engine_cache.radix import RadixCache, salted_seed
from engine_cache.types import IndexArray, no_indices
from kv_events.errors import InvalidValueError

_FULL_LIST, _MAMBA_LIST = 0, 1


class StatePool(Protocol):
    """Where the recurrent states lie."""

    def copy_from(self, src: IndexArray, dst: IndexArray) -> None:
        """Copy the states of the slots `src` to the slots `dst`, all layers."""


class MambaRadixCache(RadixCache):
    """A radix tree over device pages and the states at the ends of some of its nodes.

    mamba_allocator: owner of the slots of states. mamba_pool: the states themselves, copied when a running request
    shares its own; without one only slots move. enable_mamba_extra_buffer: requests track a state at a page's end
    beside the running one, as a page size above 1 and bigram keys need. mamba_cache_chunk_size: tokens between points
    at which an engine can save a state. The rest is as in `RadixCache`, but least recently used always goes first.
    """

    def __init__(
        self,
        *,
        page_size: int,
        mamba_allocator: MambaSlotAllocator,
        mamba_pool: StatePool | None = None,
        allocator: PagedTokenToKVPoolAllocator | None = None,
        req_to_token_pool: ReqToTokenPool | None = None,
        enable_mamba_extra_buffer: bool = False,
        mamba_cache_chunk_size: int = 64,
        enable_kv_cache_events: bool = False,
        is_eagle: bool = False,
        disable: bool = False,
        seed_of_extra_key: Callable[[str], int] = salted_seed,
    ) -> None:
        if not enable_mamba_extra_buffer and page_size != 1:
            raise InvalidValueError("page_size", page_size, "1 without enable_mamba_extra_buffer")
        if not enable_mamba_extra_buffer and is_eagle:
            raise InvalidValueError("is_eagle", True, "False without enable_mamba_extra_buffer")
        if mamba_cache_chunk_size < 1:
            raise InvalidValueError("mamba_cache_chunk_size", mamba_cache_chunk_size, "a positive integer")
        self.mamba_allocator = mamba_allocator
        self.mamba_pool = mamba_pool
        self.enable_mamba_extra_buffer = enable_mamba_extra_buffer
        self.mamba_cache_chunk_size = mamba_cache_chunk_size
        super().__init__(
            page_size=page_size,
            allocator=allocator,
            req_to_token_pool=req_to_token_pool,
            enable_kv_cache_events=enable_kv_cache_events,
            is_eagle=is_eagle,
            disable=disable,
            seed_of_extra_key=seed_of_extra_key,
        )

    def reset(self) -> None:
        self.full_lru_list = LruList(_FULL_LIST)
        self.mamba_lru_list = LruList(_MAMBA_LIST)
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
        path, matched = self._descend(key)
        used = path[: self._num_usable(path)]
        self._touch(used)
        if params.req is not None and params.cow_mamba:
            self._copy_on_write(hybrid(used[-1] if used else self.root_node), params.req)
        branching_seqlen = self._branching_seqlen(matched, sum(len(node.key) for node in used))
        return self._match_result(used)._replace(mamba_branching_seqlen=branching_seqlen)

    def _match_result(self, used: list[TreeNode]) -> MatchResult:
        """The match that ends at the last of these nodes, or at the root."""
        best = used[-1] if used else self.root_node
        return MatchResult(self._device_rows(used), best, best, best)

    def _num_usable(self, path: list[TreeNode]) -> int:
        """Leading nodes of the path up to the deepest with a state."""
        return next((i for i in range(len(path), 0, -1) if hybrid(path[i - 1]).mamba_value is not None), 0)

    def _branching_seqlen(self, matched: int, usable: int) -> int | None:
        if matched == usable:
            return None
        return matched // self.mamba_cache_chunk_size * self.mamba_cache_chunk_size or None

    def _copy_on_write(self, best: MambaNode, req: Request) -> None:
        """Name the state that the request starts from, and the slot of its own to which it copies it."""
        req.mamba_cow_src_index = None
        if best.mamba_value is None:
            return
        if req.mamba_pool_idx is None:
            self.inc_lock_ref(best)
            req.mamba_pool_idx = self._alloc_slot()
            self.dec_lock_ref(best)
        if req.mamba_pool_idx is None:
            raise PoolExhaustedError(
                f"request {req.rid} needs a state slot: 0 of {self.mamba_allocator.size} free, "
                f"{self._mamba_protected_size} locked in the tree"
            )
        req.mamba_cow_src_index = best.mamba_value.copy()

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
        path, done = self._descend(key)
        self._touch(path)
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
            self.full_lru_list.move_to_newest(node)
            if node.mamba_value is not None:
                self.mamba_lru_list.move_to_newest(node)

    def _add_leaf(self, parent: TreeNode, key: RadixKey, value: IndexArray, start: int, priority: int) -> TreeNode:
        leaf = super()._add_leaf(parent, key, value, start, priority)
        self.full_lru_list.append(hybrid(leaf))
        return leaf

    def _split_node(self, child: TreeNode, split_len: int) -> TreeNode:
        """As in `RadixCache`. The state is that of the lower part's end and stays there, with its locks."""
        upper = super()._split_node(child, split_len)
        self.full_lru_list.insert_below(hybrid(upper), hybrid(child))
        return upper

    def _new_node(self, key: RadixKey, value: IndexArray | None, parent: TreeNode | None, priority: int) -> TreeNode:
        return MambaNode(next(self._node_ids), key, value, parent, next(self._clock), priority)

    def _attach_state(self, node: MambaNode, mamba_value: IndexArray) -> None:
        """Give a tombstone that was just used a state; the tree owns the slot from now on."""
        node.mamba_value = mamba_value.astype(np.int64)
        self.mamba_lru_list.append(node)
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
        node = self.full_lru_list.oldest()
        while node is not None and tokens - self._evictable_size < num_tokens:
            following = self.full_lru_list.newer_than(node)
            if self._is_evictable_leaf(node):
                following = self._next_after(node, self._evict_leaf_node(node), following)
            node = following
        return EvictResult(tokens - self._evictable_size, states - self._mamba_evictable_size)

    def _next_after(self, evicted: MambaNode, parent: TreeNode, following: MambaNode | None) -> MambaNode | None:
        """Where the search for the oldest leaf goes on. Nothing older than `evicted` is a leaf, save what is left of
        the path above it; `following` may have gone along with it."""
        if self._is_evictable_leaf(parent) and parent.last_access_time <= evicted.last_access_time:
            return hybrid(parent)
        if following is None or following in self.full_lru_list:
            return following
        return self.full_lru_list.oldest()

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
        self.full_lru_list.remove(node)
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
        self._mamba_evictable_size -= 1

    def _alloc_slot(self) -> IndexArray | None:
        """A slot, if need be that of the least recently used state; None when all are in use."""
        slot = self.mamba_allocator.alloc(1)
        if slot is None:
            self.evict_mamba(1)
            slot = self.mamba_allocator.alloc(1)
        return slot

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

    # --- requests ---------------------------------------------------------------------------------------------------

    def cache_unfinished_req(self, req: Request, *, chunked: bool = False) -> None:
        """Share what a running request has computed, up to its state, of which the tree gets a copy. With no slot for
        the copy, or nothing new to share, the request keeps its rows to itself."""
        rows = self._request_rows().read(req.req_pool_idx, len(req.token_ids))
        req.prefix_indices = rows
        key, slot = self._stateful_prefix(req)
        own_from = req.cache_protected_len
        copy = self._fork_state(slot) if len(key) > own_from else None
        if copy is None:
            return
        if self._insert_rows(req, key, rows, copy, chunked=chunked).mamba_exist:
            self.mamba_allocator.free(copy)
        self._share_rows(req, key, rows)
        req.mamba_last_track_seqlen = None

    def cache_finished_req(self, req: Request, *, is_insert: bool = True) -> None:
        """End a request: pages up to its state go to the tree with the state itself, the rest is freed, slots too."""
        rows = self._request_rows().read(req.req_pool_idx, len(req.token_ids))
        key, slot = self._stateful_prefix(req) if is_insert else (RadixKey([]), no_indices())
        own_from, given = req.cache_protected_len, None
        if len(key) > own_from:
            given = None if self._insert_rows(req, key, rows, slot, chunked=False).mamba_exist else slot
            own_from = len(key)
        self._free(rows[own_from:])
        self._free_slots(req, given)
        self._move_lock(req, None)

    def _stateful_prefix(self, req: Request) -> tuple[RadixKey, IndexArray]:
        """The longest prefix of the request that ends at a state of its own, and that state's slot. An empty key if
        there is none, or if it cannot be named yet: a pair needs the token behind it."""
        field, length, slot = "mamba_pool_idx", len(req.token_ids), req.mamba_pool_idx
        if self.enable_mamba_extra_buffer:
            field, length, slot = "mamba_track_idx", req.mamba_last_track_seqlen or 0, req.mamba_track_idx
        if length % self.page_size or length > len(req.token_ids):
            expected = f"whole pages of {self.page_size} among {len(req.token_ids)} tokens"
            raise InvalidValueError("mamba_last_track_seqlen", length, expected)
        key, _ = self._whole_pages(RadixKey(req.token_ids[: length + self.is_eagle], req.extra_key), None)
        if len(key) < length:
            key = key[:0]
        if len(key) and slot is None:
            raise InvalidValueError(field, None, f"the slot of the state after {length} tokens")
        return key, no_indices() if slot is None else slot

    def _insert_rows(
        self, req: Request, key: RadixKey, rows: IndexArray, slot: IndexArray, *, chunked: bool
    ) -> InsertResult:
        params = InsertParams(key, rows[: len(key)], chunked, req.priority, slot, req.cache_protected_len)
        return self.insert(params)

    def _fork_state(self, slot: IndexArray) -> IndexArray | None:
        copy = self._alloc_slot()
        if copy is not None and self.mamba_pool is not None:
            self.mamba_pool.copy_from(slot, copy)
        return copy

    def _free_slots(self, req: Request, given: IndexArray | None) -> None:
        """Free the slots of a request but the one given to the tree."""
        for slot in (req.mamba_pool_idx, req.mamba_track_idx):
            if slot is not None and slot is not given:
                self.mamba_allocator.free(slot)
        req.mamba_pool_idx = req.mamba_track_idx = req.mamba_cow_src_index = req.mamba_last_track_seqlen = None
