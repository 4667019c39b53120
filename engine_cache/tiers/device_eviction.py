"""What leaves the device: nodes with a host copy stay on the host, others are backed up first or deleted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from engine_cache.base import DecLockRefResult, IncLockRefResult
from engine_cache.errors import CacheStateError
from engine_cache.tiers.backup import Backups
from engine_cache.tree.node import TreeNode


class DeviceEviction(Backups):
    """Leaves of the device go, children first, as the eviction policy says. What is locked stays."""

    def _evict_leaves(self, num_tokens: int) -> int:
        """Evict leaves of the device as the policy says, until `num_tokens` units are free or none is left that may
        go; the units."""
        leaves, before, promised = self.evictable_leaves, self._evictable_size, 0
        looked_at: dict[TreeNode, None] = {}
        waiting: dict[TreeNode, None] = {}  # on the device until their backups, or those of nodes below, are done
        num_waiting_below: Counter[TreeNode] = Counter()
        try:
            while before - self._evictable_size + promised < num_tokens and (leaf := leaves.pop()) is not None:
                if leaf in looked_at:  # what it was refused for has changed meanwhile: it has its turn next time
                    continue
                looked_at[leaf], parent = None, leaf.parent
                left = self._evict_or_wait(leaf, waiting)
                if left is None:
                    continue
                if left is not parent and left in leaves:  # laid bare by a cascade: it has its turn next time, too
                    looked_at[left] = None
                if leaf in waiting:
                    promised += len(leaf.key)
                    num_waiting_below[left] += 1
                if left.lock_ref == 0 and left.num_device_children == num_waiting_below[left]:
                    leaves.add(left)
            self._evict_waiting(waiting)
        finally:
            self._put_back(looked_at)
        return before - self._evictable_size

    def _put_back(self, looked_at: Iterable[TreeNode]) -> None:
        """Let the queues hold those of the nodes that stay, and their parents, if and only if they belong there."""
        for node in looked_at:
            if node.parent is not None:
                self._update_leaf(node)
                self._update_leaf(node.parent)

    def _evict_or_wait(self, leaf: TreeNode, waiting: dict[TreeNode, None]) -> TreeNode | None:
        """Evict the leaf or note it in `waiting`; the node that is left above it, or None when the leaf has to stay
        for want of room on the host."""
        parent = leaf.parent
        if leaf.host_value is None and self.write_policy != "write_back":
            return self._evict_regular(leaf)
        if leaf.host_value is not None and leaf.write_through_pending_id is None and self._is_evictable_leaf(leaf):
            self._evict_backuped(leaf)
        elif leaf.host_value is not None or self.write_backup(leaf, write_back=True):
            waiting[leaf] = None
        else:
            return None
        return parent

    def _evict_waiting(self, waiting: dict[TreeNode, None]) -> None:
        """Wait for the backups and evict what has a host copy now; what has none stays, since its copy failed."""
        if waiting:
            self.writing_check(write_back=True)
        for node in waiting:
            if node.host_value is not None and self._is_evictable_leaf(node):
                self._evict_backuped(node)

    def _evict_regular(self, leaf: TreeNode) -> TreeNode:
        """A leaf without a host copy goes; the node that is left above it."""
        return self._delete_leaf(leaf)

    def _evict_backuped(self, node: TreeNode) -> None:
        """The node leaves the device and stays on the host."""
        assert node.value is not None
        assert node.parent is not None
        self._record_remove_event(node)
        self._free(node.value)
        self._evictable_size -= len(node.value)
        node.value = None
        node.parent.num_device_children -= 1
        self._update_leaf(node)
        self._update_leaf(node.parent)

    def inc_lock_ref(self, node: TreeNode) -> IncLockRefResult:
        self._require_on_device(node)
        return super().inc_lock_ref(node)

    def dec_lock_ref(self, node: TreeNode) -> DecLockRefResult:
        self._require_on_device(node)
        return super().dec_lock_ref(node)

    def _require_on_device(self, node: TreeNode) -> None:
        if node.value is None:
            raise CacheStateError(f"node {node.id} is not on the device, it cannot be locked or unlocked")
