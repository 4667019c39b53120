"""A storage backend without bytes: tracks which pages a disk would hold and which it would have evicted."""

from collections.abc import Sequence
from threading import Lock
from typing import ClassVar

from engine_cache.storage import HiCacheStorage, PagedHostPool, PoolName
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

    def held_keys(self) -> set[str]:
        """Return a copy of the keys of all KV pages."""
        return set(self._held.keys())

    def clear(self) -> None:
        self._check_open()
        with self._lock:
            self._kinds_of_key.clear()
            self._held.forget_all()

    def _size(self) -> tuple[int, int]:
        with self._lock:
            return sum(map(len, self._kinds_of_key.values())), 0

    def _present(self, name: PoolName, keys: Sequence[str]) -> list[bool]:
        with self._lock:
            return [name in self._kinds_of_key.get(key, ()) for key in keys]

    def _read(self, name: PoolName, pool: PagedHostPool, keys: Sequence[str], rows: list[int]) -> list[bool]:
        there = self._present(name, keys)
        with self._lock:
            self._touch([key for key, is_there in zip(keys, there, strict=True) if is_there])
        self._count(num_read=sum(there), num_missed=len(there) - sum(there))
        return there

    def _write(self, name: PoolName, pool: PagedHostPool, keys: Sequence[str], rows: list[int]) -> list[bool]:
        kept = keys[: self._capacity]  # the beginning of a prefix is more useful than its end
        with self._lock:
            num_known = sum(name in self._kinds_of_key.get(key, ()) for key in kept)
            for key in kept:
                self._kinds_of_key.setdefault(key, set()).add(name)
            if name is PoolName.KV:
                self._held.hold(kept, self._held.moment)
            self._touch(kept)
            while len(self._kinds_of_key) > self._capacity:
                self._evict_oldest()
        num_failed = len(keys) - len(kept)
        self._count(num_already_stored=num_known, num_written=len(kept) - num_known, num_failed_writes=num_failed)
        return [True] * len(kept) + [False] * num_failed

    def _touch(self, keys: Sequence[str]) -> None:
        """Mark keys as used, the first one last, so that the end of a prefix is evicted before its beginning."""
        for key in reversed(keys):
            self._kinds_of_key[key] = self._kinds_of_key.pop(key)

    def _evict_oldest(self) -> None:
        key = next(iter(self._kinds_of_key))
        kinds = self._kinds_of_key.pop(key)
        self._count(num_evicted=len(kinds))
        self._held.lose([key], self._held.moment)
