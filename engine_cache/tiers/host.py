"""The host tier of a cache: backups, load-backs, and eviction from the device to the host.

on device only ── Backups.write ──> pending ── writing_check ──> on both ── eviction ──> on host only
                                                                 on both <─────── load_back ──┘
"""

import logging
from collections import Counter
from contextlib import ExitStack
from functools import partial

import numpy as np

from engine_cache.base import IncLockRefResult, Request
from engine_cache.components.component import AuxiliaryComponent
from engine_cache.pools.allocators import PagedTokenToKVPoolAllocator
from engine_cache.storage.base import PoolTransfer
from engine_cache.tiers.backup import Backups, for_each
from engine_cache.tiers.device import DeviceTier
from engine_cache.tiers.host_leaves import HostLeaves
from engine_cache.tiers.transfer import HiCacheController
from engine_cache.tree.node import TreeNode, path_down
from engine_cache.types import IndexArray, no_indices
from kv_events.errors import InvalidValueError

logger = logging.getLogger(__name__)

_DRAIN_TIMEOUT_S = 30.0


class HostTier:
    """The host tier of one cache.

    controller: moves the data. Its device allocators must be `allocator` and those of the components. Raises
    InvalidValueError for others, a policy that is not in `WRITE_POLICIES`, a negative threshold, or a page size that
    differs from a host pool's.
    """

    def __init__(
        self,
        device: DeviceTier,
        controller: HiCacheController,
        allocator: PagedTokenToKVPoolAllocator,
        write_policy: str,
        load_back_threshold: int,
    ) -> None:
        if load_back_threshold < 0:
            raise InvalidValueError("load_back_threshold", load_back_threshold, "0 or more")
        tree, entry = device.tree, controller.group.entry
        sidecars = [(entry(each.pool), each.device_allocator) for each in device.components]
        for held, owner in [(controller.kv, allocator), *sidecars]:
            name, page_size = held.name.value, held.host_pool.page_size
            if held.device_allocator is not owner:
                raise InvalidValueError(f"{name}_allocator", owner, f"the controller's own for {name}")
            if page_size != owner.page_size:
                raise InvalidValueError(f"{name} page_size", owner.page_size, f"the host pool's, {page_size}")
        self.num_skipped_archives = 0
        self.device = device
        self.controller = controller
        self.leaves = HostLeaves(device, controller)
        self.backups = Backups(self.leaves, write_policy)
        self.load_back_threshold = load_back_threshold
        self.ongoing_loads: dict[int, TreeNode] = {}
        self._load_locks: dict[int, IncLockRefResult] = {}
        self._tree = tree
        self._allocator = allocator
        tree.has_host = True
        tree.observe(self.backups)
        for component in device.components:
            component.entry = entry(component.pool)
            component.entry.host_evict_fn = partial(self.leaves.evict_component, component)
            component.entry.device_evict_fn = partial(self.evict_component, component)

    def clear(self) -> None:
        """Wait for running transfers, and drop all operations."""
        if not self.controller.engine.drain(_DRAIN_TIMEOUT_S):
            logger.warning("transfers still run %g s after a reset, which waits for them", _DRAIN_TIMEOUT_S)
        self.controller.reset()
        self.backups.ongoing.clear()
        self.ongoing_loads.clear()
        self._load_locks.clear()

    def evict_leaves(self, num_units: int) -> None:
        """Evict device leaves in the order of the eviction policy until `num_units` are free or no leaf is left.

        Nodes with a host copy stay on the host. Other nodes are backed up first (write-back) or deleted
        (write-through).
        """
        tree, leaves, promised = self._tree, self._tree.device_leaves, 0
        before = tree.evictable_size
        looked_at: dict[TreeNode, None] = {}
        waiting: dict[TreeNode, None] = {}  # on the device until their backups, or backups below them, end
        num_waiting_below: Counter[TreeNode] = Counter()
        try:
            while before - tree.evictable_size + promised < num_units and (leaf := leaves.pop()) is not None:
                if leaf in looked_at:  # refused in this eviction; the next one tries again
                    continue
                looked_at[leaf], parent = None, leaf.parent
                above = self._evict_or_wait(leaf, waiting)
                if above is None:
                    continue
                if above is not parent and above in leaves:  # a leaf since a cascade, for the next eviction
                    looked_at[above] = None
                if leaf in waiting:
                    promised += len(leaf.key)
                    num_waiting_below[above] += 1
                if above.lock_ref == 0 and above.num_device_children == num_waiting_below[above]:
                    leaves.add(above)
            self._evict_waiting(waiting)
        finally:
            for node in looked_at:
                if node.parent is not None:  # those that remain, and their parents, may be leaves now
                    tree.update_leaf(node)
                    tree.update_leaf(node.parent)

    def evict_component(self, component: AuxiliaryComponent, num_rows: int) -> int:
        return self.device.evict_component(component, num_rows, self.evict_leaf)

    def evict_leaf(self, leaf: TreeNode) -> None:
        """Evict one device leaf. The leaf stays if a write-back finds no room on the host."""
        waiting: dict[TreeNode, None] = {}
        self._evict_or_wait(leaf, waiting)
        self._evict_waiting(waiting)

    def _evict_or_wait(self, leaf: TreeNode, waiting: dict[TreeNode, None]) -> TreeNode | None:
        """Evict the leaf, or add it to `waiting`. Returns the remaining node above it.

        Returns None if the leaf stays because the host has no room.
        """
        parent = leaf.parent
        if leaf.host_value is None and self.backups.write_policy != "write_back":
            parent = self.device.delete_leaf(leaf)
            return self.leaves.delete_useless(parent)
        if leaf.host_value is not None and leaf.write_through_pending_id is None and self._tree.is_device_leaf(leaf):
            self.device.demote(leaf)
        elif leaf.host_value is not None or self.backups.write(leaf, write_back=True):
            waiting[leaf] = None
        else:
            return None
        return parent

    def _evict_waiting(self, waiting: dict[TreeNode, None]) -> None:
        """Wait for the backups and evict the nodes with a host copy. The others stay: their copy failed."""
        if waiting:
            self.backups.writing_check(write_back=True)
        for node in waiting:
            if node.host_value is not None and self._tree.is_device_leaf(node):
                self.device.demote(node)

    # --- load-backs ---------------------------------------------------------------------------------------------------

    def load_back(self, node: TreeNode, mem_quota: int | None, req: Request | None) -> IndexArray | None:
        """Start to load a node, its evicted ancestors and the states that a match needs. See `TreeCache.load_back`."""
        nodes = path_down(node, lambda step: step.value is None)
        extras = [transfer for each in self.device.components for transfer in each.load_transfers(node, req)]
        ancestor = nodes[0].parent if nodes else node
        if ancestor is None or not (nodes or extras):
            return None
        host_rows = np.concatenate([no_indices(), *(n.host_value for n in nodes if n.host_value is not None)])
        lock = self.device.lock(ancestor)
        ack_id, rows = next(self.leaves.ids), None
        try:
            if self._is_worth_loading(len(host_rows), None if mem_quota is None else mem_quota + lock.delta, extras):
                rows = self._load_or_evict(node, host_rows, ack_id, extras)
        finally:
            self.device.unlock(lock.node, lock.tickets)
        if rows is None:
            return None
        start = 0
        for step in nodes:
            self.device.put(step, rows[start : start + len(step.key)])
            start += len(step.key)
        for component in self.device.components:
            component.commit_load(ack_id, node, [each for each in extras if each.name is component.pool], req)
        self.ongoing_loads[ack_id] = node
        self._load_locks[ack_id] = self.device.lock(node)
        return rows

    def _is_worth_loading(self, num_units: int, quota: int | None, extras: list[PoolTransfer]) -> bool:
        if not extras and num_units < self.load_back_threshold:
            return False
        is_unlimited = bool(extras) and not self.device.variant.quota_covers_states
        return quota is None or num_units <= quota or is_unlimited

    def _load_or_evict(
        self, node: TreeNode, host_rows: IndexArray, ack_id: int, extras: list[PoolTransfer]
    ) -> IndexArray | None:
        with ExitStack() as held:
            self._hold_needed(node, held)
            rows = self.controller.load(host_rows, ack_id, extras)
            if rows is None:
                is_short = self.device.variant.evicts_shortage_only
                self.evict_leaves(len(host_rows) - self._allocator.available_size() * is_short)
                rows = self.controller.load(host_rows, ack_id, extras)
        if rows is None:
            logger.warning("no room on the device to load %d units back", len(host_rows))
        return rows

    def _hold_needed(self, node: TreeNode, held: ExitStack) -> None:
        """Protect the data that the load needs on both tiers while room is made: a write-back evicts from the host."""
        held.enter_context(self.leaves.held(node))
        for component in self.device.components:
            for step in component.needed_nodes(node):
                data = component.data(step)
                if data.value is not None:
                    component.lock(step)
                    held.callback(component.unlock, step)
                if data.host_value is not None:
                    component.lock_host(step)
                    held.callback(component.unlock_host, step)

    def loading_check(self) -> None:
        """Unlock the nodes whose load has finished. Raises TransferError after a failed load: reset the cache then."""
        finished = self.controller.finished_loads()
        for_each([(ack_id,) for ack in finished for ack_id in ack.ids], self._end_load)

    def _end_load(self, ack_id: int) -> None:
        node, lock = self.ongoing_loads.pop(ack_id), self._load_locks.pop(ack_id)
        try:
            for component in self.device.components:
                component.end_load(ack_id, node)
        finally:
            self.device.unlock(lock.node, lock.tickets)
