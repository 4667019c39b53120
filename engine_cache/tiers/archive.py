"""Archives: copies of host pages in a store, and what the router is told of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack

from engine_cache.storage.base import HiCacheStorage, PoolTransfer, StorageClosedError
from engine_cache.storage.object_names import page_keys
from engine_cache.storage_io import StorageIO
from engine_cache.storage_operations import ArchiveOperation, StorageOperation
from engine_cache.tiers.host_tier import HostTier
from engine_cache.tree.node import TreeNode, compute_node_hash_values
from kv_events.schema import BlockRemoved, BlockStored


class Archives(HostTier):
    """What goes from the host to the store. A node that is acknowledged on the host is archived."""

    storage: StorageIO | None = None
    num_skipped_archives = 0
    """Nodes that were not archived because too much of the host waited for that already, since the cache was made."""

    def reset(self) -> None:
        super().reset()
        self.ongoing_backup: dict[ArchiveOperation, TreeNode] = {}
        self.archive_tokens_occupied = 0
        """Units on the host that have to stay there until they are archived."""
        self._announced: dict[str, BlockStored] = {}  # by storage key: what events say is in the store

    def _backed_up(self, node: TreeNode) -> None:
        super()._backed_up(node)
        if self.storage is not None:
            self.write_backup_storage(node)

    def write_backup_storage(self, node: TreeNode) -> None:
        """Archive a node that is on the host, unless too much waits for that already."""
        assert self.storage is not None
        assert node.host_value is not None
        keys = page_keys(compute_node_hash_values(node, self.page_size), node.key.extra_key)
        operation = ArchiveOperation(node, keys, node.host_value, self._archive_extras(node))
        if self.storage.policy.emit_storage_events and self.enable_kv_cache_events:
            operation.events = list(self._store_events(node, self.storage.backend.medium))
        self._archive(operation)

    def _archive(self, operation: ArchiveOperation) -> None:
        """Begin, unless too much waits for that already. The node stays on the host until the store has answered."""
        assert self.storage is not None
        if self.archive_tokens_occupied >= self.storage.policy.archive_share * self.controller.kv.host_pool.size:
            self.num_skipped_archives += 1
            return
        with ExitStack() as undo:
            self._hold_host_kv(operation.node)
            undo.callback(self._release_host_kv, operation.node)
            self._hold_extras(operation, operation.node)
            undo.callback(self._release_extras, operation, operation.node)
            self.storage.archive(operation)
            undo.pop_all()
        self.ongoing_backup[operation] = operation.node
        operation.num_units = len(operation.node.key)
        self.archive_tokens_occupied += operation.num_units

    def _hold_extras(self, operation: StorageOperation, node: TreeNode) -> None:
        """Keep what the operation needs of the node's sidecar state on the host, until `_release_extras`."""

    def _release_extras(self, operation: StorageOperation, node: TreeNode) -> None:
        """Take one `_hold_extras` back."""

    def _archive_extras(self, node: TreeNode) -> list[PoolTransfer]:
        """Sidecar state that is archived along with the node."""
        return self._get_extra_pools()

    def _end_archive(self, operation: ArchiveOperation) -> None:
        node = self.ongoing_backup.pop(operation)
        self.archive_tokens_occupied -= operation.num_units
        self._release_extras(operation, node)
        self._release_host_kv(node)
        assert self.storage is not None
        for key, event in zip(operation.keys[: operation.completed_pages], operation.events, strict=False):
            if key not in self._announced and self._is_held(key):
                self._announced[key] = event
                self.kv_event_queue.append(event)

    def iter_announced(self) -> Iterator[tuple[str, BlockStored]]:
        """Storage key and event of every page that events say is in the store."""
        yield from self._announced.items()

    def _is_held(self, key: str) -> bool:
        assert self.storage is not None
        try:
            return self.storage.backend.is_held(key)
        except StorageClosedError:
            return False

    def _lost_keys(self, backend: HiCacheStorage) -> list[str]:
        """Pages that the store does not hold any more; a store that was closed holds nothing.

        Asked whether or not pages are announced: a store remembers what it lost until somebody asks.
        """
        try:
            return backend.take_removed()
        except StorageClosedError:
            return list(self._announced)

    def _withdraw(self, keys: Iterable[str]) -> None:
        """Take back what was announced of these pages of the store."""
        for key in keys:
            event = self._announced.pop(key, None)
            if event is not None:
                self.kv_event_queue.append(BlockRemoved(event.block_hashes, event.medium, event.extra_key))
