"""What a cache asks of a store for KV pages, the same for every kind of store.

A page is named by a *storage key* (`object_names.page_key`) and moves between a host pool and the store as flat bytes.
Nothing here is all or nothing: a batch answers page by page, and a page that could not be read or written is false,
never an exception.
"""

from __future__ import annotations

import abc
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
    """A store was used after `close()`."""

    def __init__(self) -> None:
        super().__init__("store is closed")


class PoolName(str, Enum):  # noqa: UP042  (as StorageMedium: the value is what names and settings carry)
    """Kinds of state that a page may have."""

    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"
    INDEXER = "indexer"


class PoolHitPolicy(Enum):
    """Which pages of an extra pool must be there for a prefix of KV pages to be usable."""

    ALL_PAGES = "all_pages"
    """Every page of the prefix."""
    TRAILING_PAGES = "trailing_pages"
    """The last `max(1, len(transfer.keys))` pages of the prefix, or all of a shorter one."""


@dataclass(slots=True)
class PoolTransfer:
    """What one pool has to do with one operation. Between host and store `keys` and `host_indices` count, one key a
    page of indices; between device and host `device_indices` and `host_indices`."""

    name: PoolName
    host_indices: IndexArray | None = None
    device_indices: IndexArray | None = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    nodes_to_load: list[TreeNode] | None = None
    indices_from_pool: PoolName | None = None
    """Pool whose indices (and keys, unless set) this one shares; None: it has its own."""


class PoolTransferResult(NamedTuple):
    """What a store holds of a prefix at this moment; a later read may still miss."""

    kv_hit_pages: int
    """Leading pages that are usable: KV and all extra pools."""
    extra_pool_hit_pages: dict[PoolName, int]
    """The same per extra pool; a pool without a usable page is not in it."""


class StorageStats(NamedTuple):
    """Pages of all pools since the store was opened, and what it holds now."""

    num_read: int
    num_missed: int
    """Asked for and not there, or not readable."""
    num_written: int
    num_already_stored: int
    num_failed_writes: int
    num_damaged: int
    """Found damaged and removed; each counts once."""
    num_evicted: int
    num_held: int
    held_bytes: int


class PagedHostPool(Protocol):
    """What a store needs of a host pool. An index is the first row of a page; the pool checks it."""

    @property
    def page_size(self) -> int:
        """Rows a page."""

    def get_data_page(self, index: int, /) -> torch.Tensor:
        """The page as a flat tensor of its own, any dtype."""

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """A tensor of the length and dtype that `get_data_page` gives, to be read into."""

    def set_from_flat_data_page(self, index: int, data: torch.Tensor, /) -> None:
        """Copy such a tensor into the page."""


@runtime_checkable
class ZeroCopyHostPool(PagedHostPool, Protocol):
    """What a store needs that reads and writes the pages of a host pool in place. The tensors outlive the store."""

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        """All tensors that pages lie in."""

    def get_page_buffer_meta(self, indices: IndexArray, /) -> tuple[list[int], list[int]]:
        """Address and length in bytes of every run of memory of the pages, page by page, equally many a page. Raises
        InvalidValueError for a layout in which a page is no run, for no indices, too."""


class HiCacheStorage(abc.ABC):
    """A store of pages behind the host tier.

    Threads: every method may be called from any thread, several at once. Raises InvalidValueError for a pool that is
    not registered, for keys that are none or do not fit the indices, and StorageClosedError after `close()`.
    """

    medium: ClassVar[StorageMedium]
    """What events call a page that lies here."""
    needs_bytes: ClassVar[bool] = True
    """False: pages are names and nothing else, so host pools without bytes will do."""
    works_in_place: ClassVar[bool] = False
    """True: host pools must be `ZeroCopyHostPool`s, in a layout in which a page is runs of memory."""
    should_split_heads: ClassVar[bool] = False
    """True: an object holds some of the heads of a page, for ranks that have fewer. States and indexes have no heads,
    so such a store takes no pool but KV."""

    def __init__(self) -> None:
        self._pools: dict[PoolName, PagedHostPool] = {}
        self._closed = False

    def register_host_pools(self, pools: Mapping[PoolName, PagedHostPool]) -> None:
        """Name all pools of a cache, which has the store to itself until `unregister_host_pools`. If one is refused the
        store knows no pool. Raises InvalidValueError, and keeps what it knows, while it has pools of another cache."""
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
        """As if no pool had been named: their memory is let go of, and another cache may take the store. No page is on
        its way. Harmless for a store without pools, and after `close()`."""
        self._pools.clear()

    def register_mem_pool_host(self, pool: PagedHostPool) -> None:
        """Name the KV pool: the host pool itself, or the anchor of a hybrid group. Once, before the first page."""
        self._register(PoolName.KV, pool)

    def register_mem_host_pool_v2(self, pool: PagedHostPool, name: PoolName) -> None:
        """Name an extra pool of a hybrid model. KV is left as `register_mem_pool_host` named it."""
        if name is PoolName.KV:
            return
        if self.should_split_heads:
            raise InvalidValueError("should_split_heads", True, f"False in a store that takes pool {name.value}")
        self._register(name, pool)

    def batch_exists(self, keys: Sequence[str]) -> int:
        """Number of KV pages that are there, from the first key up to the first one that is missing."""
        self._pool(PoolName.KV)
        return _num_leading(self._present(PoolName.KV, keys))

    def batch_exists_v2(self, keys: Sequence[str], transfers: Iterable[PoolTransfer]) -> PoolTransferResult:
        """How much of the prefix `keys` is usable with the extra pools of `transfers`, each by its hit policy.

        Of a transfer only name, policy and the number of its keys count: its pages are those of `keys`.
        """
        usable = self.batch_exists(keys)
        found = []
        for transfer in transfers:
            self._pool(transfer.name)
            present = list(self._present(transfer.name, keys[:usable]))
            usable = _boundary(present, transfer)
            found.append((transfer, present))
        before = -1
        while usable != before:  # what one pool cuts may end where another has no state: until all agree
            before = usable
            for transfer, present in found:
                usable = _boundary(present[:usable], transfer)
        return PoolTransferResult(usable, {transfer.name: usable for transfer, _ in found if usable})

    def batch_get_v1(self, keys: Sequence[str], host_indices: IndexArray) -> list[bool]:
        """Read KV pages into the host pool; whether each is there now. After a false the page's content is undefined.

        host_indices: int64[len(keys) * page_size], rows page by page.
        """
        pool, rows = self._pages(PoolName.KV, keys, host_indices)
        return self._read(PoolName.KV, pool, keys, rows)

    def batch_set_v1(self, keys: Sequence[str], host_indices: IndexArray) -> list[bool]:
        """Write KV pages of the host pool; whether each is stored now. A page that was there is not rewritten."""
        pool, rows = self._pages(PoolName.KV, keys, host_indices)
        return self._write(PoolName.KV, pool, keys, rows)

    def batch_get_v2(self, transfers: Iterable[PoolTransfer]) -> dict[PoolName, list[bool]]:
        """`batch_get_v1` for several pools, by their `keys` and `host_indices`."""
        return self._by_pool(self._read, transfers)

    def batch_set_v2(self, transfers: Iterable[PoolTransfer]) -> dict[PoolName, list[bool]]:
        """`batch_set_v1` for several pools, by their `keys` and `host_indices`."""
        return self._by_pool(self._write, transfers)

    @abc.abstractmethod
    def is_held(self, key: str) -> bool:
        """Whether the store, as far as it knows without looking, holds this KV page now.

        Together with `take_removed` this is what storage events are made of. On the thread of the tree: announce an
        acknowledged page if it is held and was not announced; then withdraw those of `take_removed()` that were. So
        what is announced ends as what is held, however writes, evictions and acknowledgements interleave.
        """

    @abc.abstractmethod
    def take_removed(self) -> list[str]:
        """Keys of the KV pages that the store lost since the last call (evicted, damaged, gone) and that it does not
        hold again. Pages removed by `clear()` are not among them."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Remove every page that this model and rank has in the store, and nothing else."""

    @abc.abstractmethod
    def get_stats(self) -> StorageStats:
        """Figures for metrics and tests. Also after `close()`."""

    def close(self) -> None:
        """Let go of the store and of the memory of the pools; the pages stay in it. Closing twice is harmless."""
        self._closed = True
        self._pools.clear()

    @abc.abstractmethod
    def _present(self, name: PoolName, keys: Sequence[str]) -> Iterable[bool]:
        """Whether each page is there; may be lazy."""

    @abc.abstractmethod
    def _read(self, name: PoolName, pool: PagedHostPool, keys: Sequence[str], rows: list[int]) -> list[bool]:
        """Pages of the store into the pool. rows: first row of each page."""

    @abc.abstractmethod
    def _write(self, name: PoolName, pool: PagedHostPool, keys: Sequence[str], rows: list[int]) -> list[bool]:
        """Pages of the pool into the store."""

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
        for transfer in transfers:  # all of them are checked before the first page moves
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
    """Largest number of leading pages that the pool's policy allows. present: one a page of the prefix."""
    if transfer.hit_policy is PoolHitPolicy.ALL_PAGES:
        return _num_leading(present)
    window = max(1, len(transfer.keys or ()))
    boundary = run = 0
    for end, there in enumerate(present, 1):
        run = run + 1 if there else 0
        if run >= min(window, end):
            boundary = end
    return boundary


def _num_leading(present: Iterable[bool]) -> int:
    return sum(takewhile(bool, present))
