"""The storage tier of a cache: one storage backend behind the host.

    on the host ── archive ──> in storage ── prefetch ──> on the host

A node is archived when its host copy is acknowledged. The pages of a waiting prompt can be prefetched: the pages that
the backend holds become nodes on the host. All methods run on the thread that owns the cache.
"""

import logging
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from engine_cache.components.component import AuxiliaryComponent
from engine_cache.storage.base import HiCacheStorage, PoolName, PoolTransfer, StorageClosedError
from engine_cache.storage.object_names import page_keys
from engine_cache.storage.operations import ArchiveOperation, PrefetchOperation, StoragePolicy
from engine_cache.tiers.host import HostTier
from engine_cache.tiers.storage_io import StorageIO
from engine_cache.tree.key import RadixKey
from engine_cache.tree.node import TreeNode, compute_node_hash_values
from engine_cache.types import IndexArray, no_indices
from kv_events.errors import InvalidValueError
from kv_events.schema import BlockRemoved, BlockStored, StorageMedium

logger = logging.getLogger(__name__)

_DETACH_TIMEOUT_S = 10.0
_RATE_LIMIT_SHARE = 0.8  # of the number of rows by which the host exceeds the device


class StorageTier:
    """A storage backend behind the host tier of a cache.

    Raises InvalidValueError for pools without bytes and for a backend that another cache uses, and the errors of the
    backend if it refuses the pools. In these cases no pool is registered.
    """

    def __init__(self, host: HostTier, backend: HiCacheStorage, policy: StoragePolicy) -> None:
        self.ongoing_archives: dict[ArchiveOperation, TreeNode] = {}
        self.ongoing_prefetches: dict[str, PrefetchOperation] = {}
        self.archive_tokens_occupied = 0
        self.prefetch_tokens_occupied = 0
        self.announced: dict[str, BlockStored] = {}
        """Storage key -> event of every page that events report in storage."""
        self._host = host
        self._leaves = host.leaves
        self._tree = host.device.tree
        self._events = host.device.events
        self._components = host.device.components
        self._controller = host.controller
        backend.register_host_pools(_pools_to_store(host, backend))
        self.io = StorageIO(backend, host.controller, policy)
        host.backups.archive = self.archive
        if self._prefetch_capacity() == 0:
            sizes = self._controller.kv.host_pool.size, self._controller.kv.device_allocator.size
            logger.warning("nothing can be prefetched: the host has %d rows, the device %d, too few to spare", *sizes)

    def clear(self) -> None:
        """Drop all operations. The engine must have been drained."""
        self.ongoing_archives.clear()
        self.ongoing_prefetches.clear()
        self.archive_tokens_occupied = self.prefetch_tokens_occupied = 0
        self.announced.clear()
        self.io.reset()

    def detach(self) -> str | None:
        """Abort the operations of the backend, wait for them and release the backend, which stays open.

        Returns the reason if that failed, otherwise None.
        """
        for req_id in list(self.ongoing_prefetches):
            self.abort_prefetch(req_id)
        if not self._controller.engine.drain(_DETACH_TIMEOUT_S):
            return f"transfers did not end within {_DETACH_TIMEOUT_S:g} s"
        self.check_events()
        self._withdraw(list(self.announced))
        self.io.backend.unregister_host_pools()
        self._host.backups.archive = None
        return None

    def check_events(self) -> None:
        """Process the results of the I/O side: prefetches, archives, and lost pages."""
        io = self.io
        for operation in list(io.prefetches):
            if operation.is_revoked:
                operation.take()
                self._end_prefetch(operation)
            is_over = operation.is_over  # first, because no row becomes unused afterwards
            self._leaves.pool.free(operation.take_unused())
            if is_over:
                io.prefetches.remove(operation)
                self._free_extras(operation.extras)
        while io.archived:
            self._end_archive(io.archived.popleft())
        self._withdraw(self._lost_keys())

    # --- archive ----------------------------------------------------------------------------------------------------

    def archive(self, node: TreeNode, late: Sequence[AuxiliaryComponent] | None = None) -> None:
        """Archive a node that is on the host, which stays there until the archive has ended.

        late: archive only the data of these kinds, which arrived after the KV of the node. Does nothing if too many
        units are waiting to be archived.
        """
        if self.archive_tokens_occupied >= self.io.policy.archive_share * self._controller.kv.host_pool.size:
            self._host.num_skipped_archives += 1
            return
        assert node.host_value is not None
        keys = page_keys(compute_node_hash_values(node, self._tree.page_size), node.key.extra_key)
        parts = [each for each in self._components if each.is_filled_on_host(node)] if late is None else late
        operation = ArchiveOperation(node, keys, node.host_value, [each.archive_transfer(node, keys) for each in parts])
        if late is not None:
            operation.keys, operation.host_indices = [], no_indices()
        elif self.io.policy.emit_storage_events and self._events.enabled:
            operation.events = list(self._events.store_events(node, self.io.backend.medium))
        with self._hold(node) as held:
            self.io.archive(operation)
            operation.held = held.pop_all()
        self.ongoing_archives[operation] = node
        operation.num_units = len(node.key)
        self.archive_tokens_occupied += operation.num_units

    def _end_archive(self, operation: ArchiveOperation) -> None:
        del self.ongoing_archives[operation]
        self.archive_tokens_occupied -= operation.num_units
        operation.held.close()
        for key, event in zip(operation.keys[: operation.completed_pages], operation.events, strict=False):
            if key not in self.announced and self._is_held(key):
                self.announced[key] = event
                self._events.queue.append(event)

    def _hold(self, node: TreeNode) -> ExitStack:
        held = ExitStack()  # of callbacks: a generator would release the node when it is collected after a reset
        self._leaves.hold(node)
        held.callback(self._leaves.release, node)
        for component in self._components:
            ticket = component.acquire(node, on_host=True)
            if ticket is not None:
                held.callback(component.release, ticket)
        return held

    # --- stored pages -----------------------------------------------------------------------------------------------

    def clear_store(self) -> None:
        """Remove every page of this model and rank from the backend."""
        self.io.backend.clear()
        self._withdraw(list(self.announced))

    def _is_held(self, key: str) -> bool:
        try:
            return self.io.backend.is_held(key)
        except StorageClosedError:
            return False

    def _lost_keys(self) -> list[str]:
        """Return the pages that the backend lost. If the backend is closed, all announced pages are lost.

        The backend is called even if no page is announced, because it keeps its list of lost pages until this call.
        """
        try:
            return self.io.backend.take_removed()
        except StorageClosedError:
            return list(self.announced)

    def _withdraw(self, keys: Iterable[str]) -> None:
        """Record the removal of the pages that were announced. Ignores other pages."""
        for key in keys:
            event = self.announced.pop(key, None)
            if event is not None:
                self._events.queue.append(BlockRemoved(event.block_hashes, event.medium, event.extra_key))

    # --- begin a prefetch -------------------------------------------------------------------------------------------

    def prefetch(self, req_id: str, start_node: TreeNode, key: RadixKey, last_hash: str | None) -> None:
        """Start to fetch the pages of `key`. See `TreeCache.prefetch_from_storage`."""
        if len(key) < self.io.prefetch_threshold or self.prefetch_tokens_occupied >= self._prefetch_capacity():
            return
        hashes = compute_node_hash_values(start_node, self._tree.page_size) if start_node.parent is not None else []
        own_hash = hashes[-1] if hashes else None
        if last_hash not in (None, own_hash):
            raise InvalidValueError("last_hash", last_hash, f"that of node {start_node.id}, {own_hash}")
        with self._leaves.held(start_node), ExitStack() as undo:
            rows = self._alloc(len(key))
            if rows is None:
                return
            undo.callback(self._leaves.pool.free, rows)
            extras = self._prefetch_extras(start_node, len(rows))
            if extras is None:
                return
            undo.callback(self._free_extras, extras)
            operation = PrefetchOperation(req_id, start_node, key[: len(rows)], own_hash, rows, extras)
            held = undo.enter_context(self._hold(start_node))
            self.io.prefetch(operation)
            operation.held = held.pop_all()
            undo.pop_all()
        self.ongoing_prefetches[req_id] = operation
        self.prefetch_tokens_occupied += len(operation.key)

    def _prefetch_capacity(self) -> int:
        kv = self._controller.kv
        return int(_RATE_LIMIT_SHARE * (kv.host_pool.size - kv.device_allocator.size))

    def _alloc(self, length: int) -> IndexArray | None:
        """Allocate host rows for `length` units, after an eviction if necessary.

        If there is less room, allocates all free pages, provided that they reach the prefetch threshold. Otherwise
        returns None.
        """
        pool = self._controller.kv.host_pool
        rows = pool.alloc(length)
        if rows is None:
            self._leaves.evict(length)
            rows = pool.alloc(length)
        if rows is None:
            available = pool.available_size()
            length = available - available % self._tree.page_size
            if length >= self.io.prefetch_threshold:
                rows = pool.alloc(length)
        return rows

    def _prefetch_extras(self, start_node: TreeNode, num_units: int) -> list[PoolTransfer] | None:
        extras: list[PoolTransfer] = []
        with ExitStack() as held, ExitStack() as undo:
            for component in self._components:
                transfer = component.prefetch_transfer(start_node, num_units // self._tree.page_size)
                if transfer is None:
                    return None
                ticket = component.acquire(start_node, on_host=True) if component.builds_on_start_node else None
                if ticket is not None:
                    held.callback(component.release, ticket)
                pool = component.entry.host_pool
                rows = component.entry.alloc_host(len(transfer.keys or ()) * pool.page_size)
                if rows is None:
                    return None
                undo.callback(pool.free, rows)
                transfer.host_indices = rows
                extras.append(transfer)
            undo.pop_all()
        return extras

    def _free_extras(self, extras: Iterable[PoolTransfer]) -> None:
        for extra in extras:
            if extra.host_indices is not None:
                self._controller.group.entry(extra.name).host_pool.free(extra.host_indices)

    # --- end a prefetch ---------------------------------------------------------------------------------------------

    def finish_prefetch(self, req_id: str) -> int | None:
        """Insert the pages that a prefetch has fetched. Returns the units that are new to the tree.

        Returns None if the request has to wait.
        """
        operation = self.ongoing_prefetches[req_id]
        if not operation.may_finish(self.io.policy):
            return None
        rows = operation.take()
        try:
            matched = self._insert(operation, rows)
        finally:
            self._end_prefetch(operation)
        return len(rows) - matched

    def abort_prefetch(self, req_id: str) -> None:
        operation = self.ongoing_prefetches.get(req_id)
        if operation is not None:
            self._leaves.pool.free(operation.take())
            self._end_prefetch(operation)

    def _end_prefetch(self, operation: PrefetchOperation) -> None:
        del self.ongoing_prefetches[operation.req_id]
        self.prefetch_tokens_occupied -= len(operation.key)
        operation.held.close()

    def _insert(self, operation: PrefetchOperation, rows: IndexArray) -> int:
        """Insert fetched pages below the start node. Returns the units that were in the tree before.

        Rows of pages that have a host copy are freed. Rows of pages in other existing nodes become their host copy. The
        remaining pages become one new node on the host. After an error, rows that the tree does not own are freed.
        """
        if not len(rows):
            return 0
        tree = self._tree
        key, node, done = operation.key[: len(rows)], operation.start_node, 0
        with ExitStack() as undo:
            undo.callback(lambda: self._leaves.pool.free(rows[done:]))
            self._wait_for_backup(node)
            if node.host_value is None and node is not tree.root:
                return len(rows)  # the backup of the node failed, so no node below it can be on the host
            while done < len(key) and (child := tree.next_on_path(node, key, done)) is not None:
                tree.touch([child])
                self._wait_for_backup(child)
                self._adopt_or_free(child, rows[done : done + len(child.key)])
                node, done = child, done + len(child.key)
            if done < len(key):
                hashes = operation.hashes[done // tree.page_size : len(key) // tree.page_size]
                node = self._add_leaf(node, key[done:], rows[done:], hashes)
            undo.pop_all()
        for transfer in operation.extras:
            for component in self._components:
                if component.pool is transfer.name:
                    component.commit_prefetch(node, transfer, operation)
        return done

    def _wait_for_backup(self, node: TreeNode) -> None:
        """Wait for a pending backup of the node. Before its end, no event may report host pages below the node."""
        if node.write_through_pending_id is not None:
            self._host.backups.wait_for(node.write_through_pending_id)

    def _adopt_or_free(self, node: TreeNode, rows: IndexArray) -> None:
        if node.host_value is not None:
            self._leaves.pool.free(rows)
        else:
            self._events.store(node, StorageMedium.CPU)  # first, because hashing the pages may fail
            node.host_value = rows.copy()

    def _add_leaf(self, parent: TreeNode, key: RadixKey, rows: IndexArray, hashes: list[str]) -> TreeNode:
        leaf = self._tree.new_node(key, None, parent, parent.priority)
        leaf.host_value, leaf.hash_value = rows.copy(), hashes
        self._events.store(leaf, StorageMedium.CPU)  # first, as above
        self._tree.link(leaf)
        return leaf


def _pools_to_store(host: HostTier, backend: HiCacheStorage) -> dict[PoolName, Any]:
    """Return the host pools by name. The pool that owns the rows is registered as KV."""
    pools: dict[PoolName, Any] = {}
    for name, entry in host.controller.group.entries.items():
        if backend.needs_bytes and not hasattr(entry.host_pool, "get_data_page"):
            kind = type(entry.host_pool).__name__
            raise InvalidValueError(f"host pool {name.value}", kind, "a pool that holds bytes")
        pools[PoolName.KV if entry is host.controller.kv else name] = entry.host_pool
    return pools
