"""Prefetches: pages that a request will need, from a store to the host while the request waits in the queue."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from engine_cache.storage.base import PoolTransfer
from engine_cache.storage_operations import PrefetchOperation
from engine_cache.tiers.adoption import Adoption
from engine_cache.tree.key import RadixKey
from engine_cache.tree.node import TreeNode, compute_node_hash_values
from engine_cache.types import IndexArray
from kv_events.errors import InvalidValueError

_MOST_LOADED_NOTES = 4_096
_RATE_LIMIT_SHARE = 0.8  # of the rows by which the host is larger than the device


class Prefetches(Adoption):
    """What comes from the store to the host: begun if it is worth it and there is room, taken into the tree when it may
    finish."""

    def reset(self) -> None:
        super().reset()
        self.ongoing_prefetch: dict[str, PrefetchOperation] = {}
        self.prefetch_tokens_occupied = 0
        self.prefetch_loaded_tokens_by_reqid: dict[str, int] = {}

    # --- begin ------------------------------------------------------------------------------------------------------

    def prefetch_from_storage(
        self,
        req_id: str,
        last_host_node: TreeNode,
        new_input_tokens: Sequence[int] | npt.NDArray[np.integer],
        last_hash: str | None = None,
        extra_key: str | None = None,
    ) -> None:
        """Begin to fetch the pages of `new_input_tokens`, which start where the prefix of `last_host_node` ends.

        last_host_node: as a match gave it; if it is the root, extra_key is the namespace. last_hash: its last block
        hash, which is computed if None. Nothing is begun, and nothing said, without a store, for too few units, over
        the rate limit, without room on the host, and when the node has lost its host copy since the match. Raises
        InvalidValueError for a request that has a prefetch already, and for an extra_key or a last_hash that is not the
        node's.
        """
        if req_id in self.ongoing_prefetch:
            raise InvalidValueError("req_id", req_id, "a request without a prefetch in flight")
        is_root = last_host_node is self.root_node
        namespace = extra_key if is_root else last_host_node.key.extra_key
        if extra_key is not None and extra_key != namespace:
            raise InvalidValueError("extra_key", extra_key, f"that of node {last_host_node.id}, {namespace!r}")
        if self.storage is None or (last_host_node.host_value is None and not is_root):
            return
        key, _ = self._whole_pages(RadixKey(new_input_tokens, namespace), None)
        if len(key) < self.storage.prefetch_threshold or self._is_rate_limited():
            return
        self._begin_prefetch(req_id, last_host_node, key, self._last_hash(last_host_node, last_hash))

    def _begin_prefetch(self, req_id: str, anchor: TreeNode, key: RadixKey, last_hash: str | None) -> None:
        assert self.storage is not None
        with ExitStack() as undo:
            self._hold_host_kv(anchor)
            undo.callback(self._release_host_kv, anchor)
            rows = self._alloc_for_prefetch(len(key))
            if rows is None:
                return
            undo.callback(self._free_host, rows)
            extras = self._prefetch_extras(anchor, len(rows))
            if extras is None:
                return
            undo.callback(self._free_extras, extras)
            operation = PrefetchOperation(req_id, anchor, key[: len(rows)], last_hash, rows, extras)
            self._hold_extras(operation, anchor)
            undo.callback(self._release_extras, operation, anchor)
            self.storage.prefetch(operation)
            undo.pop_all()
        self.ongoing_prefetch[req_id] = operation
        self.prefetch_tokens_occupied += len(operation.key)

    def _is_rate_limited(self) -> bool:
        return self.prefetch_tokens_occupied >= self._prefetch_capacity()

    def _prefetch_capacity(self) -> int:
        """Units that prefetches may occupy on the host at a time."""
        kv = self.controller.kv
        return int(_RATE_LIMIT_SHARE * (kv.host_pool.size - kv.device_allocator.size))

    def _last_hash(self, anchor: TreeNode, given: str | None) -> str | None:
        hashes = compute_node_hash_values(anchor, self.page_size) if anchor is not self.root_node else []
        last_hash = hashes[-1] if hashes else None
        if given is not None and given != last_hash:
            raise InvalidValueError("last_hash", given, f"that of node {anchor.id}, {last_hash}")
        return last_hash

    def _alloc_for_prefetch(self, length: int) -> IndexArray | None:
        """Host rows for so many units or, if eviction does not make that much room, for as many pages as are free;
        None when those are not worth it."""
        assert self.storage is not None
        pool = self.controller.kv.host_pool
        rows = pool.alloc(length)
        if rows is None:
            self.evict_host(length)
            rows = pool.alloc(length)
        if rows is None:
            available = pool.available_size()
            length = available - available % self.page_size
            if length >= self.storage.prefetch_threshold:
                rows = pool.alloc(length)
        return rows

    def _prefetch_extras(self, anchor: TreeNode, num_units: int) -> list[PoolTransfer] | None:
        """Sidecar state that is fetched along with so many units, with host rows; None: there is no room."""
        return self._get_extra_pools()

    # --- end --------------------------------------------------------------------------------------------------------

    def check_prefetch_progress(self, req_id: str) -> bool:
        """Whether the request need not wait any more. The first time that is so, what has arrived is put into the
        tree."""
        operation = self.ongoing_prefetch.get(req_id)
        if operation is None:
            return True
        assert self.storage is not None
        if not operation.may_finish(self.storage.policy):
            return False
        rows = operation.take()
        try:
            matched = self._insert_helper_host(operation, rows)
        finally:
            self._leave(operation)
        self._note_loaded(req_id, len(rows) - matched)
        return True

    def _note_loaded(self, req_id: str, num_units: int) -> None:
        """For `pop_prefetch_loaded_tokens`. Nobody has to ask, so the oldest notes go."""
        noted = self.prefetch_loaded_tokens_by_reqid
        noted.pop(req_id, None)
        if num_units > 0:
            noted[req_id] = num_units
        if len(noted) > _MOST_LOADED_NOTES:
            del noted[next(iter(noted))]

    def pop_prefetch_loaded_tokens(self, req_id: str) -> int:
        """Units that a prefetch has added to the tree; told once, 0 for a request that had none, or whose prefetch
        ended more than 4,096 such prefetches ago."""
        return self.prefetch_loaded_tokens_by_reqid.pop(req_id, 0)

    def release_aborted_request(self, req_id: str) -> None:
        """Give up the prefetch of a request that will not run, if it has one."""
        self.prefetch_loaded_tokens_by_reqid.pop(req_id, None)
        operation = self.ongoing_prefetch.get(req_id)
        if operation is not None:
            self._free_host(operation.take())
            self._leave(operation)

    def _leave(self, operation: PrefetchOperation) -> None:
        """The tree is through with a prefetch whose rows it has taken."""
        del self.ongoing_prefetch[operation.req_id]
        self.prefetch_tokens_occupied -= len(operation.key)
        self._release_extras(operation, operation.anchor)
        self._release_host_kv(operation.anchor)
