"""A node of a radix tree, its state, and the two hashes of its pages.

Both lists of hashes are None until an event needs them. A split divides the lists and nothing recomputes them, so the
remove event of a page always contains the same hash as its store event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from enum import IntEnum
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from engine_cache.errors import CacheStateError
from engine_cache.tree.key import PageKey, RadixKey
from engine_cache.types import IndexArray
from kv_events.hashing import U64Array, block_hash_chain, sequence_hashes


class ComponentType(IntEnum):
    """The kinds of state of a model."""

    FULL = 0
    """KV of the full-attention layers, one row per unit."""
    SWA = 1
    """KV of the sliding-window layers, one row per unit or none."""
    MAMBA = 2
    """The recurrent state after the last unit, one slot."""


@dataclass(slots=True, eq=False)
class ComponentData:
    """The data of a node of one kind of state besides Full KV."""

    value: IndexArray | None = None
    """Device rows. None if the node is a tombstone of this kind on the device."""
    host_value: IndexArray | None = None
    """Host rows, set when a backup is enqueued."""
    lock_ref: int = 0
    host_lock_ref: int = 0
    pending_id: int | None = None
    """Backup that has not filled the host rows yet."""


_NUM_AUXILIARIES = len(ComponentType) - 1
ScalarT = TypeVar("ScalarT", bound=np.generic)


@dataclass(slots=True, eq=False, repr=False)
class TreeNode:
    """A node whose key is a run of whole pages. The root has an empty key and no parent."""

    id: int
    """Unique in its tree, in order of creation."""
    key: RadixKey
    value: IndexArray | None
    """Device rows, one per unit. None if the node is evicted."""
    parent: TreeNode | None
    last_access_time: int
    """Ticks of the tree's clock, like `creation_time`."""
    priority: int
    has_states: InitVar[bool] = False
    """Whether the node can have state of kinds other than Full KV."""
    creation_time: int = field(init=False)
    former_parent: TreeNode | None = None
    """Parent of the node before it was deleted, which still leads to the tree."""
    children: dict[PageKey, TreeNode] = field(default_factory=dict)
    """Children by `RadixKey.page_key` of their first page."""
    num_device_children: int = 0
    """Number of children on the device. A device leaf has none."""
    lock_ref: int = 0
    """Users that need the device rows. Above 0 the rows cannot be evicted."""
    hit_count: int = 0
    hash_value: list[str] | None = None
    """Block hashes as hex, one per page."""
    sequence_hash: U64Array | None = None
    """Sequence hashes, one per page."""
    host_value: IndexArray | None = None
    """Host rows, one per unit, set when a backup is enqueued. None without a host copy."""
    host_ref_counter: int = 0
    """Storage operations that need the host rows. Above 0 the rows cannot be evicted."""
    write_through_pending_id: int | None = None
    """Backup that has not been acknowledged. Until it is, no event reports the host copy."""
    _auxiliaries: Sequence[ComponentData] = ()

    def __post_init__(self, has_states: bool) -> None:
        self.creation_time = self.last_access_time
        if has_states:
            self._auxiliaries = [ComponentData() for _ in range(_NUM_AUXILIARIES)]

    @property
    def component_data(self) -> list[TreeNode | ComponentData]:
        """Data of every kind, indexed by `ComponentType`. The data of Full KV are the fields of the node itself."""
        return [self, *(self._auxiliaries or (ComponentData() for _ in range(_NUM_AUXILIARIES)))]

    @property
    def host_lock_ref(self) -> int:
        """`host_ref_counter`, with the name that it has in `ComponentData`."""
        return self.host_ref_counter

    def auxiliary(self, kind: ComponentType) -> ComponentData:
        """Return the data of a kind other than FULL. Raises CacheStateError in a tree without such kinds."""
        try:
            return self._auxiliaries[kind - 1]
        except IndexError:
            raise CacheStateError(f"node {self.id} is not of a tree with states") from None

    @property
    def mamba_value(self) -> IndexArray | None:
        """[1] device slot of the recurrent state."""
        return self.auxiliary(ComponentType.MAMBA).value

    @property
    def mamba_host_value(self) -> IndexArray | None:
        """[1] host slot of the recurrent state."""
        return self.auxiliary(ComponentType.MAMBA).host_value

    @property
    def mamba_lock_ref(self) -> int:
        return self.auxiliary(ComponentType.MAMBA).lock_ref

    @property
    def host_mamba_ref_counter(self) -> int:
        return self.auxiliary(ComponentType.MAMBA).host_lock_ref


def iter_nodes(root: TreeNode) -> Iterator[TreeNode]:
    """Yield all nodes below the root (or below any other node), parents before children."""
    pending = list(root.children.values())
    while pending:
        node = pending.pop()
        yield node
        pending.extend(node.children.values())


def compute_node_hash_values(node: TreeNode, page_size: int) -> list[str]:
    """Return the node's block hashes.

    Missing hashes are computed and stored, those of ancestors first, because a hash chain starts at a child of the
    root.
    """
    for missing in path_down(node, lambda n: n.hash_value is None):
        assert missing.parent is not None
        above = missing.parent.hash_value
        prior = above[-1] if above else None
        missing.hash_value = block_hash_chain(missing.key.raw, page_size, prior, is_bigram=missing.key.is_bigram)
    assert node.hash_value is not None
    return node.hash_value


def compute_node_sequence_hashes(node: TreeNode, page_size: int, seed: int) -> U64Array:
    """Return the node's sequence hashes, computed and stored like the block hashes.

    seed: of the namespace, see `namespace_seed`.
    """
    for missing in path_down(node, lambda n: n.sequence_hash is None):
        assert missing.parent is not None
        key, above = missing.key, missing.parent.sequence_hash
        parent = int(above[-1]) if above is not None and len(above) else None
        missing.sequence_hash = sequence_hashes(key.raw, page_size, seed, parent, is_bigram=key.is_bigram)
    assert node.sequence_hash is not None
    return node.sequence_hash


def path_down(node: TreeNode, wanted: Callable[[TreeNode], bool]) -> list[TreeNode]:
    """Return the node and its ancestors up to, and excluding, the first for which `wanted` is false, topmost first."""
    path = []
    while node.parent is not None and wanted(node):
        path.append(node)
        node = node.parent
    path.reverse()
    return path


def split_node_hash_value(
    child_hash_value: list[str] | None, split_len: int, page_size: int
) -> tuple[list[str] | None, list[str] | None]:
    """Return the block hashes of both parts of a node that is split after `split_len` units, whole pages."""
    assert split_len % page_size == 0, f"split after {split_len} units, page size {page_size}"
    if child_hash_value is None:
        return None, None
    pages = split_len // page_size
    return child_hash_value[:pages], child_hash_value[pages:]


def split_rows(
    rows: npt.NDArray[ScalarT] | None, split_len: int
) -> tuple[npt.NDArray[ScalarT] | None, npt.NDArray[ScalarT] | None]:
    """Return the rows or sequence hashes of both parts. Copies, so that the end of one part releases its memory."""
    if rows is None:
        return None, None
    return rows[:split_len].copy(), rows[split_len:].copy()
