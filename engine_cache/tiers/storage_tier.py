"""The storage tier of a radix cache, whole: a store that is put behind the host tier or let go of again."""

from __future__ import annotations

import logging
from typing import Any

from engine_cache.storage.base import HiCacheStorage, PoolName
from engine_cache.storage_io import StorageIO
from engine_cache.storage_operations import StoragePolicy
from engine_cache.tiers.prefetch import Prefetches
from kv_events.errors import InvalidValueError

log = logging.getLogger(__name__)

_DETACH_TIMEOUT_S = 10.0


class StorageTier(Prefetches):
    """What caches with a store behind their host tier share. All of it runs on the thread that owns the cache.

    A node that is acknowledged on the host is archived. A prompt that is about to run may be prefetched: pages that
    the store holds become nodes on the host. `check_storage_events` takes over what the I/O side has finished.
    """

    def reset(self) -> None:
        super().reset()
        if self.storage is not None:
            self.storage.reset()

    def check_hicache_events(self) -> None:
        """Take over whatever has ended: backups, loads, then what the storage side has finished."""
        self.writing_check()
        self.loading_check()
        self.check_storage_events()

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
        self.storage = StorageIO(backend, self.controller, policy or StoragePolicy())
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
