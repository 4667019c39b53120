"""Eviction policies: which leaf goes first.

A policy gives a node a sort key; the smallest goes first and ties go by node id, so the order is total. Times are ticks
of the tree's counter clock, not wall time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from engine_cache.node import TreeNode
from kv_events.errors import InvalidValueError

EvictionPolicy: TypeAlias = Callable[[TreeNode], tuple[int, int]]

_SLRU_PROTECTED_HITS = 2

EVICTION_POLICIES: dict[str, EvictionPolicy] = {
    "lru": lambda node: (node.last_access_time, node.id),
    "lfu": lambda node: (node.hit_count, node.last_access_time),
    "fifo": lambda node: (node.creation_time, node.id),
    "mru": lambda node: (-node.last_access_time, node.id),
    "filo": lambda node: (-node.creation_time, node.id),
    "priority": lambda node: (node.priority, node.last_access_time),
    "slru": lambda node: (node.hit_count >= _SLRU_PROTECTED_HITS, node.last_access_time),
}


def find_policy(name: str) -> EvictionPolicy:
    """The policy of that name. Raises InvalidValueError, which lists the known ones."""
    try:
        return EVICTION_POLICIES[name]
    except KeyError:
        raise InvalidValueError("eviction_policy", name, f"one of {', '.join(EVICTION_POLICIES)}") from None
