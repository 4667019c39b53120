"""The tree's side of the storage tier: what is archived, what is prefetched, and what becomes of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from engine_cache.host_tier import HostTier
from engine_cache.key import RadixKey
from engine_cache.node import TreeNode, compute_node_hash_values
from engine_cache.storage.base import HiCacheStorage, PoolName, PoolTransfer, StorageClosedError
from engine_cache.storage.object_names import page_keys
from engine_cache.storage_io import StorageIO
from engine_cache.storage_operations import ArchiveOperation, PrefetchOperation, StorageOperation, StoragePolicy
from engine_cache.types import IndexArray
from kv_events.errors import InvalidValueError
from kv_events.schema import BlockRemoved, BlockStored, StorageMedium

log = logging.getLogger(__name__)

_DETACH_TIMEOUT_S = 10.0
_MOST_LOADED_NOTES = 4_096
_RATE_LIMIT_SHARE = 0.8  # of the rows by which the host is larger than the device


class StorageTier(HostTier):
    """What caches with a store behind their host tier share. All of it runs on the thread that owns the cache.

    A node that is acknowledged on the host is archived. A prompt that is about to run may be prefetched: pages that
    the store holds become nodes on the host. `check_storage_events` takes over what the I/O side has finished.
    """

    storage: StorageIO | None = None
    num_skipped_archives = 0
    """Nodes that were not archived because too much of the host waited for that already, since the cache was made."""

    def reset(self) -> None:
        super().reset()
        if self.storage is not None:
            self.storage.reset()
        self.ongoing_prefetch: dict[str, PrefetchOperation] = {}
        self.ongoing_backup: dict[ArchiveOperation, TreeNode] = {}
        self.archive_tokens_occupied = 0
        """Units on the host that have to stay there until they are archived."""
        self.prefetch_tokens_occupied = 0
        self.prefetch_loaded_tokens_by_reqid: dict[str, int] = {}
        self._announced: dict[str, BlockStored] = {}  # by storage key: what events say is in the store

    def check_hicache_events(self) -> None:
        """Take over whatever has ended: backups, loads, then what the storage side has finished."""
        self.writing_check()
        self.loading_check()
        self.check_storage_events()

    # --- attach and detach ------------------------------------------------------------------------------------------

    def attach_storage_backend(self, backend: HiCacheStorage, policy: StoragePolicy | None = None) -> tuple[bool, str]:
        """Put a store behind an idle cache: whether it is there now, and a word on it. A store that is attached
        already takes the new policy; another one is refused. policy None: the one of a store that is attached, else the
        default."""
        if self.storage is not None and self.storage.backend is not backend:
            return False, "another store is attached, detach it first"
        if self.storage is not None:
            if policy is None:
                return True, "attached already"
            self.storage.policy = policy
            return True, "attached already, policy updated"
        try:
            self.attach_store(backend, policy)
        except Exception as error:  # a store may be anybody's, and the cache works without it
            log.exception("the store does not take the pools")
            return False, f"the store does not take the pools: {error}"
        return True, "attached"

    def attach_store(self, backend: HiCacheStorage, policy: StoragePolicy | None = None) -> None:
        """Put a store behind a cache that has none. Raises what the store raises when it refuses the pools, of which it
        then knows none, and InvalidValueError for pools without bytes, for a cache with a store, and for a store that
        another cache has."""
        if self.storage is not None:
            raise InvalidValueError("store", type(backend).__name__, "a cache without one")
        backend.register_host_pools(self._pools_to_store(backend))
        self.storage = StorageIO(backend, self.controller.engine, self.page_size, policy or StoragePolicy())
        if self._prefetch_capacity() == 0:
            sizes = self.controller.kv.host_pool.size, self.controller.kv.device_allocator.size
            log.warning("nothing can be prefetched: the host has %d rows, the device %d, too few to spare", *sizes)

    def _pools_to_store(self, backend: HiCacheStorage) -> dict[PoolName, Any]:
        """Host pools, the anchor's as KV."""
        pools: dict[PoolName, Any] = {}
        for name, entry in self.controller.entries.items():
            if backend.needs_bytes and not hasattr(entry.host_pool, "get_data_page"):
                kind = type(entry.host_pool).__name__
                raise InvalidValueError(f"host pool {name.value}", kind, "a pool that holds bytes")
            pools[PoolName.KV if entry is self.controller.kv else name] = entry.host_pool
        return pools

    def detach_storage_backend(self) -> tuple[bool, str]:
        """Abort what runs against the store, wait for it and let go of the store, which stays open for another cache;
        whether that worked, and a word on it."""
        if self.storage is None:
            return True, "no store is attached"
        for req_id in list(self.ongoing_prefetch):
            self.release_aborted_request(req_id)
        if not self.controller.engine.drain(_DETACH_TIMEOUT_S):
            return False, f"transfers did not end within {_DETACH_TIMEOUT_S:g} s"
        self.check_storage_events()
        self._withdraw(list(self._announced))
        self.storage.backend.unregister_host_pools()
        self.storage = None
        return True, "detached"

    def clear_storage_backend(self) -> None:
        """Remove every page that this model and rank has in the store."""
        if self.storage is not None:
            self.storage.backend.clear()
            self._withdraw(list(self._announced))

    def check_storage_events(self) -> None:
        """Take over what the I/O side has finished: revoked prefetches, archives, rows that are not needed, and what
        the store has lost."""
        storage = self.storage
        if storage is None:
            return
        while storage.revoked:
            operation = storage.revoked.popleft()
            if self.ongoing_prefetch.get(operation.req_id) is operation:
                operation.take()
                self._leave(operation)
        while storage.archived:
            self._end_archive(storage.archived.popleft())
        while storage.release_queue:
            self._free_host(storage.release_queue.popleft())
        for operation in [operation for operation in storage.prefetches if operation.is_over]:
            storage.prefetches.remove(operation)
            self._free_extras(operation.extras)
        self._withdraw(self._lost_keys(storage.backend))

    def iter_announced(self) -> Iterator[tuple[str, BlockStored]]:
        """Storage key and event of every page that events say is in the store."""
        yield from self._announced.items()

    # --- host to storage --------------------------------------------------------------------------------------------

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

    # --- storage to host --------------------------------------------------------------------------------------------

    def prefetch_from_storage(
        self,
        req_id: str,
        last_host_node: TreeNode,
        new_input_tokens: Sequence[int] | npt.NDArray[np.integer],
        last_hash: str | None = None,
        extra_key: str | None = None,
    ) -> None:
        """Begin to fetch the pages of `new_input_tokens`, which start where the prefix of `last_host_node` ends.

        last_host_node: as a match gave it; if it is the root, extra_key is the namespace. last_hash: its last block
        hash, which is computed if None. Nothing is begun, and nothing said, without a store, for too few units, over
        the rate limit, without room on the host, and when the node has lost its host copy since the match. Raises
        InvalidValueError for a request that has a prefetch already, and for an extra_key or a last_hash that is not the
        node's.
        """
        if req_id in self.ongoing_prefetch:
            raise InvalidValueError("req_id", req_id, "a request without a prefetch in flight")
        is_root = last_host_node is self.root_node
        namespace = extra_key if is_root else last_host_node.key.extra_key
        if extra_key is not None and (extra_key or None) != (namespace or None):
            raise InvalidValueError("extra_key", extra_key, f"that of node {last_host_node.id}, {namespace!r}")
        if self.storage is None or (last_host_node.host_value is None and not is_root):
            return
        key, _ = self._whole_pages(RadixKey(new_input_tokens, namespace), None)
        if len(key) < self.storage.prefetch_threshold or self._is_rate_limited():
            return
        self._begin_prefetch(req_id, last_host_node, key, self._last_hash(last_host_node, last_hash))

    def _begin_prefetch(self, req_id: str, anchor: TreeNode, key: RadixKey, last_hash: str | None) -> None:
        assert self.storage is not None
        with ExitStack() as undo:
            self._hold_host_kv(anchor)
            undo.callback(self._release_host_kv, anchor)
            rows = self._alloc_for_prefetch(len(key))
            if rows is None:
                return
            undo.callback(self._free_host, rows)
            extras = self._prefetch_extras(anchor, len(rows))
            if extras is None:
                return
            undo.callback(self._free_extras, extras)
            operation = PrefetchOperation(req_id, anchor, key[: len(rows)], last_hash, rows, extras)
            self._hold_extras(operation, anchor)
            undo.callback(self._release_extras, operation, anchor)
            self.storage.prefetch(operation)
            undo.pop_all()
        self.ongoing_prefetch[req_id] = operation
        self.prefetch_tokens_occupied += len(operation.key)

    def _is_rate_limited(self) -> bool:
        return self.prefetch_tokens_occupied >= self._prefetch_capacity()

    def _prefetch_capacity(self) -> int:
        """Units that prefetches may occupy on the host at a time."""
        kv = self.controller.kv
        return int(_RATE_LIMIT_SHARE * (kv.host_pool.size - kv.device_allocator.size))

    def _last_hash(self, anchor: TreeNode, given: str | None) -> str | None:
        hashes = compute_node_hash_values(anchor, self.page_size) if anchor is not self.root_node else []
        last_hash = hashes[-1] if hashes else None
        if given is not None and given != last_hash:
            raise InvalidValueError("last_hash", given, f"that of node {anchor.id}, {last_hash}")
        return last_hash

    def _alloc_for_prefetch(self, length: int) -> IndexArray | None:
        """Host rows for so many units or, if eviction does not make that much room, for as many pages as are free;
        None when those are not worth it."""
        assert self.storage is not None
        pool = self.controller.kv.host_pool
        rows = pool.alloc(length)
        if rows is None:
            self.evict_host(length)
            rows = pool.alloc(length)
        if rows is None:
            available = pool.available_size()
            length = available - available % self.page_size
            if length >= self.storage.prefetch_threshold:
                rows = pool.alloc(length)
        return rows

    def _prefetch_extras(self, anchor: TreeNode, num_units: int) -> list[PoolTransfer] | None:
        """Sidecar state that is fetched along with so many units, with host rows; None: there is no room."""
        return self._get_extra_pools()

    def check_prefetch_progress(self, req_id: str) -> bool:
        """Whether the request need not wait any more. The first time that is so, what has arrived is put into the
        tree."""
        operation = self.ongoing_prefetch.get(req_id)
        if operation is None:
            return True
        assert self.storage is not None
        if not operation.may_finish(self.storage.policy):
            return False
        rows = operation.take()
        try:
            matched = self._insert_helper_host(operation, rows)
        finally:
            self._leave(operation)
        self._note_loaded(req_id, len(rows) - matched)
        return True

    def _note_loaded(self, req_id: str, num_units: int) -> None:
        """For `pop_prefetch_loaded_tokens`. Nobody has to ask, so the oldest notes go."""
        noted = self.prefetch_loaded_tokens_by_reqid
        noted.pop(req_id, None)
        if num_units > 0:
            noted[req_id] = num_units
        if len(noted) > _MOST_LOADED_NOTES:
            del noted[next(iter(noted))]

    def pop_prefetch_loaded_tokens(self, req_id: str) -> int:
        """Units that a prefetch has added to the tree; told once, 0 for a request that had none, or whose prefetch
        ended more than 4,096 such prefetches ago."""
        return self.prefetch_loaded_tokens_by_reqid.pop(req_id, 0)

    def release_aborted_request(self, req_id: str) -> None:
        """Give up the prefetch of a request that will not run, if it has one."""
        self.prefetch_loaded_tokens_by_reqid.pop(req_id, None)
        operation = self.ongoing_prefetch.get(req_id)
        if operation is not None:
            self._free_host(operation.take())
            self._leave(operation)

    def _leave(self, operation: PrefetchOperation) -> None:
        """The tree is through with a prefetch whose rows it has taken."""
        del self.ongoing_prefetch[operation.req_id]
        self.prefetch_tokens_occupied -= len(operation.key)
        self._release_extras(operation, operation.anchor)
        self._release_host_kv(operation.anchor)

    def _free_host(self, rows: IndexArray | None) -> None:
        if rows is not None and len(rows):
            self.controller.kv.host_pool.free(rows)

    def _free_extras(self, extras: Iterable[PoolTransfer]) -> None:
        for extra in extras:
            if extra.host_indices is not None:
                self.controller.entry(extra.name).host_pool.free(extra.host_indices)

    # --- what has arrived -------------------------------------------------------------------------------------------

    def _insert_helper_host(self, operation: PrefetchOperation, rows: IndexArray) -> int:
        """Hang fetched pages below the anchor: what is in the tree already is freed, or becomes the host copy of a node
        that had none; the rest is one new node on the host. The units that were in the tree. If that fails, the rows
        that the tree has not taken are freed."""
        if not len(rows):
            return 0
        key, node, done = operation.key[: len(rows)], operation.anchor, 0
        with ExitStack() as undo:
            undo.callback(lambda: self._free_host(rows[done:]))
            self._settle(node)
            if node.host_value is None and node is not self.root_node:
                return len(rows)  # its own backup has failed, so nothing may hang below it on the host
            while done < len(key):
                child = node.children.get(key.page_key(self.page_size, done))
                if child is None:
                    break
                shared = key.match(child.key, self.page_size, done)
                if shared < len(child.key):
                    child = self._split_node(child, shared)
                self._touch([child])
                self._settle(child)
                self._adopt_or_free(child, rows[done : done + shared])
                node, done = child, done + shared
            if done < len(key):
                hashes = operation.hashes[done // self.page_size : len(key) // self.page_size]
                node = self._add_host_leaf(node, key[done:], rows[done:], hashes)
            undo.pop_all()
        self._take_extras(operation, node)
        return done

    def _take_extras(self, operation: PrefetchOperation, end: TreeNode) -> None:
        """Give the node at which the fetched prefix ends the sidecar state that was read for it."""

    def _settle(self, node: TreeNode) -> None:
        """Nothing may be told of the host below a node whose own copy has not been acknowledged: wait for it."""
        if node.write_through_pending_id is not None:
            self.writing_check(write_back=True)

    def _adopt_or_free(self, node: TreeNode, rows: IndexArray) -> None:
        if node.host_value is not None:
            self._free_host(rows)
        else:
            self._record_store_event(node, StorageMedium.CPU)  # before anything changes: naming the pages may fail
            node.host_value = rows.copy()

    def _add_host_leaf(self, parent: TreeNode, key: RadixKey, rows: IndexArray, hashes: list[str]) -> TreeNode:
        leaf = self._new_node(key, None, parent, parent.priority)
        leaf.host_value, leaf.hash_value = rows.copy(), hashes
        self._record_store_event(leaf, StorageMedium.CPU)  # before anything changes, as above
        parent.children[key.page_key(self.page_size)] = leaf
        self._update_leaf(leaf)
        self._update_leaf(parent)
        return leaf
