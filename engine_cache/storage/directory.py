"""Pages as files in a local directory.

A file consists of the page's flat bytes and an eight-byte checksum over them and the file name. It is written under a
temporary name and renamed, so readers never see a part of it. It is not synced: files damaged by a power cut are
recognised by their checksum, and lost pages are computed again.
"""

import contextlib
import logging
import os
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import torch
import xxhash

from engine_cache.errors import CacheStateError
from engine_cache.storage.base import HiCacheStorage, PagedHostPool, PoolName
from engine_cache.storage.object_names import PAGE_KEY_PATTERN, StorageIdentity
from kv_events.errors import InvalidValueError, check_positive
from kv_events.schema import StorageMedium

logger = logging.getLogger(__name__)

_KEY = re.compile(PAGE_KEY_PATTERN)
_CHECKSUM_BYTES = 8
_ABANDONED_AFTER_S = 600
_MAX_FAILED_EVICTIONS = 4  # per page; a file that cannot be removed is retried later


class DirectoryStorage(HiCacheStorage):
    """Keeps at most `capacity_bytes` of pages in `folder`, which is created if missing, and evicts the least recently
    used ones.

    Files of the same identity that are there already are taken over, oldest first. Several storages may share a folder:
    they read each other's pages, and each counts the files it found when it was opened, wrote or read since. Raises
    InvalidValueError, and OSError if the folder cannot be created or listed. Later disk errors are logged, and the
    pages concerned are False.
    """

    medium: ClassVar[StorageMedium] = StorageMedium.DISK

    def __init__(self, folder: Path, identity: StorageIdentity, *, capacity_bytes: int) -> None:
        super().__init__()
        check_positive(capacity_bytes=capacity_bytes)
        self._folder = folder
        self._capacity = capacity_bytes
        self._prefix, self._suffix = identity.prefix, identity.file_suffix
        self._own = _pattern_of(identity)
        self._file_bytes: dict[PoolName, int] = {}
        self._lock = threading.Lock()  # guards the fields below, and renaming and removal of files
        self._sizes: OrderedDict[str, int] = OrderedDict()  # file name -> bytes, least recently used first
        self._used = 0  # bytes of _sizes and of unfinished files
        folder.mkdir(parents=True, exist_ok=True)
        self._take_over()

    def clear(self) -> None:
        """See `HiCacheStorage`. Raises OSError if a file cannot be removed."""
        self._check_open()
        with self._lock:
            for entry in self._own_files():
                Path(entry.path).unlink(missing_ok=True)
            self._used -= sum(self._sizes.values())
            self._sizes.clear()
            self._held.forget_all()

    def _size(self) -> tuple[int, int]:
        with self._lock:
            return len(self._sizes), sum(self._sizes.values())

    def check(self) -> None:
        """Recount while no write is running. Raises CacheStateError with both figures."""
        with self._lock:
            counted = sum(self._sizes.values())
            if not counted == self._used <= self._capacity:
                raise CacheStateError(f"{counted} bytes held, {self._used} used, capacity {self._capacity}")
            missing = self._sizes.keys() - {entry.name for entry in self._own_files()}
            if missing:
                raise CacheStateError(f"{len(missing)} of {len(self._sizes)} held files are missing: {min(missing)}")

    def _register(self, name: PoolName, pool: PagedHostPool) -> None:
        needed = pool.get_dummy_flat_data_page().nbytes + _CHECKSUM_BYTES
        if needed > self._capacity:
            raise InvalidValueError(
                "capacity_bytes", self._capacity, f"room for a page of {name.value}, {needed} bytes"
            )
        super()._register(name, pool)
        self._file_bytes[name] = needed

    def _present(self, name: PoolName, keys: Sequence[str]) -> Iterator[bool]:
        return (self._is_there(self._file_name(name, key), self._file_bytes[name]) for key in keys)

    def _read(self, name: PoolName, pool: PagedHostPool, keys: Sequence[str], rows: list[int]) -> list[bool]:
        page = pool.get_dummy_flat_data_page()
        data = _bytes_of(page)
        done = []
        for key, row in zip(keys, rows, strict=True):
            there = self._load(self._file_name(name, key), data)
            if there:
                pool.set_from_flat_data_page(row, page)
            done.append(there)
        self._touch([self._file_name(name, key) for key, there in zip(keys, done, strict=True) if there])
        self._count(num_read=sum(done), num_missed=len(done) - sum(done))
        return done

    def _write(self, name: PoolName, pool: PagedHostPool, keys: Sequence[str], rows: list[int]) -> list[bool]:
        stored: dict[str, None] = {}
        done = []
        for key, row in zip(keys, rows, strict=True):
            file_name = self._file_name(name, key)
            there = self._is_there(file_name, self._file_bytes[name])
            if there:
                self._touch([file_name])
                self._count(num_already_stored=1)
            else:
                there = self._store(file_name, self._file_bytes[name], pool, row, stored)
                self._count(**{"num_written" if there else "num_failed_writes": 1})
            if there:
                stored[file_name] = None
            done.append(there)
        self._touch(list(stored))
        return done

    def _is_there(self, file_name: str, file_bytes: int) -> bool:
        try:
            seen = (self._folder / file_name).stat()
        except FileNotFoundError:
            self._forget_if_missing(file_name)
            return False
        except OSError as error:
            logger.warning("page %s cannot be looked up: %s", file_name, error)
            return False
        if seen.st_size != file_bytes:
            self._remove_damaged(file_name, seen, f"{seen.st_size} bytes, not {file_bytes}")
            return False
        return True

    def _load(self, file_name: str, data: memoryview) -> bool:
        checksum = bytearray(_CHECKSUM_BYTES)
        file_bytes = len(data) + _CHECKSUM_BYTES
        try:
            with (self._folder / file_name).open("rb", buffering=0) as file:
                seen = os.fstat(file.fileno())
                if seen.st_size != file_bytes or os.preadv(file.fileno(), [data, checksum], 0) != file_bytes:
                    self._remove_damaged(file_name, seen, f"{seen.st_size} bytes, not {file_bytes}")
                    return False
                if checksum != _checksum(file_name, data):
                    self._remove_damaged(file_name, seen, "wrong checksum")
                    return False
                with contextlib.suppress(OSError):  # affects only the order after a restart
                    os.utime(file.fileno())
        except FileNotFoundError:
            self._forget_if_missing(file_name)
            return False
        except OSError as error:
            logger.warning("page %s cannot be read: %s", file_name, error)
            return False
        return True

    def _store(self, file_name: str, file_bytes: int, pool: PagedHostPool, row: int, keep: Collection[str]) -> bool:
        """Write one page. keep: files of the same prefix in this batch, which must not be evicted for it."""
        page = pool.get_data_page(row)
        if not self._reserve(file_bytes, keep):
            return False
        data = _bytes_of(page)
        unfinished = self._folder / f"{file_name}.{secrets.token_hex(4)}.tmp"
        try:
            with unfinished.open("xb") as file:
                file.write(data)
                file.write(_checksum(file_name, data))
            with self._lock:
                unfinished.replace(self._folder / file_name)
                self._used -= self._sizes.pop(file_name, 0)  # another thread may have written the same page
                self._hold(file_name, file_bytes)
        except OSError as error:
            logger.warning("page %s cannot be written: %s", file_name, error)
            with self._lock:
                self._used -= file_bytes
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            return False
        return True

    def _reserve(self, num_bytes: int, keep: Collection[str] = ()) -> bool:
        with self._lock:
            num_failed = 0
            while self._used + num_bytes > self._capacity:
                oldest = next(iter(self._sizes), None)
                if oldest is None or oldest in keep or num_failed == _MAX_FAILED_EVICTIONS:
                    return False
                num_failed += not self._evict(oldest)
            self._used += num_bytes
            return True

    def _evict(self, file_name: str) -> bool:
        """Remove a file. The caller holds the lock. False if that failed and the file still counts."""
        try:
            (self._folder / file_name).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("page %s cannot be evicted: %s", file_name, error)
            self._sizes.move_to_end(file_name)
            return False
        self._forget(file_name)
        self._count(num_evicted=1)
        return True

    def _touch(self, file_names: list[str]) -> None:
        """Mark files of one prefix as used, the first page as the most recent one: without it the others are useless.

        Files that this storage did not know are added.
        """
        with self._lock:
            for file_name in reversed(file_names):
                if file_name in self._sizes:
                    self._sizes.move_to_end(file_name)
                    continue
                with contextlib.suppress(FileNotFoundError):
                    size = (self._folder / file_name).stat().st_size
                    self._hold(file_name, size)
                    self._used += size
        self._reserve(0)

    def _hold(self, file_name: str, num_bytes: int) -> None:
        self._sizes[file_name] = num_bytes
        self._held.hold(self._kv_key(file_name), self._held.moment)

    def _forget(self, file_name: str) -> None:
        """Drop a file. The caller holds the lock. Unknown files are not reported as removed."""
        num_bytes = self._sizes.pop(file_name, None)
        if num_bytes is None:
            return
        self._used -= num_bytes
        self._held.lose(self._kv_key(file_name), self._held.moment)

    def _forget_if_missing(self, file_name: str) -> None:
        with self._lock:
            if file_name in self._sizes and not (self._folder / file_name).exists():
                self._forget(file_name)

    def _remove_damaged(self, file_name: str, seen: os.stat_result, why: str) -> None:
        """Remove a damaged file. seen: its status, so that a valid file written since then is kept."""
        path = self._folder / file_name
        with self._lock:
            try:
                now = path.stat()
                if (now.st_ino, now.st_size) != (seen.st_ino, seen.st_size):
                    return
                path.unlink()
            except FileNotFoundError:
                return
            except OSError as error:
                logger.warning("page %s is damaged (%s) and cannot be removed: %s", file_name, why, error)
                return
            self._count(num_damaged=1)
            self._forget(file_name)
        logger.warning("page %s was damaged and is removed: %s", file_name, why)

    def _take_over(self) -> None:
        found = []
        for entry in self._own_files():
            try:
                seen = entry.stat()
            except FileNotFoundError:  # removed by another storage on this folder
                continue
            if not entry.name.endswith(".tmp"):
                found.append((seen.st_mtime_ns, entry.name, seen.st_size))
            elif seen.st_mtime < time.time() - _ABANDONED_AFTER_S:  # its writer crashed
                Path(entry.path).unlink(missing_ok=True)
        for _, file_name, num_bytes in sorted(found):
            self._hold(file_name, num_bytes)
            self._used += num_bytes
        self._reserve(0)

    def _own_files(self) -> Iterator[os.DirEntry[str]]:
        with os.scandir(self._folder) as entries:
            yield from (entry for entry in entries if self._own.fullmatch(entry.name))

    def _file_name(self, name: PoolName, key: str) -> str:
        if not _KEY.fullmatch(key):
            raise InvalidValueError("storage key", key, "a result of page_key()")
        pool = "" if name is PoolName.KV else f".{name.value}"
        return f"{self._prefix}{key}{pool}{self._suffix}.bin"

    def _kv_key(self, file_name: str) -> list[str]:
        key = file_name.removeprefix(self._prefix).removesuffix(f"{self._suffix}.bin")
        return [] if "." in key else [key]


def _pattern_of(identity: StorageIdentity) -> re.Pattern[str]:
    pools = "|".join(name.value for name in PoolName if name is not PoolName.KV)
    name = rf"{re.escape(identity.prefix)}{PAGE_KEY_PATTERN}(?:\.(?:{pools}))?{re.escape(identity.file_suffix)}\.bin"
    return re.compile(rf"{name}(?:\.[0-9a-f]{{8}}\.tmp)?")


def _bytes_of(page: torch.Tensor) -> memoryview:
    return page.view(torch.uint8).numpy().data


def _checksum(file_name: str, data: memoryview) -> bytes:
    """Return the checksum over content and name, so that a renamed file is not mistaken for another page."""
    return xxhash.xxh3_64_digest(data, seed=xxhash.xxh3_64_intdigest(file_name.encode()))
