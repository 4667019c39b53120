"""RadixTree: the shape of a prefix cache. It walks, splits, links and locks nodes. It owns no pool and copies no data.

    root ── system prompt ──┬── user A, turn 1 ── turn 2      every edge: whole pages, key and rows of equal length
                            └── user B, turn 1

A walk that diverges inside a node splits the node, so every walk ends at a node. A lock covers all nodes from one node
to the root, so locked nodes always form a prefix, and eviction needs to remove leaves only.
"""

import sys
from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol

import numpy as np

from engine_cache.errors import CacheStateError
from engine_cache.tree.eviction import EvictionPolicy, EvictionQueue
from engine_cache.tree.key import RadixKey
from engine_cache.tree.node import TreeNode, split_node_hash_value, split_rows
from engine_cache.types import IndexArray, no_indices
from kv_events.errors import InvalidValueError

_LOWEST_PRIORITY = -sys.maxsize


class TreeObserver(Protocol):
    """Owner of data that nodes carry besides the rows of Full KV."""

    def touched(self, path: Sequence[TreeNode]) -> None:
        """Mark nodes, parents first, as used."""

    def was_split(self, upper: TreeNode, lower: TreeNode, split_len: int) -> None:
        """Handle a split: the new node `upper` has received the first `split_len` units of `lower`."""


class RadixTree:
    """A radix tree of one or two tiers, and the evictable leaves of each tier.

    page_size: units per page. is_eagle: keys are bigrams. has_states: nodes have more than Full KV. split_copies_hits:
    the upper part of a split node keeps the node's hits.
    """

    def __init__(
        self, page_size: int, policy: EvictionPolicy, *, is_eagle: bool, has_states: bool, split_copies_hits: bool
    ) -> None:
        self.page_size = page_size
        self.is_eagle = is_eagle
        self.has_host = False
        """Whether host leaves are tracked as well."""
        self._policy = policy
        self._has_states = has_states
        self._split_copies_hits = split_copies_hits
        self._observers: tuple[TreeObserver, ...] = ()
        self._clock = count(1)
        self._node_ids = count()
        self.clear()

    def clear(self) -> None:
        """Reset to an empty tree with a new root. The rows of the old nodes are not freed."""
        self.root = self.new_node(RadixKey([]), no_indices(), None, _LOWEST_PRIORITY)
        self.root.lock_ref = 1
        self.root.hash_value = []
        self.device_leaves = EvictionQueue(self._policy)
        """Unlocked nodes on the device without children on the device."""
        self.host_leaves = EvictionQueue(self._policy)
        """Nodes on the host only, without children, whose host rows no transfer uses."""
        self.evictable_size = 0
        """Units of unlocked nodes on the device."""
        self.protected_size = 0
        """Units of locked nodes on the device."""

    def observe(self, observer: TreeObserver) -> None:
        """Report touches and splits to `observer`, after the observers that were added before."""
        self._observers = (*self._observers, observer)

    def whole_pages(self, key: RadixKey, value: IndexArray | None) -> tuple[RadixKey, IndexArray | None]:
        """Convert the key to the tree's units and cut it to whole pages, and cut `value` to the units.

        Raises InvalidValueError for a bigram key in a tree of tokens, and for fewer rows than units.
        """
        if key.is_bigram and not self.is_eagle:
            raise InvalidValueError("key.is_bigram", True, "False, this cache holds plain tokens")
        key, value = key.maybe_to_bigram_view(self.is_eagle, value)
        if value is not None and len(value) < len(key):
            raise InvalidValueError("value", f"{len(value)} rows", f"one for each of {len(key)} units")
        return key.page_aligned(self.page_size), value

    def descend(self, key: RadixKey, visit: Callable[[TreeNode], None] | None = None) -> tuple[list[TreeNode], int]:
        """Return the nodes along the longest cached prefix of a page-aligned key, and its length in units.

        Splits the last node if the prefix ends inside it. visit: called with each node on the way down.
        """
        node, done, end, path = self.root, 0, len(key), []
        while done < end:
            child = self.next_on_path(node, key, done)
            if child is None:
                break
            if visit is not None:
                visit(child)
            path.append(child)
            done += len(child.key)
            node = child
        return path, done

    def next_on_path(self, node: TreeNode, key: RadixKey, done: int) -> TreeNode | None:
        """Return the child of `node` that continues `key[done:]`, or None if no child shares a page with it.

        Splits the child if the key diverges inside it.
        """
        child = node.children.get(key.page_key(self.page_size, done))
        if child is None:
            return None
        shared = key.match(child.key, self.page_size, done)
        return self.split(child, shared) if shared < len(child.key) else child

    def touch(self, path: Sequence[TreeNode]) -> None:
        """Mark nodes, parents first, and all their data as used now."""
        self.touch_kv(path)
        for observer in self._observers:
            observer.touched(path)

    def touch_kv(self, path: Sequence[TreeNode]) -> None:
        """Mark the KV of nodes, parents first, as used now."""
        for node in path:
            node.last_access_time = next(self._clock)
        self.device_leaves.used(path)
        if self.has_host:
            self.host_leaves.used(path)

    def split(self, child: TreeNode, split_len: int) -> TreeNode:
        """Insert a new node above `child` that receives its first `split_len` units, whole pages. Returns the new node.

        `child` remains the lower node for its users. Both parts count as used now.
        """
        parent, page_size = child.parent, self.page_size
        assert parent is not None
        whole_key = child.key
        upper_rows, lower_rows = split_rows(child.value, split_len)
        upper = self.new_node(whole_key[:split_len], upper_rows, parent, child.priority)
        child.key, child.value = whole_key[split_len:], lower_rows
        upper.lock_ref, upper.creation_time = child.lock_ref, child.creation_time
        upper.hit_count = child.hit_count if self._split_copies_hits else 0
        upper.hash_value, child.hash_value = split_node_hash_value(child.hash_value, split_len, page_size)
        upper.sequence_hash, child.sequence_hash = split_rows(child.sequence_hash, split_len // page_size)
        upper.host_value, child.host_value = split_rows(child.host_value, split_len)
        upper.write_through_pending_id = child.write_through_pending_id
        parent.children[upper.key.page_key(page_size)] = upper
        upper.children[child.key.page_key(page_size)] = child
        upper.num_device_children = int(child.value is not None)
        child.parent = upper
        self.touch([upper, child])
        for observer in self._observers:
            observer.was_split(upper, child, split_len)
        return upper

    def new_node(self, key: RadixKey, value: IndexArray | None, parent: TreeNode | None, priority: int) -> TreeNode:
        return TreeNode(next(self._node_ids), key, value, parent, next(self._clock), priority, self._has_states)

    def link(self, leaf: TreeNode) -> None:
        parent = leaf.parent
        assert parent is not None
        parent.children[leaf.key.page_key(self.page_size)] = leaf
        if leaf.value is not None:
            parent.num_device_children += 1
            self.evictable_size += len(leaf.key)
            self.device_leaves.discard(parent)
            self.device_leaves.add(leaf)
        else:
            self.update_leaf(leaf)
            self.update_leaf(parent)

    def unlink(self, leaf: TreeNode) -> TreeNode:
        """Delete an unlocked leaf. Returns its parent. The caller owns its rows afterwards."""
        parent = leaf.parent
        assert parent is not None
        if leaf.value is not None:
            parent.num_device_children -= 1
            self.evictable_size -= len(leaf.key)
        del parent.children[leaf.key.page_key(self.page_size)]
        leaf.former_parent, leaf.parent = parent, None
        self.device_leaves.discard(leaf)
        if self.has_host:
            self.host_leaves.discard(leaf)
        self.update_leaf(parent)
        return parent

    def put_on_device(self, node: TreeNode, rows: IndexArray) -> None:
        """Give an evicted node device rows, which are copied. Its parent must be on the device."""
        assert node.parent is not None
        node.value = rows.astype(np.int64)
        node.parent.num_device_children += 1
        self.evictable_size += len(rows)
        self.update_leaf(node)
        self.update_leaf(node.parent)

    def take_off_device(self, node: TreeNode) -> None:
        """Remove the device rows of an unlocked node. The caller owns them afterwards."""
        assert node.parent is not None
        node.value = None
        node.parent.num_device_children -= 1
        self.evictable_size -= len(node.key)
        self.update_leaf(node)
        self.update_leaf(node.parent)

    def is_device_leaf(self, node: TreeNode) -> bool:
        return node.value is not None and node.lock_ref == 0 and not node.num_device_children

    def update_leaf(self, node: TreeNode) -> None:
        """Update the leaves of both tiers after a change of the node."""
        if self.is_device_leaf(node):
            self.device_leaves.add(node)
        else:
            self.device_leaves.discard(node)
        if self.has_host:
            self.update_host_leaf(node)

    def update_host_leaf(self, node: TreeNode) -> None:
        is_on_host_only = node.value is None and node.host_value is not None
        if is_on_host_only and not node.children and node.host_ref_counter == 0:
            self.host_leaves.add(node)
        else:
            self.host_leaves.discard(node)

    def lock(self, node: TreeNode) -> int:
        """Lock a node on the device and its ancestors. Returns the units that become protected.

        Raises CacheStateError for a node of another tree.
        """
        protected = 0
        for step in self.path_to_root(node):
            if step.lock_ref == 0:
                protected += len(step.key)
            step.lock_ref += 1
        self.evictable_size -= protected
        self.protected_size += protected
        self.device_leaves.discard(node)
        return protected

    def unlock(self, node: TreeNode) -> int:
        """Undo one `lock` of the node. Returns the units that become evictable.

        Raises CacheStateError if the node is not locked or belongs to another tree.
        """
        path = self.path_to_root(node)
        if path and node.lock_ref < 1:
            raise CacheStateError(f"node {node.id} unlocked with lock_ref {node.lock_ref}, expected at least 1")
        released = 0
        for step in path:
            step.lock_ref -= 1
            if step.lock_ref == 0:
                released += len(step.key)
        self.evictable_size += released
        self.protected_size -= released
        if released and not node.num_device_children:
            self.device_leaves.add(node)
        return released

    def path_to_root(self, node: TreeNode) -> list[TreeNode]:
        """Return the node and its ancestors, without the root, children first.

        Raises CacheStateError for a node of another tree.
        """
        path = []
        step: TreeNode | None = node
        while step is not self.root:
            if step is None:
                raise CacheStateError(f"node {node.id} is not below root {self.root.id}")
            path.append(step)
            step = step.parent
        return path
