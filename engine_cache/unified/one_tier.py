"""What a unified tree without a host tier answers where one is asked for: there is nothing, and nothing to do."""

from __future__ import annotations

from engine_cache.storage.base import HiCacheStorage
from engine_cache.storage_operations import StoragePolicy
from engine_cache.transfer import HiCacheController
from engine_cache.tree.node import TreeNode
from engine_cache.unified.eviction import UnifiedEviction
from kv_events.errors import InvalidValueError


class OptionalHostTier(UnifiedEviction):
    """A scheduler may make the same calls whichever tiers there are."""

    cache_controller: HiCacheController | None = None
    """Moves the data; None: there is no host tier."""
    write_policy = "write_through"

    def _end_transfers(self) -> None:
        if self.cache_controller is not None:
            super()._end_transfers()

    def _require_loads(self) -> None:
        if self.cache_controller is not None:
            super()._require_loads()

    def check_hicache_events(self) -> None:
        if self.cache_controller is not None:
            super().check_hicache_events()

    def writing_check(self, write_back: bool = False) -> None:
        if self.cache_controller is not None:
            super().writing_check(write_back)

    def loading_check(self) -> None:
        if self.cache_controller is not None:
            super().loading_check()

    def ready_to_load_host_cache(self) -> int:
        return -1 if self.cache_controller is None else super().ready_to_load_host_cache()

    def write_backup(self, node: TreeNode, write_back: bool = False) -> int:
        return 0 if self.cache_controller is None else super().write_backup(node, write_back)

    def evict_host(self, num_tokens: int) -> int:
        return 0 if self.cache_controller is None else super().evict_host(num_tokens)

    def attach_storage_backend(self, backend: HiCacheStorage, policy: StoragePolicy | None = None) -> tuple[bool, str]:
        if self.cache_controller is None:
            return False, "there is no host tier for a store to stand behind"
        return super().attach_storage_backend(backend, policy)

    def attach_store(self, backend: HiCacheStorage, policy: StoragePolicy | None = None) -> None:
        if self.cache_controller is None:
            raise InvalidValueError("store", type(backend).__name__, "a cache with a host tier for it to stand behind")
        super().attach_store(backend, policy)
