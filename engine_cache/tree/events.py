"""Events of a radix tree: pages that are stored on a tier, and pages that are removed from it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine_cache.tree.node import TreeNode, compute_node_hash_values, compute_node_sequence_hashes, iter_nodes
from engine_cache.tree.tree import RadixTree
from kv_events.errors import InvalidValueError
from kv_events.hash_seed import process_seed
from kv_events.hashing import U64Array, hash_str_to_int64, hash_strs_to_int64, namespace_seed
from kv_events.schema import AllBlocksCleared, BlockRemoved, BlockStored, EngineEvent, StorageMedium, TokenIds

LAST_PAGE = slice(-1, None)
ALL_PAGES = slice(None)


def salted_seed(extra_key: str) -> int:
    """Return the seed of a namespace that is used as a cache salt. This is the default `seed_of_extra_key`."""
    return namespace_seed(cache_salt=extra_key)


class ResidentPage(NamedTuple):
    """A page that a cache holds on a tier."""

    node: TreeNode
    page_index: int
    block_hash: int
    parent_block_hash: int | None
    token_ids: TokenIds
    extra_key: str | None
    sequence_hash: int


class EventRecorder:
    """The event queues of one cache. Belongs to the thread of the cache.

    While `enabled` is false, nothing is recorded and no hash is computed. groups: names of the groups besides full KV
    that have a queue of their own; see `kv_events.streams`.
    """

    def __init__(
        self, page_size: int, *, enabled: bool, groups: Sequence[str], seed_of_extra_key: Callable[[str], int]
    ) -> None:
        self.enabled = enabled
        self.queue: list[EngineEvent] = []
        self.group_queues: dict[str, list[EngineEvent]] = {group: [] for group in groups}
        self._page_size = page_size
        self._seed_of_extra_key = seed_of_extra_key

    def store(self, node: TreeNode, medium: StorageMedium | None = None) -> None:
        """Record one `BlockStored` per page, in page order. medium: GPU by default."""
        if self.enabled:
            self.queue.extend(self.store_events(node, medium or StorageMedium.GPU))

    def store_events(self, node: TreeNode, medium: StorageMedium) -> Iterator[BlockStored]:
        """Return the events that `store` records."""
        hashes = self._block_hashes(node)
        parents = [_parent_block_hash(node), *hashes.tolist()]
        return self._stores(node, medium, hashes, parents, node.key.pages(self._page_size), ALL_PAGES)

    def _stores(
        self,
        node: TreeNode,
        medium: StorageMedium,
        hashes: npt.NDArray[np.int64],
        parents: Iterable[int | None],
        tokens: Iterable[TokenIds],
        pages: slice,
    ) -> Iterator[BlockStored]:
        # Hot path of inserts: one conversion per node, and map() keeps the interpreter out of the loop over pages.
        return map(
            BlockStored,
            hashes.reshape(-1, 1).tolist(),
            parents,
            tokens,
            repeat(self._page_size),
            repeat(None),
            repeat(medium),
            repeat(node.key.extra_key),
            # eight little-endian bytes per hash, with one C call that is five times as fast as slicing
            self._sequence_hashes(node)[pages].astype("<u8", copy=False).view("V8").tolist(),
        )

    def remove(self, node: TreeNode, medium: StorageMedium | None = None) -> None:
        """Record one `BlockRemoved` per page, in page order. medium: GPU by default."""
        if self.enabled:
            self.queue.extend(self._remove_events(node, medium or StorageMedium.GPU))

    def _remove_events(self, node: TreeNode, medium: StorageMedium, pages: slice = ALL_PAGES) -> Iterator[BlockRemoved]:
        hashes = self._block_hashes(node, pages).reshape(-1, 1).tolist()
        return map(BlockRemoved, hashes, repeat(medium), repeat(node.key.extra_key))

    def all_cleared(self) -> None:
        if self.enabled:
            self.queue.append(AllBlocksCleared())
        for queue in self.group_queues.values():
            queue.append(AllBlocksCleared())

    def group_store(self, group: str, node: TreeNode, medium: StorageMedium, pages: slice) -> None:
        """Record that these pages of the node have data of the group on `medium`.

        The events do not name parents; those of full KV do.
        """
        if group in self.group_queues:
            hashes = self._block_hashes(node, pages)
            self.group_queues[group].extend(self._stores(node, medium, hashes, repeat(None), repeat([]), pages))

    def group_remove(self, group: str, node: TreeNode, medium: StorageMedium, pages: slice) -> None:
        """Record that these pages of the node have lost their data of the group on `medium`."""
        if group in self.group_queues:
            self.group_queues[group].extend(self._remove_events(node, medium, pages))

    def resident(self, root: TreeNode, medium: StorageMedium) -> Iterator[ResidentPage]:
        """Yield every page below the root that is resident on the device or the host."""
        for node in iter_nodes(root):
            is_pending = medium is StorageMedium.CPU and node.write_through_pending_id is not None
            if is_pending or (node.value if medium is StorageMedium.GPU else node.host_value) is None:
                continue
            hashes = self._block_hashes(node).tolist()
            parents, sequence = [_parent_block_hash(node), *hashes], self._sequence_hashes(node).tolist()
            for i, tokens in enumerate(node.key.pages(self._page_size)):
                yield ResidentPage(node, i, hashes[i], parents[i], tokens, node.key.extra_key, sequence[i])

    def _block_hashes(self, node: TreeNode, pages: slice = ALL_PAGES) -> npt.NDArray[np.int64]:
        return hash_strs_to_int64(compute_node_hash_values(node, self._page_size)[pages])

    def _sequence_hashes(self, node: TreeNode) -> U64Array:
        key = node.key.extra_key
        seed = process_seed() if key is None else self._seed_of_extra_key(key)
        return compute_node_sequence_hashes(node, self._page_size, seed)


class KVCacheEventMixin:
    """The event interface of a cache.

    It must precede `BasePrefixCache` in the bases of a class, so that its `take_events` is used.
    """

    events: EventRecorder
    tree: RadixTree
    event_groups: tuple[str, ...] = ()
    """Names of the groups that the cache holds besides full KV; see `kv_events.streams`."""

    @property
    def root_node(self) -> TreeNode:
        return self.tree.root

    @property
    def enable_kv_cache_events(self) -> bool:
        return self.events.enabled

    @enable_kv_cache_events.setter
    def enable_kv_cache_events(self, enabled: bool) -> None:
        self.events.enabled = enabled

    @property
    def kv_event_queue(self) -> list[EngineEvent]:
        return self.events.queue

    def take_events(self) -> list[EngineEvent]:
        """Return all events since the last call, oldest first."""
        if not self.events.enabled:
            return []
        events, self.events.queue = self.events.queue, []
        return events

    def take_group_events(self) -> dict[str, list[EngineEvent]]:
        """Return all events since the last call for each of `event_groups`. Empty without `emit_group_events`.

        Events of recurrent states report the pages at whose ends there is a state. Events of sliding windows report the
        pages that have window KV.
        """
        taken = self.events.group_queues
        self.events.group_queues = {group: [] for group in taken}
        return taken

    def iter_resident(self, medium: StorageMedium) -> Iterator[ResidentPage]:
        """Yield every page resident on `medium`, the device or the host, parents before children.

        The tree must not change during the iteration. Missing hashes are computed and stored. Raises InvalidValueError
        for another medium.
        """
        if medium not in (StorageMedium.GPU, StorageMedium.CPU):
            raise InvalidValueError("medium", medium, "GPU or CPU_PINNED; pages of a store are in iter_announced()")
        return self.events.resident(self.root_node, medium)


def _parent_block_hash(node: TreeNode) -> int | None:
    above = node.parent.hash_value if node.parent is not None else None
    return hash_str_to_int64(above[-1]) if above else None
