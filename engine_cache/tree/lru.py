"""Least-recently-used order of tree nodes, as lists whose links lie in the nodes.

    oldest <-> ... <-> newest        a circle, closed by a sentinel that is nobody's node

Every operation is O(1); a node can hang in several lists, one of each kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

from engine_cache.errors import CacheStateError


class Linked(Protocol):
    """What a list needs of a node: a link to either neighbour for each list that it may hang in."""

    id: int
    newer: list[Any]
    older: list[Any]


_Node = TypeVar("_Node", bound=Linked)


class _End:
    """The sentinel: a node as far as links go."""

    id = -1

    def __init__(self, kind: int) -> None:
        self.newer: list[Any] = [None] * kind + [self]
        self.older: list[Any] = [None] * kind + [self]


class LruList(Generic[_Node]):
    """Nodes in order of use. kind: which of a node's links this list takes; no two lists that share nodes have the
    same kind."""

    def __init__(self, kind: int) -> None:
        self._kind = kind
        self._len = 0
        self._end: Any = _End(kind)

    def __len__(self) -> int:
        return self._len

    def __contains__(self, node: _Node) -> bool:
        return node.newer[self._kind] is not None

    def __iter__(self) -> Iterator[_Node]:
        """Oldest first. The list must not change meanwhile."""
        node = self.oldest()
        while node is not None:
            yield node
            node = self.newer_than(node)

    def oldest(self) -> _Node | None:
        return self.newer_than(self._end)

    def newer_than(self, node: _Node) -> _Node | None:
        """The next one towards the newest, or None at the end. The node must be in the list."""
        following = node.newer[self._kind]
        return None if following is self._end else following

    def append(self, node: _Node) -> None:
        """Put in a node that was not there, as the newest."""
        self.insert_below(node, self._end)

    def insert_below(self, node: _Node, above: _Node) -> None:
        """Put in a node that was not there, as the next older one of `above`. Raises CacheStateError if it was there,
        or `above` is not."""
        kind = self._kind
        below = above.older[kind]
        if below is None:
            raise CacheStateError(f"node {above.id} is not in list {kind}")
        if node.newer[kind] is not None:
            raise CacheStateError(f"node {node.id} is in list {kind} already")
        node.older[kind], node.newer[kind] = below, above
        below.newer[kind] = above.older[kind] = node
        self._len += 1

    def remove(self, node: _Node) -> None:
        """Take a node out. Raises CacheStateError if it is not there."""
        kind = self._kind
        older, newer = node.older[kind], node.newer[kind]
        if older is None or newer is None:
            raise CacheStateError(f"node {node.id} is not in list {kind}")
        older.newer[kind], newer.older[kind] = newer, older
        node.older[kind] = node.newer[kind] = None
        self._len -= 1

    def move_to_newest(self, node: _Node) -> None:
        """The node has been used. Raises CacheStateError if it is not there."""
        self.remove(node)
        self.append(node)

    def check(self) -> None:
        """Walk the list both ways. Raises CacheStateError where links disagree or the length is not the one kept."""
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
