"""Requests of a cache: what a running or finished request shares with the tree, and the state that a new one starts
from.

row of a request   | cache_protected_len | ... prefix_len | ... whole pages | tail
owner before       | tree                | request        | request         | request
after the insert   | tree                | duplicate,     | tree            | request
                   |                     | freed          |                 |
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

import numpy as np

from engine_cache.base import DecLockRefParams, EvictResult, IncLockRefResult, InsertParams, InsertResult, Request
from engine_cache.components.mamba import MambaComponent
from engine_cache.errors import CacheStateError, PoolExhaustedError
from engine_cache.pools.allocators import ReqToTokenPool
from engine_cache.tiers.device import DeviceTier
from engine_cache.tree.key import RadixKey
from engine_cache.tree.node import TreeNode
from engine_cache.types import IndexArray
from kv_events.errors import InvalidValueError


class RequestCache(Protocol):
    disable: bool
    req_to_token_pool: ReqToTokenPool | None

    def whole_pages(self, key: RadixKey) -> RadixKey: ...
    def insert(self, params: InsertParams) -> InsertResult: ...
    def evict_mamba(self, mamba_num: int) -> EvictResult: ...
    def inc_lock_ref(self, node: TreeNode) -> IncLockRefResult: ...
    def dec_lock_ref(self, node: TreeNode, params: DecLockRefParams | None = None) -> object: ...


class Requests:
    """The requests of one cache. states: the component of recurrent states, if the model has recurrent layers."""

    def __init__(self, cache: RequestCache, device: DeviceTier, states: MambaComponent | None) -> None:
        self._cache = cache
        self._device = device
        self._tree = device.tree
        self._states = states

    def unfinished(self, req: Request, *, chunked: bool) -> None:
        """Share the pages that a running request has computed.

        With recurrent states, the shared part ends at a state of the request, and the tree receives a copy of that
        state. Nothing is shared if there is no slot for the copy, or if the request's sliding window has moved beyond
        these rows.
        """
        rows = self._rows(req)
        req.prefix_indices = rows
        key, slot = self._shareable(req)
        if self._cache.disable or 0 < len(key) <= req.swa_evicted_seqlen:
            return
        if self._states is None:
            self._insert(req, key, rows, None, chunked=chunked)
            if len(key) >= req.cache_protected_len:  # bigrams: the last unit may lack its second token
                self._share_rows(req, key, rows)
            return
        copy = self._fork_state(slot) if slot is not None and len(key) > req.cache_protected_len else None
        if copy is None:
            return
        if self._insert(req, key, rows, copy, chunked=chunked).mamba_exist:
            self._states.allocator.free(copy)
        self._share_rows(req, key, rows)
        req.mamba_last_track_seqlen = None

    def finished(self, req: Request, *, is_insert: bool) -> None:
        """End a request: insert its whole pages, free its other rows and release its lock.

        With recurrent states, the inserted part ends at a state of the request, which is inserted as well.
        """
        rows = self._rows(req)
        own_from, given = req.cache_protected_len, None
        key, slot = self._shareable(req) if is_insert else (None, None)
        if key is not None and (self._states is None or len(key) > own_from):
            is_kept = self._insert(req, key, rows, slot, chunked=False).mamba_exist
            given = None if is_kept else slot
            own_from = max(own_from, len(key))
        self._device.free(rows[own_from:])
        if self._states is not None:
            self._free_slots(req, given)
        self._move_lock(req, None)

    def copy_on_write(self, req: Request, state: IndexArray | None, needed: Sequence[TreeNode]) -> None:
        """Set the state that the request starts from (None if there is none) and the request's own slot for a copy of
        it.

        needed: nodes that must not be evicted to make room for the slot. Raises PoolExhaustedError if no slot can be
        freed.
        """
        assert self._states is not None
        req.mamba_cow_src_index = None
        if state is None:
            return
        if req.mamba_pool_idx is None:
            with ExitStack() as locks:
                for node in needed:
                    lock = self._cache.inc_lock_ref(node)
                    locks.callback(self._cache.dec_lock_ref, lock.node, lock.to_dec_params())
                req.mamba_pool_idx = self._alloc_slot()
        if req.mamba_pool_idx is None:
            raise PoolExhaustedError(
                f"request {req.rid} needs a state slot: 0 of {self._states.allocator.size} free, "
                f"{self._states.protected_size} locked in the tree"
            )
        req.mamba_cow_src_index = state.copy()

    def _rows(self, req: Request) -> IndexArray:
        return self._rows_of_requests().read(req.req_pool_idx, len(req.token_ids))

    def _rows_of_requests(self) -> ReqToTokenPool:
        if self._cache.req_to_token_pool is None:
            raise CacheStateError("this cache was made without a req_to_token_pool, it cannot cache requests")
        return self._cache.req_to_token_pool

    def _insert(
        self, req: Request, key: RadixKey, rows: IndexArray, slot: IndexArray | None, *, chunked: bool
    ) -> InsertResult:
        own_from, evicted = req.cache_protected_len, min(req.swa_evicted_seqlen, len(key))
        params = InsertParams(key, rows[: len(key)], chunked, req.priority, slot, own_from, evicted)
        result = self._cache.insert(params)
        if not self._device.variant.frees_duplicates:
            self._device.free(rows[own_from : result.prefix_len])
        return result

    def _share_rows(self, req: Request, key: RadixKey, rows: IndexArray) -> None:
        path, length = self._tree.descend(key)
        own_from = req.cache_protected_len
        shared = np.concatenate([rows[:0], *(node.value for node in path if node.value is not None)])
        self._rows_of_requests().write(req.req_pool_idx, own_from, shared[own_from:])
        self._move_lock(req, path[-1] if path else self._tree.root)
        req.cache_protected_len = length
        req.prefix_indices = np.concatenate((shared, rows[length:]))

    def _move_lock(self, req: Request, node: TreeNode | None) -> None:
        if req.last_node is not None:
            self._cache.dec_lock_ref(req.last_node, req.lock_params)
        req.last_node = req.lock_params = None
        if node is not None:
            lock = self._cache.inc_lock_ref(node)
            req.last_node, req.lock_params = lock.node, lock.to_dec_params()

    def _shareable(self, req: Request) -> tuple[RadixKey, IndexArray | None]:
        """Return the longest prefix that the tree can use, in whole pages.

        With recurrent states, the prefix ends at a state of the request, whose slot is returned. The prefix is empty if
        there is no such state, or if its end cannot be hashed yet because the last token pair is incomplete.
        """
        if self._states is None:
            return self._cache.whole_pages(RadixKey(req.token_ids, req.extra_key)), None
        field, length, slot = "mamba_pool_idx", len(req.token_ids), req.mamba_pool_idx
        if self._states.has_extra_buffer:
            field, length, slot = "mamba_track_idx", req.mamba_last_track_seqlen or 0, req.mamba_track_idx
        if length % self._tree.page_size or length > len(req.token_ids):
            expected = f"whole pages of {self._tree.page_size} among {len(req.token_ids)} tokens"
            raise InvalidValueError("mamba_last_track_seqlen", length, expected)
        key = self._cache.whole_pages(RadixKey(req.token_ids[: length + self._tree.is_eagle], req.extra_key))
        if len(key) < length:
            key = key[:0]
        if len(key) and slot is None:
            raise InvalidValueError(field, None, f"the slot of the state after {length} tokens")
        return key, slot

    def _fork_state(self, slot: IndexArray) -> IndexArray | None:
        assert self._states is not None
        copy = self._alloc_slot()
        if copy is not None and self._states.mamba_pool is not None:
            self._states.mamba_pool.copy_from(slot, copy)
        return copy

    def _alloc_slot(self) -> IndexArray | None:
        assert self._states is not None
        slot = self._states.allocator.alloc(1)
        if slot is None:
            self._cache.evict_mamba(1)
            slot = self._states.allocator.alloc(1)
        return slot

    def _free_slots(self, req: Request, given: IndexArray | None) -> None:
        assert self._states is not None
        for slot in (req.mamba_pool_idx, req.mamba_track_idx):
            if slot is not None and slot is not given:
                self._states.release_slot(slot)
        req.mamba_pool_idx = req.mamba_track_idx = req.mamba_cow_src_index = req.mamba_last_track_seqlen = None
