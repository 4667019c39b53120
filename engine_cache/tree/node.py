"""A node of a radix tree, and the two names of its pages.

Both lists of names are lazy: None until an event needs them. Once computed they belong to the pages: a split cuts them,
nothing recomputes them, so whatever was announced under a name is taken back under the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from engine_cache.errors import CacheStateError
from engine_cache.tree.key import PageKey, RadixKey
from engine_cache.types import IndexArray
from kv_events.hashing import U64Array, block_hash_chain, sequence_hashes

NUM_LRU_LISTS = 2
"""Lists that a `MambaNode` can hang in at once: nodes with a state on the device, and those with one on the host."""


class TreeNode:
    """A segment of whole pages. The root has an empty key and no parent."""

    __slots__ = (
        "children",
        "creation_time",
        "former_parent",
        "hash_value",
        "hit_count",
        "host_ref_counter",
        "host_value",
        "id",
        "key",
        "last_access_time",
        "lock_ref",
        "num_device_children",
        "parent",
        "priority",
        "sequence_hash",
        "value",
        "write_through_pending_id",
    )

    def __init__(
        self, node_id: int, key: RadixKey, value: IndexArray | None, parent: TreeNode | None, now: int, priority: int
    ) -> None:
        self.id = node_id
        """Unique in its tree, in order of creation."""
        self.key = key
        self.value = value
        """Device rows, one a unit; None: not on the device."""
        self.parent = parent
        self.former_parent: TreeNode | None = None
        """Where a node hung that was deleted; None: it was not."""
        self.children: dict[PageKey, TreeNode] = {}
        """By `RadixKey.page_key` of the child's first page."""
        self.num_device_children = 0
        """How many of them are on the device; without any the node may be a leaf there."""
        self.lock_ref = 0
        """Users that need the device data; above 0 it must stay."""
        self.hit_count = 0
        self.priority = priority
        self.last_access_time = now
        """Ticks of the tree's own clock, as is `creation_time`."""
        self.creation_time = now
        self.hash_value: list[str] | None = None
        """Block hashes as hex, one a page."""
        self.sequence_hash: U64Array | None = None
        """The router's names, one a page."""
        self.host_value: IndexArray | None = None
        """Host rows, one a unit, from the moment a backup is enqueued; None: no copy on the host."""
        self.host_ref_counter = 0
        """Storage operations that need the host data; above 0 it must stay."""
        self.write_through_pending_id: int | None = None
        """The backup that has not been acknowledged yet; until then nobody is told of the host copy."""

    def detach(self) -> None:
        """The node is deleted. Who still holds it finds its way back to the tree by `former_parent`."""
        self.former_parent, self.parent = self.parent, None


class MambaNode(TreeNode):
    """A segment that may also hold the recurrent state after its last unit. `lock_ref` locks its KV.

    A node without a state is a tombstone: its KV is of use only on the way to a deeper state.
    """

    __slots__ = (
        "host_mamba_ref_counter",
        "mamba_host_value",
        "mamba_lock_ref",
        "mamba_pending_id",
        "mamba_value",
        "newer",
        "older",
    )

    def __init__(
        self, node_id: int, key: RadixKey, value: IndexArray | None, parent: TreeNode | None, now: int, priority: int
    ) -> None:
        super().__init__(node_id, key, value, parent, now, priority)
        self.mamba_value: IndexArray | None = None
        """[1] slot of the state on the device."""
        self.mamba_lock_ref = 0
        """Users that locked this very node, not one below; above 0 its state must stay."""
        self.mamba_host_value: IndexArray | None = None
        """[1] slot of the state on the host, from the moment a backup is enqueued."""
        self.host_mamba_ref_counter = 0
        """Transfers that need the host slot; above 0 it must stay."""
        self.mamba_pending_id: int | None = None
        """The backup of the state alone that has not been acknowledged yet; until then the host slot is not filled."""
        self.newer: list[MambaNode | None] = [None] * NUM_LRU_LISTS
        """Neighbours in each `LruList`; None: not in that list. So is `older`."""
        self.older: list[MambaNode | None] = [None] * NUM_LRU_LISTS


def hybrid(node: TreeNode) -> MambaNode:
    """The node as what it is in a tree with states. Raises CacheStateError for one of another tree."""
    if not isinstance(node, MambaNode):
        raise CacheStateError(f"node {node.id} is not of a tree with states")
    return node


def iter_nodes(root: TreeNode) -> Iterator[TreeNode]:
    """All nodes below the root, parents before children."""
    pending = list(root.children.values())
    while pending:
        node = pending.pop()
        yield node
        pending.extend(node.children.values())


def compute_node_hash_values(node: TreeNode, page_size: int) -> list[str]:
    """The node's block hashes; computed and kept if not there yet, together with those of its ancestors that lack them,
    from the root down: a chain starts below the root and nowhere else."""
    for missing in _path_down(node, lambda n: n.hash_value is None):
        assert missing.parent is not None
        above = missing.parent.hash_value
        prior = above[-1] if above else None
        missing.hash_value = block_hash_chain(missing.key.raw, page_size, prior, is_bigram=missing.key.is_bigram)
    assert node.hash_value is not None
    return node.hash_value


def compute_node_sequence_hashes(node: TreeNode, page_size: int, seed: int) -> U64Array:
    """The node's sequence hashes, under the same rules. seed: the namespace's, as of `namespace_seed`."""
    for missing in _path_down(node, lambda n: n.sequence_hash is None):
        assert missing.parent is not None
        above = missing.parent.sequence_hash
        parent = int(above[-1]) if above is not None and len(above) else None
        missing.sequence_hash = sequence_hashes(
            missing.key.raw, page_size, seed, parent, is_bigram=missing.key.is_bigram
        )
    assert node.sequence_hash is not None
    return node.sequence_hash


def _path_down(node: TreeNode, wanted: Callable[[TreeNode], bool]) -> list[TreeNode]:
    """The node and the ancestors right above it for which `wanted` holds, upmost first."""
    path = []
    while node.parent is not None and wanted(node):
        path.append(node)
        node = node.parent
    path.reverse()
    return path


def split_node_hash_value(
    child_hash_value: list[str] | None, split_len: int, page_size: int
) -> tuple[list[str] | None, list[str] | None]:
    """Block hashes of the upper and the lower part of a node that is split after `split_len` units, which are whole
    pages. None stays None."""
    assert split_len % page_size == 0, f"split after {split_len} units, page size {page_size}"
    if child_hash_value is None:
        return None, None
    pages = split_len // page_size
    return child_hash_value[:pages], child_hash_value[pages:]


def split_node_sequence_hash(
    child_sequence_hash: U64Array | None, split_len: int, page_size: int
) -> tuple[U64Array | None, U64Array | None]:
    """The same for sequence hashes. Both parts are copies, so that neither keeps the other alive."""
    assert split_len % page_size == 0, f"split after {split_len} units, page size {page_size}"
    if child_sequence_hash is None:
        return None, None
    pages = split_len // page_size
    return child_sequence_hash[:pages].copy(), child_sequence_hash[pages:].copy()


def split_rows(rows: IndexArray | None, split_len: int) -> tuple[IndexArray | None, IndexArray | None]:
    """The same for rows of a tier. Each half owns its memory, so that evicting one gives its memory back."""
    if rows is None:
        return None, None
    return rows[:split_len].copy(), rows[split_len:].copy()
