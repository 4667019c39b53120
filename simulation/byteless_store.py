"""A storage backend without bytes: tracks which pages a disk would hold and which it would have evicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from threading import Lock
from typing import ClassVar

from engine_cache.storage import HiCacheStorage, PagedHostPool, PoolName, StorageStats
from kv_events.errors import InvalidValueError
from kv_events.schema import StorageMedium


class BytelessStore(HiCacheStorage):
    """Keeps the keys of the most recently used pages. Other data of a page, such as a state, is evicted with it.

    capacity_pages: pages of KV. Thread-safe. Raises InvalidValueError for a capacity below 1.
    """

    medium: ClassVar[StorageMedium] = StorageMedium.DISK
    needs_bytes: ClassVar[bool] = False

    def __init__(self, capacity_pages: int) -> None:
        if capacity_pages < 1:
            raise InvalidValueError("capacity_pages", capacity_pages, "a positive integer")
        super().__init__()
        self._capacity = capacity_pages
        self._lock = Lock()  # guards everything below
        self._kinds_of_key: dict[str, set[PoolName]] = {}  # least recently used first
        self._removed: dict[str, None] = {}  # keys for take_removed(), in order
        self._counts: Counter[str] = Counter()

    def is_held(self, key: str) -> bool:
        self._check_open()
        with self._lock:
            return PoolName.KV in self._kinds_of_key.get(key, ())

    def held_keys(self) -> set[str]:
        """Return a copy of the keys of all KV pages."""
        with self._lock:
            return {key for key, kinds in self._kinds_of_key.items() if PoolName.KV in kinds}

    def take_removed(self) -> list[str]:
        self._check_open()
        with self._lock:
            removed, self._removed = self._removed, {}
        return list(removed)

    def clear(self) -> None:
        self._check_open()
        with self._lock:
            self._kinds_of_key.clear()
            self._removed.clear()

    def get_stats(self) -> StorageStats:
        with self._lock:
            counts = {name: self._counts[name] for name in StorageStats._fields}
            return StorageStats(**counts)._replace(num_held=sum(map(len, self._kinds_of_key.values())))

    def _present(self, name: PoolName, keys: Sequence[str]) -> list[bool]:
        with self._lock:
            return [name in self._kinds_of_key.get(key, ()) for key in keys]

    def _read(self, name: PoolName, pool: PagedHostPool, keys: Sequence[str], rows: list[int]) -> list[bool]:
        there = self._present(name, keys)
        with self._lock:
            self._touch([key for key, is_there in zip(keys, there, strict=True) if is_there])
            self._counts.update(num_read=sum(there), num_missed=len(there) - sum(there))
        return there

    def _write(self, name: PoolName, pool: PagedHostPool, keys: Sequence[str], rows: list[int]) -> list[bool]:
        kept = keys[: self._capacity]  # the beginning of a prefix is more useful than its end
        with self._lock:
            for key in kept:
                kinds = self._kinds_of_key.setdefault(key, set())
                self._counts["num_already_stored" if name in kinds else "num_written"] += 1
                kinds.add(name)
                self._removed.pop(key, None)
            self._touch(kept)
            self._counts["num_failed_writes"] += len(keys) - len(kept)
            while len(self._kinds_of_key) > self._capacity:
                self._evict_oldest()
        return [True] * len(kept) + [False] * (len(keys) - len(kept))

    def _touch(self, keys: Sequence[str]) -> None:
        """Mark keys as used, the first one last, so that the end of a prefix is evicted before its beginning."""
        for key in reversed(keys):
            self._kinds_of_key[key] = self._kinds_of_key.pop(key)

    def _evict_oldest(self) -> None:
        key = next(iter(self._kinds_of_key))
        kinds = self._kinds_of_key.pop(key)
        self._counts["num_evicted"] += len(kinds)
        if PoolName.KV in kinds:
            self._removed[key] = None
