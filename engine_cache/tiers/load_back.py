"""Load-backs: evicted nodes get rows on the device again, and their bytes from the host."""

from __future__ import annotations

import logging

import numpy as np

from engine_cache.base import EvictParams, IncLockRefResult, InitLoadBackParams, Request
from engine_cache.storage.base import PoolTransfer
from engine_cache.tiers.backup import for_each
from engine_cache.tiers.device_eviction import DeviceEviction
from engine_cache.tree.node import TreeNode
from engine_cache.types import IndexArray, no_indices

log = logging.getLogger(__name__)


class LoadBacks(DeviceEviction):
    """What comes back from the host to the device."""

    load_back_threshold: int

    def reset(self) -> None:
        self.ongoing_load_back: dict[int, TreeNode] = {}
        self._load_locks: dict[int, IncLockRefResult] = {}
        super().reset()

    def init_load_back(self, params: InitLoadBackParams) -> tuple[IndexArray, TreeNode]:
        """Bring the match back to the device if that is worth it: the rows that KV got there, and the deepest node of
        the match that can be gone on from now; of a match that was deleted meanwhile, of what is left of it. Where
        states are needed `device_indices` may reach beyond that node: the request keeps those up to it only. Raises
        CacheStateError for a node of another tree, or from before a reset."""
        node = params.best_match_node
        rows = self.load_back(node, params.mem_quota, params.req) if self._needs_load(node) else None
        if rows is not None:
            return rows, node
        while not self._can_go_on_from(node):
            above = node.parent or node.former_parent
            assert above is not None
            node = above
        self._path_to_root(node)
        self._stay_at(node, params.req)
        return no_indices(), node

    def _needs_load(self, node: TreeNode) -> bool:
        """Whether a request that goes on from the node needs data that are on the host only."""
        return node.value is None and node.host_value is not None

    def _can_go_on_from(self, node: TreeNode) -> bool:
        """Whether the node is in the tree, with all that a request needs on the device."""
        return node.former_parent is None and node.value is not None

    def _stay_at(self, node: TreeNode, req: Request | None) -> None:
        """The request goes on from this node, and nothing is loaded for it."""

    def load_back(self, node: TreeNode, mem_quota: int | None = None, req: Request | None = None) -> IndexArray | None:
        """Give an evicted node, and the evicted ones above it, device rows; `start_loading` of the controller fills
        them. The rows, root side first, or None and nothing changed but evictions: too few units, more than
        `mem_quota` leaves, or no room."""
        nodes = self._evicted_path(node)
        extras = self._load_extras(node, req)
        ancestor = nodes[0].parent if nodes else node
        if ancestor is None or not (nodes or extras):
            return None
        host_rows = np.concatenate([no_indices(), *(n.host_value for n in nodes if n.host_value is not None)])
        lock = self.inc_lock_ref(ancestor)
        left = None if mem_quota is None else mem_quota + lock.delta
        ack_id = next(self._ack_ids)
        rows = None
        try:
            if self._is_worth_loading(len(host_rows), left, extras):
                rows = self._load_or_evict(node, host_rows, ack_id, extras)
        finally:
            self.release(lock)
        if rows is None:
            return None
        self._assign(nodes, rows)
        self._assign_extras(ack_id, node, extras, req)
        self.ongoing_load_back[ack_id] = node
        self._load_locks[ack_id] = self.inc_lock_ref(node)
        return rows

    def _is_worth_loading(self, num_units: int, quota: int | None, extras: list[PoolTransfer]) -> bool:
        """quota: device units that KV may take; None: no limit."""
        return bool(extras) or (num_units >= self.load_back_threshold and (quota is None or num_units <= quota))

    def _load_extras(self, node: TreeNode, req: Request | None) -> list[PoolTransfer]:
        """Sidecar state of the node that is loaded along, whatever the threshold and the quota say."""
        return []

    def _assign_extras(self, ack_id: int, node: TreeNode, extras: list[PoolTransfer], req: Request | None) -> None:
        """The sidecar state has got device rows, too."""

    def _evicted_path(self, node: TreeNode) -> list[TreeNode]:
        """The node and those above it that are not on the device, root side first."""
        path = []
        step: TreeNode | None = node
        while step is not None and step.value is None:
            path.append(step)
            step = step.parent
        path.reverse()
        return path

    def _load_or_evict(
        self, node: TreeNode, host_rows: IndexArray, ack_id: int, extras: list[PoolTransfer]
    ) -> IndexArray | None:
        rows = self.controller.load(host_rows, ack_id, [*extras, *self._get_extra_pools()])
        if rows is None:
            with self._host_kv_held(node):  # a write-back may look for room on the host
                self.evict(EvictParams(self._wanted_on_device(len(host_rows))))
            rows = self.controller.load(host_rows, ack_id, [*extras, *self._get_extra_pools()])
        if rows is None:
            log.warning("no room on the device to load %d units back", len(host_rows))
        return rows

    def _wanted_on_device(self, num_units: int) -> int:
        """Units to evict from the device to make room for a load of so many."""
        return num_units

    def _assign(self, nodes: list[TreeNode], rows: IndexArray) -> None:
        start = 0
        for node in nodes:
            self._put_on_device(node, rows[start : start + len(node.key)])
            start += len(node.key)

    def _put_on_device(self, node: TreeNode, rows: IndexArray) -> None:
        """An evicted node below one on the device gets rows of its own there."""
        assert node.parent is not None
        node.value = rows.astype(np.int64)
        node.parent.num_device_children += 1
        self._evictable_size += len(rows)
        self._update_leaf(node)
        self._update_leaf(node.parent)
        self._record_store_event(node)

    def ready_to_load_host_cache(self) -> int:
        """Start the loads that were queued; the number to wait for layers with, -1 if there are none."""
        return self.controller.start_loading()

    def loading_check(self) -> None:
        """Release the nodes whose load has ended. Raises TransferError if one failed: then the cache must be reset."""
        finished = self.controller.finished_loads()
        for_each([(ack_id,) for ack in finished for ack_id in ack.ids], self._release_loaded)

    def _release_loaded(self, ack_id: int) -> None:
        try:
            self._end_load(ack_id, self.ongoing_load_back.pop(ack_id))
        finally:
            self.release(self._load_locks.pop(ack_id))

    def _end_load(self, ack_id: int, node: TreeNode) -> None:
        """The node, which is still locked, has its data on the device."""
