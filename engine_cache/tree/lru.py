"""Least-recently-used order of tree nodes, as linked lists whose links are fields of the nodes.

    oldest <-> ... <-> newest        a circle, closed by a sentinel

Every operation is O(1). A node can be in several lists of different kinds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine_cache.errors import CacheStateError
from engine_cache.tree.node import TreeNode


class _End:
    """The sentinel."""

    id = -1

    def __init__(self, kind: int) -> None:
        self.newer: list[Any] = [None] * kind + [self]
        self.older: list[Any] = [None] * kind + [self]


class LruList:
    """Nodes in order of use. kind: index into the links of a node. Lists that share nodes have different kinds."""

    def __init__(self, kind: int) -> None:
        self._kind = kind
        self._len = 0
        self._end: Any = _End(kind)

    def __len__(self) -> int:
        return self._len

    def __contains__(self, node: TreeNode) -> bool:
        return node.newer[self._kind] is not None

    def __iter__(self) -> Iterator[TreeNode]:
        """Iterate over the nodes, oldest first. The list must not change during iteration."""
        node = self.oldest()
        while node is not None:
            yield node
            node = self.newer_than(node)

    def oldest(self) -> TreeNode | None:
        return self.newer_than(self._end)

    def newer_than(self, node: TreeNode) -> TreeNode | None:
        """Return the next newer node, or None at the end. The node must be in the list."""
        following = node.newer[self._kind]
        return None if following is self._end else following

    def append(self, node: TreeNode) -> None:
        """Add a node as the newest. Raises CacheStateError if it is in the list."""
        self.insert_below(node, self._end)

    def insert_below(self, node: TreeNode, above: TreeNode) -> None:
        """Add a node as the next older one of `above`.

        Raises CacheStateError if the node is in the list or `above` is not.
        """
        kind = self._kind
        below = above.older[kind]
        if below is None:
            raise CacheStateError(f"node {above.id} is not in list {kind}")
        if node.newer[kind] is not None:
            raise CacheStateError(f"node {node.id} is in list {kind} already")
        node.older[kind], node.newer[kind] = below, above
        below.newer[kind] = above.older[kind] = node
        self._len += 1

    def remove(self, node: TreeNode) -> None:
        """Remove a node. Raises CacheStateError if it is not in the list."""
        kind = self._kind
        older, newer = node.older[kind], node.newer[kind]
        if older is None or newer is None:
            raise CacheStateError(f"node {node.id} is not in list {kind}")
        older.newer[kind], newer.older[kind] = newer, older
        node.older[kind] = node.newer[kind] = None
        self._len -= 1

    def move_to_newest(self, node: TreeNode) -> None:
        """Make a node the newest. Raises CacheStateError if it is not in the list."""
        self.remove(node)
        self.append(node)

    def check(self) -> None:
        """Walk the list in both directions. Raises CacheStateError if links disagree or the length is wrong."""
        kind, node, found = self._kind, self._end, 0
        while True:
            newer = node.newer[kind]
            if newer is None or newer.older[kind] is not node:
                raise CacheStateError(f"list {kind}: the newer neighbour of node {node.id} does not name it its older")
            if newer is self._end:
                break
            node, found = newer, found + 1
        if found != self._len:
            raise CacheStateError(f"list {kind}: {found} nodes linked != {self._len} counted")
