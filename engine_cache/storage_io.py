"""The I/O side of the storage tier: prefetches (storage to host) and archives (host to storage), batch by batch.

Jobs run in the copy engine's lanes, one batch a job, so operations take turns. They touch pools, the store and the
operations below, never the tree. Whatever goes wrong ends the operation, is logged and counted, and the operation is
acknowledged all the same.
"""

from __future__ import annotations

import logging
from collections import deque
from threading import Lock

from engine_cache.copying import Lane, Step
from engine_cache.storage.base import HiCacheStorage, PoolName
from engine_cache.storage.object_names import page_keys
from engine_cache.storage_operations import ArchiveOperation, PrefetchOperation, StoragePolicy
from engine_cache.transfer import HiCacheController
from engine_cache.types import IndexArray
from kv_events.hashing import block_hash_chain

log = logging.getLogger(__name__)


class StorageIO:
    """Runs operations against one store, and leaves to the controller what belongs to a page. `prefetch`, `archive` and
    `reset` are for the tree's thread."""

    def __init__(self, backend: HiCacheStorage, controller: HiCacheController, policy: StoragePolicy) -> None:
        self.backend = backend
        self.policy = policy
        self.release_queue: deque[IndexArray] = deque()
        """Host rows that nobody needs any more."""
        self.revoked: deque[PrefetchOperation] = deque()
        """Prefetches that found too little."""
        self.archived: deque[ArchiveOperation] = deque()
        """Archives that have ended, well or not."""
        self.prefetches: list[PrefetchOperation] = []
        """Those that are not over, as far as the tree has looked."""
        self._controller = controller
        self._engine = controller.engine
        self._page_size = controller.group.page_size
        self._errors_lock = Lock()  # guards _num_errors
        self._num_errors = 0

    @property
    def num_errors(self) -> int:
        """Operations that an exception ended."""
        with self._errors_lock:
            return self._num_errors

    @property
    def prefetch_threshold(self) -> int:
        """Units below which a prefetch is not begun, or not gone on with."""
        return max(self.policy.prefetch_threshold, self._page_size)

    def reset(self) -> None:
        """Forget all operations. The engine must have been drained."""
        for queue in (self.release_queue, self.revoked, self.archived, self.prefetches):
            queue.clear()

    def owned_rows(self) -> list[IndexArray]:
        """Host rows that prefetches or the release queue own; exact while no job runs."""
        return [*self.release_queue, *(operation.rows() for operation in self.prefetches)]

    def owned_extras(self, name: PoolName) -> list[IndexArray]:
        """The same for the host rows of a sidecar."""
        extras = [extra for operation in self.prefetches for extra in operation.extras if extra.name is name]
        return [extra.host_indices for extra in extras if extra.host_indices is not None]

    # --- storage to host --------------------------------------------------------------------------------------------

    def prefetch(self, operation: PrefetchOperation) -> None:
        """Begin. The operation ends with its rows beyond what arrived in the release queue. Nothing is begun if the
        engine raises."""
        self._engine.submit(Lane.PREFETCH, [lambda: self._query(operation)])
        self.prefetches.append(operation)

    def _query(self, operation: PrefetchOperation) -> None:
        try:
            hit_units = self._find(operation)
        except Exception:
            log.exception("a prefetch query failed")
            self._count_error()
            hit_units = 0
        if hit_units < self.prefetch_threshold:
            self._end(operation)
            self.revoked.append(operation)
            return
        self.release_queue.append(operation.cut_to_hit(hit_units))
        if not self._queue(Lane.PREFETCH, lambda: self._fetch_batch(operation)):
            self._end(operation)

    def _find(self, operation: PrefetchOperation) -> int:
        key = operation.key
        operation.hashes = block_hash_chain(key.raw, self._page_size, operation.last_hash, is_bigram=key.is_bigram)
        operation.keys = page_keys(operation.hashes, key.extra_key)
        return self._controller.find_pages(self.backend, operation) * self._page_size

    def _fetch_batch(self, operation: PrefetchOperation) -> None:
        try:
            more = self._fetch(operation)
        except Exception:
            log.exception("a prefetch failed")
            self._count_error()
            more = False
        if not (more and self._queue(Lane.PREFETCH, lambda: self._fetch_batch(operation))):
            self._end(operation)

    def _fetch(self, operation: PrefetchOperation) -> bool:
        """One batch, of KV while there is some, then of the sidecars; whether there is more to do."""
        start, rows = operation.next_batch(self.policy.batch_pages * self._page_size)
        first, pages = start // self._page_size, len(rows) // self._page_size
        if pages:
            keys = operation.keys[first : first + pages]
            arrived = self._controller.fetch_pages(self.backend, operation, keys, rows)
            return operation.advance(arrived * self._page_size) and arrived == pages
        return operation.advance(0) and self._controller.fetch_extras(
            self.backend, operation, first, self.policy.batch_pages
        )

    def _end(self, operation: PrefetchOperation) -> None:
        self.release_queue.append(operation.end())

    # --- host to storage --------------------------------------------------------------------------------------------

    def archive(self, operation: ArchiveOperation) -> None:
        """Begin. The operation comes back in `archived`. Nothing is begun if the engine raises."""
        self._engine.submit(Lane.ARCHIVE, [lambda: self._archive_batch(operation)])

    def _archive_batch(self, operation: ArchiveOperation) -> None:
        try:
            more = self._store(operation)
        except Exception:
            log.exception("an archive failed")
            self._count_error()
            more = False
        if not (more and self._queue(Lane.ARCHIVE, lambda: self._archive_batch(operation))):
            self.archived.append(operation)

    def _store(self, operation: ArchiveOperation) -> bool:
        """One batch, of the sidecars while there are some, then of KV; whether there is more to do."""
        if self._controller.archive_extras(self.backend, operation, self.policy.batch_pages):
            return True
        first = operation.completed_pages
        keys = operation.keys[first : first + self.policy.batch_pages]
        rows = operation.host_indices[first * self._page_size : (first + len(keys)) * self._page_size]
        stored = self._controller.archive_pages(self.backend, operation, keys, rows)
        operation.completed_pages += stored
        return stored == len(keys) and operation.completed_pages < len(operation.keys)

    def _queue(self, lane: Lane, job: Step) -> bool:
        """Go on with an operation in a job of its own; False: the engine does not take it."""
        try:
            self._engine.submit(lane, [job])
        except Exception:
            log.exception("a storage operation cannot go on")
            self._count_error()
            return False
        return True

    def _count_error(self) -> None:
        with self._errors_lock:
            self._num_errors += 1
