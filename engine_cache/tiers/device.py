"""The device tier of a cache: device rows of nodes, their eviction and their locks."""

from collections.abc import Callable, Sequence

import numpy as np

from engine_cache.base import DecLockRefResult, IncLockRefResult
from engine_cache.components.component import AuxiliaryComponent, least_recent_first
from engine_cache.errors import CacheStateError
from engine_cache.pools.entry import RowAllocator
from engine_cache.tree.events import EventRecorder
from engine_cache.tree.key import RadixKey
from engine_cache.tree.node import TreeNode
from engine_cache.tree.tree import RadixTree
from engine_cache.types import IndexArray
from engine_cache.variants import CacheVariant
from kv_events.errors import InvalidValueError


class DeviceTier:
    """Full KV on the device, and the device data of the components.

    allocator: frees the rows. None leaves them to the caller.
    """

    def __init__(
        self,
        tree: RadixTree,
        events: EventRecorder,
        allocator: RowAllocator | None,
        components: Sequence[AuxiliaryComponent],
        variant: CacheVariant,
    ) -> None:
        self.tree = tree
        self.events = events
        self.components = components
        self.variant = variant
        self._allocator = allocator

    def free(self, rows: IndexArray) -> None:
        if self._allocator is not None and len(rows):
            self._allocator.free(rows)

    def add_leaf(self, parent: TreeNode, key: RadixKey, value: IndexArray, start: int, priority: int) -> TreeNode:
        """Create a leaf for `key[start:]`. It becomes the owner of the rows `value[start:]`."""
        rest = key[start:]
        leaf = self.tree.new_node(rest, value[start : len(key)].astype(np.int64), parent, priority)
        self.events.store(leaf)  # first, because hashing the pages may fail
        self.tree.link(leaf)
        return leaf

    def put(self, node: TreeNode, rows: IndexArray) -> None:
        """Give an evicted node device rows. Its parent must be on the device."""
        self.tree.put_on_device(node, rows)
        self.events.store(node)

    def demote(self, node: TreeNode) -> None:
        """Evict a node with all its device data. The node stays on the host."""
        assert node.value is not None
        self._free_components(node)
        self.events.remove(node)
        self.free(node.value)
        self.tree.take_off_device(node)

    def delete_leaf(self, leaf: TreeNode) -> TreeNode:
        """Delete an unlocked leaf that is on the device only. Returns its parent."""
        assert leaf.value is not None, f"node {leaf.id} has no device rows"
        self._free_components(leaf)
        self.events.remove(leaf)
        self.free(leaf.value)
        return self.tree.unlink(leaf)

    def _free_components(self, node: TreeNode) -> None:
        for component in self.components:  # before KV, because SWA rows are found through KV rows
            component.free_on_device(node)

    def evict_leaves(self, num_units: int) -> None:
        """Delete leaves in the order of the eviction policy until `num_units` are free or no leaf is left."""
        tree = self.tree
        before = tree.evictable_size
        while before - tree.evictable_size < num_units and (leaf := tree.device_leaves.pop()) is not None:
            self.evict_leaf(leaf)

    def evict_leaf(self, leaf: TreeNode) -> None:
        """Delete a leaf, and the ancestors that become useless without it."""
        node = self.delete_leaf(leaf)
        while self.variant.deletes_tombstone_leaves and self.is_useless(node):
            node = self.delete_leaf(node)

    def is_useless(self, node: TreeNode) -> bool:
        """Return whether the node is an unused leaf at which no match can end."""
        if not self.variant.deletes_tombstone_leaves or node.children:
            return False
        is_held = node.lock_ref > 0 or node.host_ref_counter > 0 or node.write_through_pending_id is not None
        held = (component.data(node) for component in self.components)
        return not is_held and all(data.value is None and data.host_value is None for data in held)

    def evict_component(
        self, component: AuxiliaryComponent, num_rows: int, evict_leaf: Callable[[TreeNode], None] | None = None
    ) -> int:
        """Free device rows of one kind, least recently used first. Returns their number.

        A leaf loses all its data, through `evict_leaf`. Any other node loses this kind and the kinds that cannot be
        used without it, which is not an event.
        """
        evict_leaf, before = evict_leaf or self.evict_leaf, component.device_size
        for node in least_recent_first(component.device_lru_list):  # no other node loses this kind
            if before - component.device_size >= num_rows:
                break
            if node in self.tree.device_leaves and not (node.children and self.variant.keeps_kv_above_host_children):
                evict_leaf(node)
            elif all(each.data(node).lock_ref == 0 for each in self.evicted_with(component)):
                for each in self.evicted_with(component):
                    each.free_on_device(node)
        return before - component.device_size

    def evicted_with(self, component: AuxiliaryComponent) -> list[AuxiliaryComponent]:
        """Return the kinds that an inner node loses together with this one."""
        return [each for each in self.components if each.eviction_priority <= component.eviction_priority]

    def lock(self, node: TreeNode) -> IncLockRefResult:
        """Lock what a user of the node needs. See `BasePrefixCache.inc_lock_ref`."""
        held = node if node.value is not None else self._first_on_device(node)
        delta = -self.tree.lock(held)
        if not self.components or held is self.tree.root:
            return IncLockRefResult(delta, held)
        if not self.variant.locks_have_tickets:
            for component in self.components:
                component.lock(held)
            return IncLockRefResult(delta, held)
        taken = ((component.kind, component.acquire(node)) for component in self.components)
        return IncLockRefResult(delta, held, tuple((int(kind), ticket) for kind, ticket in taken if ticket is not None))

    def unlock(self, node: TreeNode, tickets: Sequence[tuple[int, int]] | None) -> DecLockRefResult:
        """Undo one `lock` of the node. See `BasePrefixCache.dec_lock_ref`."""
        if node.value is None:
            raise CacheStateError(f"node {node.id} is not on the device, it cannot be locked or unlocked")
        if not self.components or node is self.tree.root:
            return DecLockRefResult(self.tree.unlock(node))
        has_tickets = self.variant.locks_have_tickets
        if has_tickets and tickets is None:
            raise InvalidValueError("params", None, "to_dec_params() of the lock that is released")
        if not has_tickets and any(component.data(node).lock_ref < 1 for component in self.components):
            raise CacheStateError(f"node {node.id} unlocked with mamba_lock_ref 0, expected at least 1")
        by_kind = dict(tickets or ())
        for component in self.components:
            if component.kind in by_kind and not component.is_locked(by_kind[component.kind]):
                raise CacheStateError(f"node {node.id} is not locked by these params")
        released = self.tree.unlock(node)
        for component in self.components:
            if not has_tickets:
                component.unlock(node)
            elif component.kind in by_kind:
                component.release(by_kind[component.kind])
        return DecLockRefResult(released)

    def _first_on_device(self, node: TreeNode) -> TreeNode:
        if not self.variant.locks_evicted_nodes:
            raise CacheStateError(f"node {node.id} is not on the device, it cannot be locked or unlocked")
        step = node
        while step.value is None:
            if step.parent is None:
                raise CacheStateError(f"node {node.id} has no ancestor on the device")
            step = step.parent
        return step
