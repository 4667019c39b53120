"""Where a match ends: one walk down the tree, shown to every kind of state, once for any tier and once for the device.

root ── A ── B ── C ── D'       D': KV on the host only
        ok   ok   ok   ok       any tier: best match D
        ok   ok   gap  -        device only: B, from where a request can go on at once
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from engine_cache.unified.node import UnifiedNode

MatchValidator: TypeAlias = Callable[[UnifiedNode], bool]


class MatchedPath(NamedTuple):
    """The nodes that a key shares with the tree, and how far they are of use."""

    nodes: list[UnifiedNode]
    """Root side first; none of them is dead."""
    num_best: int
    """Leading nodes up to the best match, 0: none."""
    num_device: int
    """Leading nodes up to the best match on the device; no more than `num_best`."""

    def best(self) -> list[UnifiedNode]:
        return self.nodes[: self.num_best]

    def on_device(self) -> list[UnifiedNode]:
        return self.nodes[: self.num_device]

    def num_units(self) -> int:
        """Units of all nodes, usable or not."""
        return sum(len(node.key) for node in self.nodes)


def num_accepted(nodes: Sequence[UnifiedNode], validators: Sequence[MatchValidator]) -> int:
    """Leading nodes up to the deepest that all validators accept.

    Every validator sees every node, also behind one that another has refused: a validator may count.
    """
    deepest = 0
    for position, node in enumerate(nodes, 1):
        verdicts = [accepts(node) for accepts in validators]
        if all(verdicts):
            deepest = position
    return deepest
