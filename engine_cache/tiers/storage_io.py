"""The I/O side of the storage tier: prefetches (storage to host) and archives (host to storage), batch by batch.

An operation is a generator that pauses after each batch. Each batch is a job of its own in a lane of the copy engine,
so operations alternate. Jobs touch pools, the storage backend and their operation, never the tree. An exception ends
the operation, is logged and counted; the operation is acknowledged nevertheless.

The backend never holds a KV page without the sidecar pages on its rows: those are written first, and a page counts as
read when both have arrived.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from threading import Lock

from engine_cache.storage.base import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransfer, num_leading
from engine_cache.storage.object_names import page_keys
from engine_cache.storage.operations import ArchiveOperation, PrefetchOperation, StoragePolicy
from engine_cache.tiers.copying import Lane
from engine_cache.tiers.transfer import HiCacheController
from engine_cache.types import IndexArray, no_indices
from kv_events.hashing import block_hash_chain

logger = logging.getLogger(__name__)


class StorageIO:
    """Runs operations against one storage backend. `prefetch`, `archive` and `reset` belong to the tree's thread."""

    def __init__(self, backend: HiCacheStorage, controller: HiCacheController, policy: StoragePolicy) -> None:
        self.backend = backend
        self.policy = policy
        self.archived: deque[ArchiveOperation] = deque()
        """Archives that have ended, successful or not."""
        self.prefetches: list[PrefetchOperation] = []
        """Prefetches that the tree has not yet removed as finished."""
        self.num_errors = 0
        """Operations that ended with an exception."""
        self._group = controller.group
        self._engine = controller.engine
        self._page_size = controller.group.page_size
        self._errors_lock = Lock()  # guards changes of num_errors

    @property
    def prefetch_threshold(self) -> int:
        """Units below which a prefetch is not started, or not continued after the lookup."""
        return max(self.policy.prefetch_threshold, self._page_size)

    def reset(self) -> None:
        self.archived.clear()
        self.prefetches.clear()

    def prefetch(self, operation: PrefetchOperation) -> None:
        """Start a prefetch. If the engine raises an error, the error is passed on and nothing is started."""
        self._submit(Lane.PREFETCH, self._fetch(operation), operation.end)
        self.prefetches.append(operation)

    def _fetch(self, operation: PrefetchOperation) -> Iterator[None]:
        """Look the pages up, then read KV with the sidecar pages on its rows, then the other sidecars."""
        hit_units = self._find(operation)
        if hit_units < self.prefetch_threshold:
            return
        operation.cut_to_hit(hit_units)
        yield
        done = 0
        while len(rows := operation.next_batch(self.policy.batch_pages * self._page_size)):
            keys = operation.keys[done : done + len(rows) // self._page_size]
            arrived = self._fetch_pages(operation, keys, rows)
            if not operation.advance(arrived * self._page_size) or arrived < len(keys):
                return
            done += arrived
            yield
        for extra in operation.extras:
            keys = operation.keys[:done]
            if extra.hit_policy is PoolHitPolicy.TRAILING_PAGES:
                keys = keys[-max(1, len(extra.keys or ())) :]
            for _, batch in self._batches(extra.name, keys, extra.host_indices):
                if not operation.advance(0):
                    return
                operation.extra_pool_hit_pages[extra.name] += sum(self.backend.batch_get_v2([batch])[extra.name])
                yield

    def _find(self, operation: PrefetchOperation) -> int:
        key = operation.key
        operation.hashes = block_hash_chain(key.raw, self._page_size, operation.last_hash, is_bigram=key.is_bigram)
        operation.keys = keys = page_keys(operation.hashes, key.extra_key)
        extras = [*operation.extras, *self._shared(keys, no_indices())]
        pages = self.backend.batch_exists_v2(keys, extras).kv_hit_pages if extras else self.backend.batch_exists(keys)
        return pages * self._page_size

    def _fetch_pages(self, operation: PrefetchOperation, keys: list[str], rows: IndexArray) -> int:
        """Read KV pages and the sidecar pages on their rows. Return the number of complete leading pages."""
        arrived = num_leading(self.backend.batch_get_v1(keys, rows))
        for extra in self._shared(keys[:arrived], rows[: arrived * self._page_size]):
            arrived = min(arrived, num_leading(self.backend.batch_get_v2([extra])[extra.name]))
            operation.extra_pool_hit_pages[extra.name] += arrived
        return arrived

    def archive(self, operation: ArchiveOperation) -> None:
        """Start an archive. It appears in `archived` when it ends.

        If the engine raises an error, the error is passed on and nothing is started.
        """
        self._submit(Lane.ARCHIVE, self._store(operation), partial(self.archived.append, operation))

    def _store(self, operation: ArchiveOperation) -> Iterator[None]:
        """Write sidecars with rows of their own, then KV after the sidecar pages on its rows.

        KV pages whose sidecar is needed on every page and was not stored are dropped from the operation.
        """
        for extra in operation.extras:
            for first, batch in self._batches(extra.name, extra.keys or [], extra.host_indices):
                stored = self.backend.batch_set_v2([batch])[extra.name]
                if extra.hit_policy is PoolHitPolicy.ALL_PAGES and not all(stored):
                    del operation.keys[first + num_leading(stored) :]
                yield
        for first, batch in self._batches(PoolName.KV, operation.keys, operation.host_indices):
            if first:
                yield
            num_pages = len(batch.keys or ())
            operation.completed_pages += self._store_pages(batch)
            if operation.completed_pages < first + num_pages:
                return

    def _store_pages(self, kv: PoolTransfer) -> int:
        """Write KV pages after the sidecar pages on their rows. Return the number of complete leading pages."""
        assert kv.keys is not None
        assert kv.host_indices is not None
        ready = len(kv.keys)
        for extra in self._shared(kv.keys, kv.host_indices):
            ready = min(ready, num_leading(self.backend.batch_set_v2([extra])[extra.name]))
        return num_leading(self.backend.batch_set_v1(kv.keys[:ready], kv.host_indices[: ready * self._page_size]))

    def _shared(self, keys: list[str], host_indices: IndexArray) -> list[PoolTransfer]:
        """Return the transfers of the sidecars on KV's rows that accompany these pages of KV."""
        return [PoolTransfer(entry.name, host_indices, keys=keys) for entry in self._group.sharing if keys]

    def _batches(self, name: PoolName, keys: list[str], rows: IndexArray | None) -> Iterator[tuple[int, PoolTransfer]]:
        assert rows is not None
        page_size = self._group.entry(name).host_pool.page_size
        for first in range(0, len(keys), self.policy.batch_pages):
            part = keys[first : first + self.policy.batch_pages]
            yield first, PoolTransfer(name, rows[first * page_size : (first + len(part)) * page_size], keys=part)

    def _submit(self, lane: Lane, batches: Iterator[None], end: Callable[[], object]) -> None:
        self._engine.submit(lane, [lambda: self._run(lane, batches, end)])

    def _run(self, lane: Lane, batches: Iterator[None], end: Callable[[], object]) -> None:
        """One job: process a batch, then queue the next one, or end the operation."""
        try:
            for _ in batches:
                self._submit(lane, batches, end)
                return
        except Exception:
            logger.exception("a storage operation failed")
            with self._errors_lock:
                self.num_errors += 1
        end()
