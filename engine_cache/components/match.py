"""Where a match ends: the path of a key, and how much of it each kind of state can use.

root ── A ── B ── C ── D'       D': KV on the host only
        ok   ok   ok   ok       any tier: the best match is D
        ok   ok   gap  -        device only: B, from where a request can continue without a load
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from engine_cache.tree.node import TreeNode

MatchValidator: TypeAlias = Callable[[TreeNode], bool]


class MatchedPath(NamedTuple):
    """The nodes that a key shares with the tree, and the usable parts of that path."""

    nodes: list[TreeNode]
    """Root side first. Every node is on at least one tier."""
    num_best: int
    """Number of leading nodes up to the best match."""
    num_device: int
    """Number of leading nodes up to the best match on the device, at most `num_best`."""


def num_accepted(nodes: Sequence[TreeNode], validators: Sequence[MatchValidator]) -> int:
    """Return the number of leading nodes up to the deepest one that all validators accept.

    Every validator is called with every node, even after another validator has refused it, because validators may
    count.
    """
    deepest = 0
    for position, node in enumerate(nodes, 1):
        verdicts = [accepts(node) for accepts in validators]
        if all(verdicts):
            deepest = position
    return deepest
