"""Requests on a unified tree: as on the trees of one kind, whichever kinds there are."""

from __future__ import annotations

import numpy as np

from engine_cache.base import EvictParams, EvictResult, InsertParams, Request
from engine_cache.radix import RadixCache
from engine_cache.state_requests import StateRequests
from engine_cache.storage.base import PoolName, PoolTransfer
from engine_cache.tree.key import RadixKey
from engine_cache.tree.node import TreeNode
from engine_cache.types import IndexArray
from engine_cache.unified.eviction import UnifiedEviction
from engine_cache.unified.mamba import MambaComponent


class UnifiedRequests(UnifiedEviction, StateRequests):
    """What the tree does for a request that runs or ends."""

    _mamba: MambaComponent | None
    """None: the model has no recurrent layers."""

    def cache_unfinished_req(self, req: Request, *, chunked: bool = False) -> None:
        """Share what a running request has computed. It keeps its rows to itself where a kind would have no use for
        them: without a state for the end, or when the sliding window has moved on beyond it."""
        if 0 < len(self._prefix_to_share(req)) <= req.swa_evicted_seqlen:
            req.prefix_indices = self._request_rows().read(req.req_pool_idx, len(req.token_ids))
        elif self._mamba is not None:
            super().cache_unfinished_req(req, chunked=chunked)
        else:
            RadixCache.cache_unfinished_req(self, req, chunked=chunked)

    def cache_finished_req(self, req: Request, *, is_insert: bool = True) -> None:
        if self._mamba is not None:
            super().cache_finished_req(req, is_insert=is_insert)
        else:
            RadixCache.cache_finished_req(self, req, is_insert=is_insert)

    def _prefix_to_share(self, req: Request) -> RadixKey:
        if self._mamba is not None:
            return self._stateful_prefix(req)[0]
        return self._whole_pages(RadixKey(req.token_ids, req.extra_key), None)[0]

    def _insert_request(self, req: Request, rows: IndexArray, *, chunked: bool) -> RadixKey:
        """The tree frees the duplicates itself."""
        key = self._prefix_to_share(req)
        own_from, evicted = req.cache_protected_len, min(req.swa_evicted_seqlen, len(key))
        params = InsertParams(key, rows[: len(key)], chunked, req.priority, None, own_from, evicted)
        self.insert(params)
        return key

    def _share_rows(self, req: Request, key: RadixKey, rows: IndexArray) -> None:
        """As in `RadixCache`, up to the end of `key` even if no other request could go on from there."""
        path, length = self._descend(key)
        shared = self._device_rows(path)
        own_from = req.cache_protected_len
        self._request_rows().write(req.req_pool_idx, own_from, shared[own_from:])
        self._move_lock(req, path[-1] if path else self.root_node)
        req.cache_protected_len = length
        req.prefix_indices = np.concatenate((shared, rows[length:]))

    def _move_lock(self, req: Request, node: TreeNode | None) -> None:
        if req.last_node is not None:
            self.dec_lock_ref(req.last_node, req.lock_params)
        req.last_node = req.lock_params = None
        if node is not None:
            lock = self.inc_lock_ref(node)
            req.last_node, req.lock_params = lock.node, lock.to_dec_params()

    def _assign_extras(self, ack_id: int, node: TreeNode, extras: list[PoolTransfer], req: Request | None) -> None:
        super()._assign_extras(ack_id, node, extras, req)
        if req is not None and any(transfer.name is PoolName.MAMBA for transfer in extras):
            self._begin_slot_load(ack_id, req)

    def _end_load(self, ack_id: int, node: TreeNode) -> None:
        super()._end_load(ack_id, node)
        self._end_slot_load(ack_id)

    def evict_mamba(self, mamba_num: int) -> EvictResult:
        return self.evict(EvictParams(0, mamba_num=mamba_num))

    def mamba_protected_size(self) -> int:
        return 0 if self._mamba is None else self._mamba.protected_size
