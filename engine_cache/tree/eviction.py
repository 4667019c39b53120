"""Eviction: the policies, which define the order of eviction, and the queue that keeps the leaves in that order.

A policy computes a sort key for a node. The smallest key is evicted first and ties are broken by node id, so the order
is total. Times are ticks of the tree's counter clock, not wall time.
"""

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple, TypeAlias

from engine_cache.errors import CacheStateError
from engine_cache.tree.node import TreeNode
from kv_events.errors import InvalidValueError

SortKey: TypeAlias = tuple[int, int]
_Entry: TypeAlias = tuple[SortKey, int, TreeNode]

_SLRU_PROTECTED_HITS = 2
_MOST_UNSORTED = 64
_MOST_ENTRIES_A_NODE, _SPARE_ENTRIES = 2, 64


class EvictionPolicy(NamedTuple):
    key: Callable[[TreeNode], SortKey]
    falls_when_used: bool = False
    """Whether use makes a node's key smaller. In other policies a key can only grow, which need not be reported."""


EVICTION_POLICIES: dict[str, EvictionPolicy] = {
    "lru": EvictionPolicy(lambda node: (node.last_access_time, node.id)),
    "lfu": EvictionPolicy(lambda node: (node.hit_count, node.last_access_time)),
    "fifo": EvictionPolicy(lambda node: (node.creation_time, node.id)),
    "mru": EvictionPolicy(lambda node: (-node.last_access_time, node.id), falls_when_used=True),
    "filo": EvictionPolicy(lambda node: (-node.creation_time, node.id)),
    "priority": EvictionPolicy(lambda node: (node.priority, node.last_access_time)),
    "slru": EvictionPolicy(lambda node: (node.hit_count >= _SLRU_PROTECTED_HITS, node.last_access_time)),
}


def find_policy(name: str) -> EvictionPolicy:
    """Return the policy with this name. Raises InvalidValueError, which lists the known ones."""
    try:
        return EVICTION_POLICIES[name]
    except KeyError:
        raise InvalidValueError("eviction_policy", name, f"one of {', '.join(EVICTION_POLICIES)}") from None


class EvictionQueue:
    """A set of nodes that returns the next node to evict in logarithmic time.

    It is a heap with lazy repair. A new node is sorted in at the next eviction, or together with a batch of others, so
    that nodes that are removed earlier cost nothing. The entry of a node that was removed, or whose key has grown,
    stays in place until it reaches the top, where it is dropped or sorted in again. A node can therefore be used any
    number of times between two evictions at the cost of one repair. `pop` is O(log n), amortised over additions and
    uses. Stale entries are removed before they outnumber the others.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._key = policy.key
        self._falls_when_used = policy.falls_when_used
        self._entries: dict[TreeNode, _Entry | None] = {}
        """The valid entry of each node, whose key is at most the node's own. None if it is not sorted in yet."""
        self._heap: list[_Entry] = []
        self._unsorted: list[TreeNode] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, node: TreeNode) -> bool:
        return node in self._entries

    def __iter__(self) -> Iterator[TreeNode]:
        return iter(self._entries)

    def add(self, node: TreeNode) -> None:
        if node not in self._entries:
            self._sort_later(node)

    def discard(self, node: TreeNode) -> None:
        self._entries.pop(node, None)

    def used(self, nodes: Iterable[TreeNode]) -> None:
        """Report that nodes have been used, after their keys have changed. They need not be in the queue."""
        if self._falls_when_used:
            for node in nodes:
                if node in self._entries:
                    self._sort_later(node)

    def pop(self) -> TreeNode | None:
        """Remove and return the first node. None if the queue is empty."""
        self._sort_in()
        heap, entries = self._heap, self._entries
        while heap:
            entry = heap[0]
            node = entry[2]
            if entries.get(node) is not entry:
                heappop(heap)
                continue
            key = self._key(node)
            if key == entry[0]:
                heappop(heap)
                del entries[node]
                return node
            entries[node] = entry = (key, node.id, node)
            heapreplace(heap, entry)
        return None

    def check(self) -> None:
        """Check the order. Raises CacheStateError for a node that would be returned out of order."""
        known = {id(entry) for entry in self._heap} | {id(node) for node in self._unsorted}
        for node, entry in self._entries.items():
            if id(entry or node) not in known:
                raise CacheStateError(f"node {node.id} may be evicted, but is not in the heap of {len(self._heap)}")
            if entry is not None and self._key(node) < entry[0]:
                raise CacheStateError(f"node {node.id}: key {self._key(node)} is below {entry[0]}, it was sorted by")

    def _sort_later(self, node: TreeNode) -> None:
        self._entries[node] = None
        self._unsorted.append(node)
        if len(self._unsorted) == _MOST_UNSORTED:
            self._sort_in()

    def _sort_in(self) -> None:
        entries, heap = self._entries, self._heap
        for node in self._unsorted:
            if node in entries and entries[node] is None:
                entries[node] = entry = (self._key(node), node.id, node)
                heappush(heap, entry)
        self._unsorted.clear()
        if len(heap) > _MOST_ENTRIES_A_NODE * len(entries) + _SPARE_ENTRIES:
            self._heap = [entry for entry in entries.values() if entry is not None]
            heapify(self._heap)
