"""The I/O side of the storage tier: prefetches (storage to host) and archives (host to storage), batch by batch.

Each batch is a job of its own in a lane of the copy engine, so operations take turns. Jobs touch pools, the storage
backend and their operation, never the tree. An exception ends the operation, is logged and counted; the operation is
acknowledged nevertheless.

The backend never holds a KV page without the sidecar pages on its rows: those are written first, and a page counts as
read when both have arrived.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from threading import Lock

from engine_cache.pools.entry import HostPoolGroup
from engine_cache.storage.base import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransfer, num_leading
from engine_cache.storage.object_names import page_keys
from engine_cache.storage.operations import ArchiveOperation, PrefetchOperation, StorageOperation, StoragePolicy
from engine_cache.tiers.copying import Lane
from engine_cache.tiers.transfer import HiCacheController
from engine_cache.types import IndexArray
from kv_events.errors import InvalidValueError
from kv_events.hashing import block_hash_chain

logger = logging.getLogger(__name__)


class StorageIO:
    """Runs operations against one storage backend. `prefetch`, `archive` and `reset` belong to the tree's thread."""

    def __init__(self, backend: HiCacheStorage, controller: HiCacheController, policy: StoragePolicy) -> None:
        self.backend = backend
        self.policy = policy
        self.release_queue: deque[IndexArray] = deque()
        """Host rows to be freed by the tree."""
        self.revoked: deque[PrefetchOperation] = deque()
        """Prefetches for which the backend held too few pages."""
        self.archived: deque[ArchiveOperation] = deque()
        """Archives that have ended, successful or not."""
        self.prefetches: list[PrefetchOperation] = []
        """Prefetches that the tree has not yet removed as finished."""
        self._group = controller.group
        self._engine = controller.engine
        self._page_size = controller.group.page_size
        self._errors_lock = Lock()  # guards _num_errors
        self._num_errors = 0

    @property
    def num_errors(self) -> int:
        """Operations that ended with an exception."""
        with self._errors_lock:
            return self._num_errors

    @property
    def prefetch_threshold(self) -> int:
        """Units below which a prefetch is not started, or not continued after the lookup."""
        return max(self.policy.prefetch_threshold, self._page_size)

    def reset(self) -> None:
        """Drop all operations. The engine must have been drained."""
        for queue in (self.release_queue, self.revoked, self.archived, self.prefetches):
            queue.clear()

    # --- storage to host --------------------------------------------------------------------------------------------

    def prefetch(self, operation: PrefetchOperation) -> None:
        """Start a prefetch. When it ends, rows of pages that did not arrive are in the release queue.

        If the engine raises an error, the error is passed on and nothing is started.
        """
        self._engine.submit(Lane.PREFETCH, [lambda: self._query(operation)])
        self.prefetches.append(operation)

    def _query(self, operation: PrefetchOperation) -> None:
        try:
            hit_units = self._find(operation)
        except Exception:
            logger.exception("a prefetch query failed")
            self._count_error()
            hit_units = 0
        if hit_units < self.prefetch_threshold:
            self._end(operation)
            self.revoked.append(operation)
            return
        self.release_queue.append(operation.cut_to_hit(hit_units))
        self._go_on(Lane.PREFETCH, lambda: self._fetch(operation), lambda: self._end(operation))

    def _find(self, operation: PrefetchOperation) -> int:
        """Return the units of the leading pages that the backend holds with all their sidecars."""
        key, extras = operation.key, operation.extras
        operation.hashes = block_hash_chain(key.raw, self._page_size, operation.last_hash, is_bigram=key.is_bigram)
        operation.keys = keys = page_keys(operation.hashes, key.extra_key)
        pages = self.backend.batch_exists_v2(keys, extras).kv_hit_pages if extras else self.backend.batch_exists(keys)
        return pages * self._page_size

    def _fetch(self, operation: PrefetchOperation) -> bool:
        """Read one batch: KV first, then sidecars with rows of their own. Return whether there is more to read."""
        start, rows = operation.next_batch(self.policy.batch_pages * self._page_size)
        first, pages = start // self._page_size, len(rows) // self._page_size
        if not pages:
            return operation.advance(0) and self._fetch_extras(operation, first)
        arrived = self._fetch_pages(operation, operation.keys[first : first + pages], rows)
        return operation.advance(arrived * self._page_size) and arrived == pages

    def _fetch_pages(self, operation: PrefetchOperation, keys: list[str], rows: IndexArray) -> int:
        """Read KV pages and the sidecar pages on their rows. Return the number of complete leading pages."""
        arrived = num_leading(self.backend.batch_get_v1(keys, rows))
        hits, rows = operation.extra_pool_hit_pages, rows[: arrived * self._page_size]
        for extra in shared_transfers(self._group, operation, keys[:arrived], rows):
            arrived = min(arrived, num_leading(self.backend.batch_get_v2([extra])[extra.name]))
            hits[extra.name] = hits.get(extra.name, 0) + arrived
        return arrived

    def _fetch_extras(self, operation: PrefetchOperation, hit_pages: int) -> bool:
        """Read one batch of sidecars for a prefix of `hit_pages` pages. False if none is left."""
        aimed = [_aimed(extra, operation.keys[:hit_pages]) for extra in _own(self._group, operation)]
        batch = _next_batch(aimed, operation.extra_pages, self.policy.batch_pages)
        if batch is None:
            return False
        _, extra = batch
        done = self.backend.batch_get_v2([extra])[extra.name]
        operation.extra_pages += len(done)
        hits = operation.extra_pool_hit_pages
        hits[extra.name] = hits.get(extra.name, 0) + sum(done)
        return True

    def _end(self, operation: PrefetchOperation) -> None:
        self.release_queue.append(operation.end())

    # --- host to storage --------------------------------------------------------------------------------------------

    def archive(self, operation: ArchiveOperation) -> None:
        """Start an archive. It appears in `archived` when it ends.

        If the engine raises an error, the error is passed on and nothing is started.
        """
        end = partial(self.archived.append, operation)
        self._engine.submit(Lane.ARCHIVE, [lambda: self._run(Lane.ARCHIVE, lambda: self._store(operation), end)])

    def _store(self, operation: ArchiveOperation) -> bool:
        """Write one batch: sidecars with rows of their own first, then KV. Return whether there is more to write."""
        if self._store_extras(operation):
            return True
        first = operation.completed_pages
        keys = operation.keys[first : first + self.policy.batch_pages]
        rows = operation.host_indices[first * self._page_size : (first + len(keys)) * self._page_size]
        stored = self._store_pages(operation, keys, rows)
        operation.completed_pages += stored
        return stored == len(keys) and operation.completed_pages < len(operation.keys)

    def _store_pages(self, operation: ArchiveOperation, keys: list[str], rows: IndexArray) -> int:
        """Write KV pages after the sidecar pages on their rows. Return the number of complete leading pages."""
        ready = len(keys)
        for extra in shared_transfers(self._group, operation, keys, rows):
            ready = min(ready, num_leading(self.backend.batch_set_v2([extra])[extra.name]))
        return num_leading(self.backend.batch_set_v1(keys[:ready], rows[: ready * self._page_size]))

    def _store_extras(self, operation: ArchiveOperation) -> bool:
        """Write one batch of sidecars. False if none is left. KV pages whose sidecar is needed on every page and was
        not stored are dropped from the operation."""
        batch = _next_batch(_own(self._group, operation), operation.extra_pages, self.policy.batch_pages)
        if batch is None:
            return False
        first, extra = batch
        done = self.backend.batch_set_v2([extra])[extra.name]
        operation.extra_pages += len(done)
        if extra.hit_policy is PoolHitPolicy.ALL_PAGES and not all(done):
            del operation.keys[first + num_leading(done) :]
        return True

    # --- jobs -------------------------------------------------------------------------------------------------------

    def _run(self, lane: Lane, batch: Callable[[], bool], end: Callable[[], object]) -> None:
        """One job: run a batch, then queue the next one or end the operation."""
        try:
            more = batch()
        except Exception:
            logger.exception("a storage operation failed")
            self._count_error()
            more = False
        if more:
            self._go_on(lane, batch, end)
        else:
            end()

    def _go_on(self, lane: Lane, batch: Callable[[], bool], end: Callable[[], object]) -> None:
        """Queue the next batch of an operation; end the operation if the engine refuses it."""
        try:
            self._engine.submit(lane, [lambda: self._run(lane, batch, end)])
        except Exception:
            logger.exception("a storage operation cannot be continued")
            self._count_error()
            end()

    def _count_error(self) -> None:
        with self._errors_lock:
            self._num_errors += 1


def shared_transfers(
    group: HostPoolGroup, operation: StorageOperation, keys: list[str], host_indices: IndexArray
) -> list[PoolTransfer]:
    """Return the transfers of the sidecars that share the rows of some of the operation's pages.

    The results are copies with these rows, and with these keys unless they have their own. keys, host_indices: KV
    pages, cut to those that the backend holds. Raises InvalidValueError if the operation does not move the pool whose
    rows are shared, or if keys and rows do not match.
    """
    if not keys:
        return []
    sources = {extra.name: extra for extra in _own(group, operation)}
    sources[PoolName.KV] = PoolTransfer(PoolName.KV, host_indices=host_indices, keys=keys)
    resolved = []
    for extra in operation.extras:
        name = group.source_of(extra)
        if name is None:
            continue
        source = sources.get(name)
        if source is None or source.host_indices is None:
            known = ", ".join(sorted(each.value for each in sources))
            raise InvalidValueError(f"source of pool {extra.name.value}", name.value, f"one of {known}, with rows")
        own = source.keys if extra.keys is None else extra.keys
        if own is None or len(own) * group.page_size != len(source.host_indices):
            expected = f"{len(source.host_indices)} rows in pages of {group.page_size}"
            raise InvalidValueError(f"keys of pool {extra.name.value}", len(own or ()), expected)
        resolved.append(replace(extra, keys=own, host_indices=source.host_indices))
    return resolved


def _own(group: HostPoolGroup, operation: StorageOperation) -> list[PoolTransfer]:
    """Return the transfers of sidecars with rows of their own."""
    return [extra for extra in operation.extras if group.source_of(extra) is None]


def _next_batch(transfers: Sequence[PoolTransfer], done_pages: int, max_pages: int) -> tuple[int, PoolTransfer] | None:
    """Return the next batch after `done_pages` pages of these transfers, which are processed one after the other.

    The result is the position of the batch's first page in its transfer, and a transfer of at most `max_pages` pages.
    None if all pages are done.
    """
    for transfer in transfers:
        assert transfer.keys is not None
        assert transfer.host_indices is not None
        num_pages = len(transfer.keys)
        if done_pages < num_pages:
            rows_a_page = len(transfer.host_indices) // num_pages
            end = min(done_pages + max_pages, num_pages)
            rows = transfer.host_indices[done_pages * rows_a_page : end * rows_a_page]
            return done_pages, replace(transfer, keys=transfer.keys[done_pages:end], host_indices=rows)
        done_pages -= num_pages
    return None


def _aimed(extra: PoolTransfer, keys: list[str]) -> PoolTransfer:
    """Return the read of a sidecar for a prefix of these pages: all of them, or the trailing ones of its policy."""
    assert extra.host_indices is not None
    window = max(1, len(extra.keys or ()))
    rows_a_page = len(extra.host_indices) // window
    wanted = min(len(keys), window) if extra.hit_policy is PoolHitPolicy.TRAILING_PAGES else len(keys)
    rows = extra.host_indices[: wanted * rows_a_page]
    return PoolTransfer(extra.name, host_indices=rows, keys=keys[len(keys) - wanted :])
