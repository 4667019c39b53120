"""The interface of storage backends.

A page is identified by a *storage key* (`object_names.page_key`) and moves between a host pool and the backend as flat
bytes. A batch returns one bool per page: a page that cannot be read or written is False, never an exception.
"""

from __future__ import annotations

import abc
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np

from engine_cache.tree.node import TreeNode
from engine_cache.types import IndexArray
from kv_events.errors import InvalidValueError, KvsightError
from kv_events.schema import StorageMedium

if TYPE_CHECKING:
    import torch


class StorageClosedError(KvsightError, RuntimeError):
    """A storage backend was used after `close()`."""

    def __init__(self) -> None:
        super().__init__("store is closed")


class PoolName(str, Enum):  # noqa: UP042  (as StorageMedium: the value is what names and settings carry)
    """Kinds of state of a page, one pool each."""

    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"
    INDEXER = "indexer"


class PoolHitPolicy(Enum):
    """Which pages of a sidecar pool must be stored for a prefix of KV pages to be usable."""

    ALL_PAGES = "all_pages"
    """Every page of the prefix."""
    TRAILING_PAGES = "trailing_pages"
    """The last `max(1, len(transfer.keys))` pages of the prefix, or all of a shorter one."""


@dataclass(slots=True)
class PoolTransfer:
    """The part of one pool in one operation.

    Transfers between host and storage use `keys` and `host_indices`, one key per page of indices; transfers between
    device and host use `device_indices` and `host_indices`.
    """

    name: PoolName
    host_indices: IndexArray | None = None
    device_indices: IndexArray | None = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    nodes_to_load: list[TreeNode] | None = None


class PoolTransferResult(NamedTuple):
    """The part of a prefix that a backend holds at this moment. A later read may still miss."""

    kv_hit_pages: int
    """Leading pages that are usable with KV and all sidecar pools."""
    extra_pool_hit_pages: dict[PoolName, int]
    """Usable pages per sidecar pool. Pools without a usable page are left out."""


class StorageStats(NamedTuple):
    """Counts of pages of all pools since the backend was opened, and what it holds now."""

    num_read: int
    num_missed: int
    """Requested but absent or unreadable."""
    num_written: int
    num_already_stored: int
    num_failed_writes: int
    num_damaged: int
    """Found damaged and removed."""
    num_evicted: int
    num_held: int
    held_bytes: int


class PagedHostPool(Protocol):
    """What a backend requires of a host pool. An index is the first row of a page and is checked by the pool."""

    @property
    def page_size(self) -> int:
        """Rows per page."""

    def get_data_page(self, index: int, /) -> torch.Tensor:
        """Return a copy of the page as a flat tensor of any dtype."""

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Return a buffer with the length and dtype of `get_data_page`."""

    def set_from_flat_data_page(self, index: int, data: torch.Tensor, /) -> None:
        """Copy such a buffer into the page."""


@runtime_checkable
class ZeroCopyHostPool(PagedHostPool, Protocol):
    """A host pool whose pages a backend reads and writes in place. The tensors must outlive the backend."""

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        """Return all tensors that hold pages."""

    def get_page_buffer_meta(self, indices: IndexArray, /) -> tuple[list[int], list[int]]:
        """Return address and length in bytes of every contiguous run of the pages, page by page, the same number for
        each page. Raises InvalidValueError for a layout whose pages are not contiguous, even without indices.
        """


class TrackedPages:
    """Keys of pages that were seen in a store. Beyond `limit` keys the one seen least recently is dropped and counts as
    lost. Any thread.

    The answer of a store that others use may be out of date when it arrives. The caller therefore reads `moment` before
    its request and passes it on with the answer. Pages seen before everything was lost or removed are ignored, and so
    are pages missed before they were last seen.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._lock = threading.Lock()  # guards the fields below
        self._held: OrderedDict[str, int] = OrderedDict()  # key -> moment it was seen, oldest first
        self._lost: dict[str, None] = {}  # for take_lost(), in order; disjoint from _held
        self._moment = 0
        self._emptied = 0  # the moment at which everything was last lost or removed

    @property
    def moment(self) -> int:
        """Grows with every change."""
        return self._moment

    def __len__(self) -> int:
        with self._lock:
            return len(self._held)

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return key in self._held

    def keys(self) -> list[str]:
        with self._lock:
            return list(self._held)

    def hold(self, keys: Iterable[str], moment: int) -> bool:
        """Add keys that were seen in the store after `moment`. False if they are ignored."""
        with self._lock:
            if moment < self._emptied:
                return False
            self._moment += 1
            for key in keys:
                self._lost.pop(key, None)
                self._held[key] = self._moment
                self._held.move_to_end(key)
            while self._limit is not None and len(self._held) > self._limit:
                oldest, _ = self._held.popitem(last=False)
                self._lost[oldest] = None
            return True

    def lose(self, keys: Iterable[str], moment: int) -> None:
        """Drop keys that were missing after `moment`. Keys that are not held do not count as lost."""
        with self._lock:
            for key in keys:
                if key in self._held and self._held[key] <= moment:
                    del self._held[key]
                    self._lost[key] = None

    def lose_all(self) -> None:
        """Drop all keys: the store is unreachable or was emptied."""
        with self._lock:
            self._moment = self._emptied = self._moment + 1
            self._lost.update(dict.fromkeys(self._held))
            self._held.clear()

    def forget_all(self) -> list[str]:
        """Drop all keys without counting them as lost, and return them."""
        with self._lock:
            held = list(self._held)
            self._moment = self._emptied = self._moment + 1
            self._held.clear()
            self._lost.clear()
            return held

    def take_lost(self) -> list[str]:
        """Return the keys that were lost since the last call and are not held again."""
        with self._lock:
            lost, self._lost = self._lost, {}
        return list(lost)


class HiCacheStorage(abc.ABC):
    """Storage of pages behind the host tier.

    Methods may be called from several threads at once. They raise InvalidValueError for a pool that is not registered
    and for invalid keys or keys that do not match the indices, and StorageClosedError after `close()`.
    """

    medium: ClassVar[StorageMedium]
    """Medium of the pages in events."""
    needs_bytes: ClassVar[bool] = True
    """False if the backend stores keys only, so that host pools without bytes suffice."""
    should_split_heads: ClassVar[bool] = False
    """True if an object holds some of a page's heads, for ranks with fewer heads. States and indexes have no heads, so
    such a backend accepts the KV pool only."""

    def __init__(self, max_tracked_pages: int | None = None) -> None:
        self._pools: dict[PoolName, PagedHostPool] = {}
        self._closed = False
        self._held = TrackedPages(max_tracked_pages)
        """Keys of the KV pages that the backend holds, according to its own records."""
        self._counts_lock = threading.Lock()  # guards _counts
        self._counts: Counter[str] = Counter()

    def register_host_pools(self, pools: Mapping[PoolName, PagedHostPool]) -> None:
        """Register all pools of a cache, which has the backend to itself until `unregister_host_pools`.

        If one pool is refused, none is registered. Raises InvalidValueError, without a change, while pools of another
        cache are registered.
        """
        for name, known in self._pools.items():
            if pools.get(name) is not known:
                got = type(pools.get(name)).__name__
                raise InvalidValueError(f"host pool {name.value}", got, "that of the cache that has the store")
        try:
            for name, pool in pools.items():
                if name is PoolName.KV:
                    self.register_mem_pool_host(pool)
                else:
                    self.register_mem_host_pool_v2(pool, name)
        except BaseException:
            self.unregister_host_pools()
            raise

    def unregister_host_pools(self) -> None:
        """Release the memory of all pools, so that another cache may use the backend.

        No transfer may be running. Harmless without pools and after `close()`.
        """
        self._pools.clear()

    def register_mem_pool_host(self, pool: PagedHostPool) -> None:
        """Register the KV pool: the host pool itself, or the anchor of a pool group."""
        self._register(PoolName.KV, pool)

    def register_mem_host_pool_v2(self, pool: PagedHostPool, name: PoolName) -> None:
        """Register a sidecar pool. Does nothing for KV."""
        if name is PoolName.KV:
            return
        if self.should_split_heads:
            raise InvalidValueError("should_split_heads", True, f"False in a store that takes pool {name.value}")
        self._register(name, pool)

    def batch_exists(self, keys: Sequence[str]) -> int:
        """Return the number of leading KV pages that are stored."""
        self._pool(PoolName.KV)
        return num_leading(self._present(PoolName.KV, keys))

    def batch_exists_v2(self, keys: Sequence[str], transfers: Iterable[PoolTransfer]) -> PoolTransferResult:
        """Return how much of the prefix `keys` is usable with the sidecar pools of `transfers`, by their hit policies.

        Of a transfer, only name, policy and number of keys are used: its pages are those of `keys`.
        """
        usable = self.batch_exists(keys)
        found = []
        for transfer in transfers:
            self._pool(transfer.name)
            present = list(self._present(transfer.name, keys[:usable]))
            usable = _boundary(present, transfer)
            found.append((transfer, present))
        before = -1
        while usable != before:  # a prefix that one pool has shortened may end where another has no state
            before = usable
            for transfer, present in found:
                usable = _boundary(present[:usable], transfer)
        return PoolTransferResult(usable, {transfer.name: usable for transfer, _ in found if usable})

    def batch_get_v1(self, keys: Sequence[str], host_indices: IndexArray) -> list[bool]:
        """Read KV pages into the host pool. Return whether each was read; the content of other pages is undefined.

        host_indices: int64[len(keys) * page_size], rows page by page.
        """
        pool, rows = self._pages(PoolName.KV, keys, host_indices)
        return self._read(PoolName.KV, pool, keys, rows)

    def batch_set_v1(self, keys: Sequence[str], host_indices: IndexArray) -> list[bool]:
        """Write KV pages from the host pool. Return whether each is stored now. Stored pages are not rewritten."""
        pool, rows = self._pages(PoolName.KV, keys, host_indices)
        return self._write(PoolName.KV, pool, keys, rows)

    def batch_get_v2(self, transfers: Iterable[PoolTransfer]) -> dict[PoolName, list[bool]]:
        """`batch_get_v1` for several pools, with the `keys` and `host_indices` of the transfers."""
        return self._by_pool(self._read, transfers)

    def batch_set_v2(self, transfers: Iterable[PoolTransfer]) -> dict[PoolName, list[bool]]:
        """`batch_set_v1` for several pools, with the `keys` and `host_indices` of the transfers."""
        return self._by_pool(self._write, transfers)

    def is_held(self, key: str) -> bool:
        """Return whether the backend holds this KV page, according to its own records, without a lookup.

        Storage events are derived from this and `take_removed`, on the tree's thread: an acknowledged page is announced
        if it is held and was not announced before; announced pages in `take_removed()` are withdrawn. The announced
        pages therefore converge to the held ones, however writes, evictions and acknowledgements interleave.
        """
        self._check_open()
        return key in self._held

    def take_removed(self) -> list[str]:
        """Return the keys of KV pages that were evicted, damaged or lost since the last call and are not held again.

        Pages removed by `clear()` are not included.
        """
        self._check_open()
        return self._held.take_lost()

    @abc.abstractmethod
    def clear(self) -> None:
        """Remove all pages of this model and rank, and no others."""

    def get_stats(self) -> StorageStats:
        """Return figures for metrics and tests. Allowed after `close()`."""
        num_held, held_bytes = self._size()
        with self._counts_lock:
            counts = {name: self._counts[name] for name in StorageStats._fields}
        return StorageStats(**counts | {"num_held": num_held, "held_bytes": held_bytes})

    def close(self) -> None:
        """Close the backend and release the memory of the pools. Stored pages stay. Closing twice is harmless."""
        self._closed = True
        self._pools.clear()

    @abc.abstractmethod
    def _size(self) -> tuple[int, int]:
        """Return the number of pages that the backend holds, and their bytes."""

    @abc.abstractmethod
    def _present(self, name: PoolName, keys: Sequence[str]) -> Iterable[bool]:
        """Return whether each page is stored. The result may be lazy."""

    @abc.abstractmethod
    def _read(self, name: PoolName, pool: PagedHostPool, keys: Sequence[str], rows: list[int]) -> list[bool]:
        """Read pages into the pool. rows: first row of each page."""

    @abc.abstractmethod
    def _write(self, name: PoolName, pool: PagedHostPool, keys: Sequence[str], rows: list[int]) -> list[bool]:
        """Write pages from the pool."""

    def _count(self, **counts: int) -> None:
        with self._counts_lock:
            self._counts.update(counts)

    def _register(self, name: PoolName, pool: PagedHostPool) -> None:
        self._check_open()
        self._pools[name] = pool

    def _pool(self, name: PoolName) -> PagedHostPool:
        self._check_open()
        pool = self._pools.get(name)
        if pool is None:
            known = ", ".join(sorted(self._pools)) or "none yet"
            raise InvalidValueError("pool", getattr(name, "value", name), f"a registered pool ({known})")
        return pool

    def _pages(self, name: PoolName, keys: Sequence[str], host_indices: IndexArray) -> tuple[PagedHostPool, list[int]]:
        pool = self._pool(name)
        if len(keys) * pool.page_size != len(host_indices):
            expected = f"{len(keys)} keys x page size {pool.page_size}"
            raise InvalidValueError(f"number of host indices of pool {name.value}", len(host_indices), expected)
        by_page = host_indices.reshape(len(keys), pool.page_size)
        torn = (by_page != by_page[:, :1] + np.arange(pool.page_size)).any(axis=1)
        if torn.any():
            page = by_page[torn.argmax()].tolist()
            raise InvalidValueError(f"host indices of pool {name.value}", page, "rows that follow each other")
        return pool, by_page[:, 0].tolist()

    def _by_pool(
        self,
        move: Callable[[PoolName, PagedHostPool, Sequence[str], list[int]], list[bool]],
        transfers: Iterable[PoolTransfer],
    ) -> dict[PoolName, list[bool]]:
        jobs = []
        for transfer in transfers:  # check all of them before the first page moves
            name, keys, indices = transfer.name, transfer.keys, transfer.host_indices
            if keys is None or indices is None:
                raise InvalidValueError(f"transfer of pool {name.value}", transfer, "keys and host indices")
            jobs.append((name, keys, *self._pages(name, keys, indices)))
        done: dict[PoolName, list[bool]] = {}
        for name, keys, pool, rows in jobs:
            done.setdefault(name, []).extend(move(name, pool, keys, rows))
        return done

    def _check_open(self) -> None:
        if self._closed:
            raise StorageClosedError


def _boundary(present: Sequence[bool], transfer: PoolTransfer) -> int:
    """Return the largest number of leading pages that the pool's policy allows. present: one bool per page."""
    if transfer.hit_policy is PoolHitPolicy.ALL_PAGES:
        return num_leading(present)
    window = max(1, len(transfer.keys or ()))
    boundary = run = 0
    for end, there in enumerate(present, 1):
        run = run + 1 if there else 0
        if run >= min(window, end):
            boundary = end
    return boundary


def num_leading(present: Iterable[bool]) -> int:
    """Return the number of leading true values."""
    return sum(takewhile(bool, present))
