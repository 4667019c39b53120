"""Where a match ends: the path of a key, and how far of it each kind of state can be used.

root ── A ── B ── C ── D'       D': KV on the host only
        ok   ok   ok   ok       any tier: the best match is D
        ok   ok   gap  -        device only: B, from where a request can continue at once
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from engine_cache.tree.node import TreeNode

MatchValidator: TypeAlias = Callable[[TreeNode], bool]


class MatchedPath(NamedTuple):
    """The nodes that a key shares with the tree, and how far they can be used."""

    nodes: list[TreeNode]
    """Root side first. All of them are on some tier."""
    num_best: int
    """Leading nodes up to the best match."""
    num_device: int
    """Leading nodes up to the best match on the device, at most `num_best`."""


def num_accepted(nodes: Sequence[TreeNode], validators: Sequence[MatchValidator]) -> int:
    """Leading nodes up to the deepest that all validators accept.

    Every validator sees every node, even one that another validator has refused, because validators may count.
    """
    deepest = 0
    for position, node in enumerate(nodes, 1):
        verdicts = [accepts(node) for accepts in validators]
        if all(verdicts):
            deepest = position
    return deepest
