"""Requests of a model with recurrent layers: which state a tree gets of them, and which they start from.

Shared by all caches with states; how a tree keeps states, and makes room for one, is theirs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

import numpy as np

from engine_cache.base import EvictResult, InsertParams, InsertResult, Request
from engine_cache.errors import PoolExhaustedError
from engine_cache.loading_slots import LoadingSlots
from engine_cache.pools.allocators import MambaSlotAllocator
from engine_cache.radix import RadixCache
from engine_cache.tree.key import RadixKey
from engine_cache.tree.node import TreeNode
from engine_cache.types import IndexArray, no_indices
from kv_events.errors import InvalidValueError


class StatePool(Protocol):
    """Where the recurrent states lie."""

    def copy_from(self, src: IndexArray, dst: IndexArray) -> None:
        """Copy the states of the slots `src` to the slots `dst`, all layers."""


class StateRequests(RadixCache):
    """What a cache with states does for a request; `MambaRadixCache` says what the fields mean."""

    mamba_allocator: MambaSlotAllocator
    mamba_pool: StatePool | None
    enable_mamba_extra_buffer: bool

    def reset(self) -> None:
        self._loading_slots = LoadingSlots()
        super().reset()

    @abstractmethod
    def evict_mamba(self, mamba_num: int) -> EvictResult:
        """Free so many states of the device, least recently used first."""

    @abstractmethod
    def mamba_protected_size(self) -> int:
        """States on the device that locks hold."""

    def copy_on_write(self, req: Request, state: IndexArray | None, needed: Sequence[TreeNode]) -> None:
        """Name the state that the request starts from, None: it has none, and the slot of its own to which it copies
        it. needed: nodes that must not go when room is made for it. Raises PoolExhaustedError if there is none."""
        req.mamba_cow_src_index = None
        if state is None:
            return
        if req.mamba_pool_idx is None:
            with ExitStack() as locks:
                for node in needed:
                    locks.callback(self.release, self.inc_lock_ref(node))
                req.mamba_pool_idx = self._alloc_slot()
        if req.mamba_pool_idx is None:
            raise PoolExhaustedError(
                f"request {req.rid} needs a state slot: 0 of {self.mamba_allocator.size} free, "
                f"{self.mamba_protected_size()} locked in the tree"
            )
        req.mamba_cow_src_index = state.copy()

    def _alloc_slot(self) -> IndexArray | None:
        """A slot, if need be that of the least recently used state; None when all are in use."""
        slot = self.mamba_allocator.alloc(1)
        if slot is None:
            self.evict_mamba(1)
            slot = self.mamba_allocator.alloc(1)
        return slot

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
        params = InsertParams(
            key, rows[: len(key)], chunked, req.priority, slot, req.cache_protected_len, req.swa_evicted_seqlen
        )
        return self.insert(params)

    def _fork_state(self, slot: IndexArray) -> IndexArray | None:
        copy = self._alloc_slot()
        if copy is not None and self.mamba_pool is not None:
            self.mamba_pool.copy_from(slot, copy)
        return copy

    def _free_slots(self, req: Request, given: IndexArray | None) -> None:
        """Free the slots of a request but the one given to the tree; one that is being loaded into when that ends."""
        for slot in (req.mamba_pool_idx, req.mamba_track_idx):
            if slot is not None and slot is not given and not self._loading_slots.give_up(slot):
                self.mamba_allocator.free(slot)
        req.mamba_pool_idx = req.mamba_track_idx = req.mamba_cow_src_index = req.mamba_last_track_seqlen = None

    def _with_loading(self, request_slots: IndexArray | None) -> IndexArray | None:
        """Slots of running requests, and those that only loads keep; None stays None."""
        return None if request_slots is None else np.concatenate((request_slots, self._loading_slots.given_up()))

    def _begin_slot_load(self, load: int, req: Request) -> None:
        """A load is on its way to the request's own slot."""
        assert req.mamba_pool_idx is not None
        self._loading_slots.begin(load, req.mamba_pool_idx)

    def _end_slot_load(self, load: int) -> None:
        """The load has ended; nothing happens if it filled no slot of a request."""
        slots = self._loading_slots.end(load)
        if len(slots):
            self.mamba_allocator.free(slots)
