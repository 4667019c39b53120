"""A node of a tree for all kinds of state: what it holds of each, on each tier.

`component_data[kind]` is one shape for every kind. Full KV makes a node what it is, so its entry is a view of the
fields that every tree node has; the other kinds have data of their own.
"""

from __future__ import annotations

from enum import IntEnum

from engine_cache.errors import CacheStateError
from engine_cache.tree.key import RadixKey
from engine_cache.tree.node import TreeNode
from engine_cache.types import IndexArray


class ComponentType(IntEnum):
    """Kinds of state, by their place in `UnifiedNode.component_data`."""

    FULL = 0
    """KV of the full-attention layers, one row a unit."""
    SWA = 1
    """KV of the sliding-window layers, one row a unit or none."""
    MAMBA = 2
    """The recurrent state after the last unit, one slot."""


class ComponentData:
    """What a node has of one kind."""

    __slots__ = ("host_lock_ref", "host_value", "lock_ends", "lock_gaps", "lock_ref", "pending_id", "value")

    def __init__(self) -> None:
        self.value: IndexArray | None = None
        """Device rows; None: a tombstone of this kind on the device."""
        self.host_value: IndexArray | None = None
        """Host rows, from the moment a backup is enqueued."""
        self.lock_ref = 0
        """Users that need the device rows; above 0 they must stay."""
        self.host_lock_ref = 0
        """Transfers that need the host rows; above 0 they must stay."""
        self.pending_id: int | None = None
        """The backup of this kind alone that has not been acknowledged; until then the host rows are not filled."""
        self.lock_ends: frozenset[int] = frozenset()
        """Tickets of the locks that begin below and end at this node."""
        self.lock_gaps: frozenset[int] = frozenset()
        """Tickets of the locks that go on above this node but found no rows here."""


class FullData:
    """Full KV of a node, by the names that other kinds have."""

    __slots__ = ("_node",)

    def __init__(self, node: TreeNode) -> None:
        self._node = node

    @property
    def value(self) -> IndexArray | None:
        return self._node.value

    @property
    def host_value(self) -> IndexArray | None:
        return self._node.host_value

    @property
    def lock_ref(self) -> int:
        return self._node.lock_ref

    @property
    def host_lock_ref(self) -> int:
        return self._node.host_ref_counter


_NUM_LISTS = 2 * (len(ComponentType) - 1)


class UnifiedNode(TreeNode):
    """A segment of whole pages that may hold state of any kind."""

    __slots__ = ("_auxiliaries", "newer", "older")

    def __init__(
        self, node_id: int, key: RadixKey, value: IndexArray | None, parent: TreeNode | None, now: int, priority: int
    ) -> None:
        super().__init__(node_id, key, value, parent, now, priority)
        self._auxiliaries = [ComponentData() for kind in ComponentType if kind is not ComponentType.FULL]
        self.newer: list[UnifiedNode | None] = [None] * _NUM_LISTS
        """Neighbours in each `LruList`, of which a kind has one a tier; None: not in that list. So is `older`."""
        self.older: list[UnifiedNode | None] = [None] * _NUM_LISTS

    @property
    def component_data(self) -> list[FullData | ComponentData]:
        """By `ComponentType`."""
        return [FullData(self), *self._auxiliaries]

    def auxiliary(self, kind: ComponentType) -> ComponentData:
        """Data of a kind other than Full."""
        return self._auxiliaries[kind - 1]


def unified(node: TreeNode) -> UnifiedNode:
    """The node as what it is in a unified tree. Raises CacheStateError for one of another tree."""
    if not isinstance(node, UnifiedNode):
        raise CacheStateError(f"node {node.id} is not of a unified tree")
    return node


def device_list(kind: ComponentType) -> int:
    """Which of a node's links the list of its device data takes."""
    return 2 * (kind - 1)


def host_list(kind: ComponentType) -> int:
    """The same for the list of those that are on the host only."""
    return 2 * (kind - 1) + 1
