"""Load-backs: copies of host data to the device, for evicted nodes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np

from engine_cache.base import IncLockRefResult, Request
from engine_cache.components.indexer import indexer_transfers
from engine_cache.storage.base import PoolTransfer
from engine_cache.tiers.backup import for_each
from engine_cache.tiers.device import DeviceTier
from engine_cache.tiers.host_leaves import HostLeaves
from engine_cache.tiers.transfer import HiCacheController
from engine_cache.tree.node import TreeNode, path_down
from engine_cache.types import IndexArray, no_indices
from kv_events.errors import InvalidValueError

logger = logging.getLogger(__name__)


class LoadBacks:
    """The load-backs of one cache.

    threshold: minimum number of KV units of a load. make_room: evicts until the given number of device units is free,
    if possible. ids: supplies the numbers of transfers.
    """

    def __init__(
        self,
        device: DeviceTier,
        leaves: HostLeaves,
        controller: HiCacheController,
        threshold: int,
        make_room: Callable[[int], object],
        ids: Iterator[int],
    ) -> None:
        if threshold < 0:
            raise InvalidValueError("load_back_threshold", threshold, "0 or more")
        self.threshold = threshold
        self.ongoing: dict[int, TreeNode] = {}
        self._locks: dict[int, IncLockRefResult] = {}
        self._device = device
        self._components = device.components
        self._leaves = leaves
        self._controller = controller
        self._make_room = make_room
        self._ids = ids

    def clear(self) -> None:
        """Drop all loads."""
        self.ongoing.clear()
        self._locks.clear()

    def load(self, node: TreeNode, mem_quota: int | None, req: Request | None) -> IndexArray | None:
        """Allocate device rows for an evicted node, its evicted ancestors and the states that a match at the node
        needs.

        The controller's `start_loading` fills them. Returns the KV rows, root side first. Returns None, and loads
        nothing, if the load is too small, exceeds `mem_quota` units, or the device has no room.
        """
        nodes = path_down(node, lambda step: step.value is None)
        extras = [transfer for each in self._components for transfer in each.load_transfers(node, req)]
        ancestor = nodes[0].parent if nodes else node
        if ancestor is None or not (nodes or extras):
            return None
        host_rows = np.concatenate([no_indices(), *(n.host_value for n in nodes if n.host_value is not None)])
        lock = self._device.lock(ancestor)
        ack_id, rows = next(self._ids), None
        try:
            if self._is_worth_loading(len(host_rows), None if mem_quota is None else mem_quota + lock.delta, extras):
                rows = self._load_or_evict(node, host_rows, ack_id, extras)
        finally:
            self._device.unlock(lock.node, lock.tickets)
        if rows is None:
            return None
        self._assign(ack_id, node, nodes, rows, extras, req)
        return rows

    def _is_worth_loading(self, num_units: int, quota: int | None, extras: list[PoolTransfer]) -> bool:
        if not extras and num_units < self.threshold:
            return False
        is_limited = quota is not None and (not extras or self._device.rules.quota_covers_states)
        return not is_limited or quota is None or num_units <= quota

    def _load_or_evict(
        self, node: TreeNode, host_rows: IndexArray, ack_id: int, extras: list[PoolTransfer]
    ) -> IndexArray | None:
        transfers = [*extras, *indexer_transfers(self._controller.group)]
        rows = None
        if not self._components:  # with components, the controller may evict as well
            rows = self._controller.load(host_rows, ack_id, transfers)
        if rows is None:
            with ExitStack() as held:
                self._hold_needed(node, held)
                if self._components:
                    rows = self._controller.load(host_rows, ack_id, transfers)
                if rows is None:
                    self._make_room(len(host_rows))
                    rows = self._controller.load(host_rows, ack_id, transfers)
        if rows is None:
            logger.warning("no room on the device to load %d units back", len(host_rows))
        return rows

    def _hold_needed(self, node: TreeNode, held: ExitStack) -> None:
        """Protect the data that the load needs on both tiers while room is made: a write-back evicts from the host."""
        held.enter_context(self._leaves.held(node))
        for component in self._components:
            for step in component.needed_nodes(node):
                data = component.data(step)
                if data.value is not None:
                    component.lock(step)
                    held.callback(component.unlock, step)
                if data.host_value is not None:
                    component.lock_host(step)
                    held.callback(component.unlock_host, step)

    def _assign(
        self,
        ack_id: int,
        node: TreeNode,
        nodes: list[TreeNode],
        rows: IndexArray,
        extras: list[PoolTransfer],
        req: Request | None,
    ) -> None:
        start = 0
        for step in nodes:
            self._device.put(step, rows[start : start + len(step.key)])
            start += len(step.key)
        for component in self._components:
            component.commit_load(ack_id, node, [each for each in extras if each.name is component.pool], req)
        self.ongoing[ack_id] = node
        self._locks[ack_id] = self._device.lock(node)

    def loading_check(self) -> None:
        """Unlock the nodes whose load has finished. Raises TransferError after a failed load: reset the cache then."""
        finished = self._controller.finished_loads()
        for_each([(ack_id,) for ack in finished for ack_id in ack.ids], self._end)

    def _end(self, ack_id: int) -> None:
        node, lock = self.ongoing.pop(ack_id), self._locks.pop(ack_id)
        try:
            for component in self._components:
                component.end_load(ack_id, node)
        finally:
            self._device.unlock(lock.node, lock.tickets)
