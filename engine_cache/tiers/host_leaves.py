"""Nodes that are on the host only: their protection during transfers, and their eviction."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from engine_cache.components.component import AuxiliaryComponent, least_recent_first
from engine_cache.tiers.device import DeviceTier
from engine_cache.tiers.transfer import HiCacheController
from engine_cache.tree.node import TreeNode
from kv_events.schema import StorageMedium


class HostLeaves:
    """Full KV on the host, and the host data of the components. controller: moves them, and owns the host rows."""

    def __init__(self, device: DeviceTier, controller: HiCacheController) -> None:
        self.device = device
        self.controller = controller
        self.pool = controller.kv.host_pool
        self.ids = count()
        """Numbers of backups and loads."""
        self._tree = device.tree

    def hold(self, node: TreeNode) -> None:
        """Protect the host rows of a node from eviction until `release`."""
        node.host_ref_counter += 1
        self._tree.host_leaves.discard(node)

    def release(self, node: TreeNode) -> None:
        assert node.host_ref_counter > 0, f"node {node.id} released with host_ref_counter 0"
        node.host_ref_counter -= 1
        self._tree.update_host_leaf(node)

    @contextmanager
    def held(self, node: TreeNode) -> Iterator[None]:
        self.hold(node)
        try:
            yield
        finally:
            self.release(node)

    def units_to_evict(self, num_units: int) -> int:
        """Return the number of units to evict to make room for `num_units`."""
        return num_units - self.pool.available_size() if self.device.variant.evicts_shortage_only else num_units

    def evict(self, num_units: int) -> int:
        """Delete nodes that are on the host only, in the order of the eviction policy, until `num_units` rows are free
        or no such node is left. Returns the number of rows.
        """
        leaves, before = self._tree.host_leaves, self.pool.available_size()
        uncovered = []  # nodes that became leaves in a cascade, for the next eviction
        while self.pool.available_size() - before < num_units and (leaf := leaves.pop()) is not None:
            parent = leaf.parent
            above = self.evict_leaf(leaf)
            if above is not parent:
                leaves.discard(above)
                uncovered.append(above)
        for node in uncovered:
            self._tree.update_host_leaf(node)
        return self.pool.available_size() - before

    def evict_leaf(self, leaf: TreeNode) -> TreeNode:
        """Delete a host leaf, and the ancestors that become useless. Returns the remaining node above it."""
        return self.delete_useless(self._delete(leaf))

    def delete_useless(self, node: TreeNode) -> TreeNode:
        """Delete a useless node from all tiers, then its useless ancestors. Returns the node that remains."""
        while self.device.is_useless(node):
            if node.host_value is None:
                node = self.device.delete_leaf(node)
                continue
            if node.value is not None:
                self.device.demote(node)
            node = self._delete(node)
        return node

    def _delete(self, leaf: TreeNode) -> TreeNode:
        assert leaf.host_value is not None
        for component in self.device.components:
            component.free_on_host(leaf)
        self.device.events.remove(leaf, StorageMedium.CPU)
        self.pool.free(leaf.host_value)
        leaf.host_value = None
        return self._tree.unlink(leaf)

    def evict_component(self, component: AuxiliaryComponent, num_rows: int) -> int:
        """Free host rows of one kind, least recently used first. Returns their number.

        A host leaf loses all its data. Any other node loses this kind and the kinds that cannot be used without it,
        which is not an event.
        """
        pool = component.entry.host_pool
        before = pool.available_size()
        for node in least_recent_first(component.host_lru_list):  # no other node loses this kind, as on the device
            if pool.available_size() - before >= num_rows:
                break
            if node in self._tree.host_leaves:
                self.evict_leaf(node)
            else:
                for each in self.device.evicted_with(component):
                    if node in each.host_lru_list:
                        each.free_on_host(node)
        return pool.available_size() - before
