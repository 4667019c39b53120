"""The host tier of a cache: backups, load-backs, and eviction from the device to the host.

on device only ── Backups.write ──> pending ── writing_check ──> on both ── eviction ──> on host only
                                                                 on both <── LoadBacks.load ──┘
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from itertools import count

from engine_cache.pools.allocators import PagedTokenToKVPoolAllocator
from engine_cache.tiers.backup import Backups
from engine_cache.tiers.device import DeviceTier
from engine_cache.tiers.host_leaves import HostLeaves
from engine_cache.tiers.load_back import LoadBacks
from engine_cache.tiers.transfer import HiCacheController
from engine_cache.tree.node import TreeNode
from kv_events.errors import InvalidValueError

logger = logging.getLogger(__name__)

_DRAIN_TIMEOUT_S = 30.0


class HostTier:
    """The host tier of one cache.

    controller: moves the data. Its device allocator of KV must be `allocator`. Raises InvalidValueError for another
    allocator, a policy that is not in `WRITE_POLICIES`, a negative threshold, or a page size that differs from the host
    pool's.
    """

    def __init__(
        self,
        device: DeviceTier,
        controller: HiCacheController,
        allocator: PagedTokenToKVPoolAllocator,
        write_policy: str,
        load_back_threshold: int,
    ) -> None:
        tree, pool = device.tree, controller.kv.host_pool
        if controller.kv.device_allocator is not allocator:
            raise InvalidValueError("allocator", allocator, "the controller's own for KV")
        if tree.page_size != pool.page_size:
            raise InvalidValueError("page_size", tree.page_size, f"the host pool's, {pool.page_size}")
        ids = count()
        self.device = device
        self.controller = controller
        self.leaves = HostLeaves(device, pool)
        self.backups = Backups(device, self.leaves, controller, write_policy, ids)
        self.loads = LoadBacks(device, self.leaves, controller, load_back_threshold, self._make_room, ids)
        self._tree = tree
        self._allocator = allocator
        tree.has_host = True
        tree.observe(self.backups)

    def clear(self) -> None:
        """Wait for running transfers, and drop all operations."""
        if not self.controller.engine.drain(_DRAIN_TIMEOUT_S):
            logger.warning("transfers still run %g s after a reset, which waits for them", _DRAIN_TIMEOUT_S)
        self.controller.reset()
        self.backups.ongoing.clear()
        self.loads.clear()

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
            self._restore_leaves(looked_at)

    def _make_room(self, num_units: int) -> None:
        is_short = self.device.rules.evicts_shortage_only
        self.evict_leaves(num_units - self._allocator.available_size() if is_short else num_units)

    def evict_leaf(self, leaf: TreeNode) -> None:
        """Evict one device leaf. The leaf stays if a write-back finds no room on the host."""
        waiting: dict[TreeNode, None] = {}
        self._evict_or_wait(leaf, waiting)
        self._evict_waiting(waiting)

    def _restore_leaves(self, looked_at: Iterable[TreeNode]) -> None:
        """Return the remaining nodes, and their parents, to the eviction queues that they belong in."""
        for node in looked_at:
            if node.parent is not None:
                self._tree.update_leaf(node)
                self._tree.update_leaf(node.parent)

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
