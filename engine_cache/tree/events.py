"""From a change of a tree to an event: the half of the contract that every cache shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine_cache.tree.key import RadixKey
from engine_cache.tree.node import TreeNode, compute_node_hash_values, compute_node_sequence_hashes, iter_nodes
from kv_events.errors import InvalidValueError
from kv_events.hash_seed import process_seed
from kv_events.hashing import U64Array, hash_str_to_int64, hash_strs_to_int64
from kv_events.schema import AllBlocksCleared, BlockRemoved, BlockStored, EngineEvent, StorageMedium, TokenIds

LAST_PAGE = slice(-1, None)
_ALL_PAGES = slice(None)


class ResidentPage(NamedTuple):
    """One page that a cache holds."""

    node: TreeNode
    page_index: int
    """Inside the node."""
    block_hash: int
    parent_block_hash: int | None
    token_ids: TokenIds
    extra_key: str | None
    sequence_hash: int


class KVCacheEventMixin:
    """Records what becomes and ceases to be resident. Stands before `BasePrefixCache` in the bases of a cache, whose
    `take_events` would win otherwise. Everything runs on the thread that owns the cache.

    Needs of its host the attributes below. With events off nothing is recorded and no hash is computed.
    """

    enable_kv_cache_events: bool
    kv_event_queue: list[EngineEvent]
    page_size: int
    root_node: TreeNode
    seed_of_extra_key: Callable[[str], int]
    """Seed of a namespace's local hashes, see `namespace_seed`."""
    emit_group_events: bool
    group_event_queues: dict[str, list[EngineEvent]]
    """By group."""
    event_groups: tuple[str, ...] = ()
    """What the host holds beside full KV, by the names of `kv_events.streams`."""

    def take_events(self) -> list[EngineEvent]:
        """All events since the last call, oldest first."""
        if not self.enable_kv_cache_events:
            return []
        events, self.kv_event_queue = self.kv_event_queue, []
        return events

    def take_group_events(self) -> dict[str, list[EngineEvent]]:
        """The same of each of `event_groups`: at which pages' ends a state lies, which pages have their window's KV.

        For a stream of its own each. Without `emit_group_events` there are none.
        """
        taken, self.group_event_queues = self.group_event_queues, {group: [] for group in self.group_event_queues}
        return taken

    def iter_resident(self, medium: StorageMedium) -> Iterator[ResidentPage]:
        """Every page resident on `medium`, the device or the host, parents before children. The tree must not change
        meanwhile. Hashes that are not there yet are computed and kept. Raises InvalidValueError for another medium."""
        if medium not in (StorageMedium.GPU, StorageMedium.CPU):
            raise InvalidValueError("medium", medium, "GPU or CPU_PINNED; pages of a store are in iter_announced()")
        return self._iter_resident(medium)

    def _iter_resident(self, medium: StorageMedium) -> Iterator[ResidentPage]:
        for node in iter_nodes(self.root_node):
            if not self._is_resident(node, medium):
                continue
            names = self._block_hashes(node).tolist()
            parents = [self._parent_block_hash(node), *names]
            sequence = self._sequence_hashes(node).tolist()
            for i, tokens in enumerate(node.key.pages(self.page_size)):
                yield ResidentPage(node, i, names[i], parents[i], tokens, node.key.extra_key, sequence[i])

    def _is_resident(self, node: TreeNode, medium: StorageMedium) -> bool:
        if medium is StorageMedium.GPU:
            return node.value is not None
        return node.host_value is not None and node.write_through_pending_id is None

    def _record_store_event(self, node: TreeNode, medium: StorageMedium | None = None) -> None:
        """One `BlockStored` a page, in page order. medium None: GPU."""
        if self.enable_kv_cache_events:
            self.kv_event_queue.extend(self._store_events(node, medium or StorageMedium.GPU))

    def _store_events(self, node: TreeNode, medium: StorageMedium) -> Iterator[BlockStored]:
        names = self._block_hashes(node)
        parents = [self._parent_block_hash(node), *names.tolist()]
        # The hot path of an insert: one conversion a node, and map() keeps the interpreter out of the loop over pages.
        return map(
            BlockStored,
            names.reshape(-1, 1).tolist(),
            parents,
            node.key.pages(self.page_size),
            repeat(self.page_size),
            repeat(None),
            repeat(medium),
            repeat(node.key.extra_key),
            _words(self._sequence_hashes(node)),
        )

    def _record_remove_event(self, node: TreeNode, medium: StorageMedium | None = None) -> None:
        """One `BlockRemoved` a page, in page order, under the names the pages were stored with. medium None: GPU."""
        if self.enable_kv_cache_events:
            self.kv_event_queue.extend(self._remove_events(node, medium or StorageMedium.GPU))

    def _remove_events(
        self, node: TreeNode, medium: StorageMedium, pages: slice = _ALL_PAGES
    ) -> Iterator[BlockRemoved]:
        names = self._block_hashes(node, pages).reshape(-1, 1).tolist()
        return map(BlockRemoved, names, repeat(medium), repeat(node.key.extra_key))

    def _record_all_cleared_event(self) -> None:
        if self.enable_kv_cache_events:
            self.kv_event_queue.append(AllBlocksCleared())
        for queue in self.group_event_queues.values():
            queue.append(AllBlocksCleared())

    def _record_group_store(self, group: str, node: TreeNode, medium: StorageMedium, pages: slice) -> None:
        """What the group has at these pages of the node became resident on `medium`. Parents are full KV's business."""
        if self.emit_group_events:
            names = self._block_hashes(node, pages)
            self.group_event_queues[group].extend(
                map(
                    BlockStored,
                    names.reshape(-1, 1).tolist(),
                    repeat(None),
                    repeat([]),
                    repeat(self.page_size),
                    repeat(None),
                    repeat(medium),
                    repeat(node.key.extra_key),
                    _words(self._sequence_hashes(node)[pages]),
                )
            )

    def _record_group_remove(self, group: str, node: TreeNode, medium: StorageMedium, pages: slice) -> None:
        """It ceased to be."""
        if self.emit_group_events:
            self.group_event_queues[group].extend(self._remove_events(node, medium, pages))

    def _parent_block_hash(self, node: TreeNode) -> int | None:
        above = node.parent.hash_value if node.parent is not None else None
        return hash_str_to_int64(above[-1]) if above else None

    def _block_hashes(self, node: TreeNode, pages: slice = _ALL_PAGES) -> npt.NDArray[np.int64]:
        return hash_strs_to_int64(compute_node_hash_values(node, self.page_size)[pages])

    def _sequence_hashes(self, node: TreeNode) -> U64Array:
        return compute_node_sequence_hashes(node, self.page_size, self._seed(node.key))

    def _seed(self, key: RadixKey) -> int:
        return process_seed() if key.extra_key is None else self.seed_of_extra_key(key.extra_key)


def _words(hashes: U64Array) -> list[bytes]:
    """Eight little-endian bytes a hash; one C call, five times as fast as slicing."""
    words: list[bytes] = hashes.astype("<u8", copy=False).view("V8").tolist()
    return words
