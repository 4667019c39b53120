"""The caches of simulated workers: pools without bytes, tiers, states.

An engine with tiers takes these steps before and after it serves a request. Copies take no time here: every copy has
ended when a method returns.

    match ── prefetch ──> host ── load back ──> device      before: find(), on any tier
    insert ── backup ──> host ── archive ──> disk           after: settle()
"""

import math
from collections.abc import Sequence
from itertools import count
from threading import Lock
from typing import Any, ClassVar, NamedTuple

import numpy as np

from engine_cache import (
    BytelessHostPool,
    EvictParams,
    HiCacheController,
    HiMambaRadixCache,
    HiRadixCache,
    HostPoolGroup,
    HybridCacheController,
    IndexArray,
    InitLoadBackParams,
    InsertParams,
    MambaRadixCache,
    MambaSlotAllocator,
    ManualCopyEngine,
    MatchPrefixParams,
    PagedTokenToKVPoolAllocator,
    PoolEntry,
    RadixCache,
    RadixKey,
    StoragePolicy,
    TreeCache,
    TreeNode,
)
from engine_cache.pools.allocators import host_pool_size
from engine_cache.storage import HiCacheStorage, PagedHostPool, PoolName
from engine_cache.tree.node import path_down
from kv_events.errors import check_positive
from kv_events.hashing import U64Array
from kv_events.schema import MEDIA, StorageMedium
from simulation.settings import SimulationSettings

_TOKENS_PER_STATE = 512  # a state is as large as the KV of a few hundred tokens, so there are few of them
_MIN_STATES = 8
_CHUNK_TOKENS = 64  # an engine saves states only between chunks


class Found(NamedTuple):
    """The prefix that a request can reuse."""

    rows: IndexArray
    """Device rows of the prefix, owned by the tree."""
    node: TreeNode
    """Node at the end of the prefix."""
    branching_seqlen: int | None = None
    """As in `MatchResult`, if KV continues without a state."""


class BytelessStore(HiCacheStorage):
    """A disk without bytes, which keeps the keys of the most recently used pages.

    Other data of a page, such as a state, is evicted with it. capacity_pages: pages of KV. Thread-safe. Raises
    InvalidValueError for a capacity below 1.
    """

    medium: ClassVar[StorageMedium] = StorageMedium.DISK
    needs_bytes: ClassVar[bool] = False

    def __init__(self, capacity_pages: int) -> None:
        check_positive(capacity_pages=capacity_pages)
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


class Tiers:
    """A cache's copy engine and its storage backend, which is attached here and announced like the other tiers."""

    def __init__(self, cache: TreeCache, engine: ManualCopyEngine, store: BytelessStore) -> None:
        self.store = store
        self._cache = cache
        self._engine = engine
        self._request_ids = count()
        cache.attach_store(store, StoragePolicy(emit_storage_events=True))

    def find(self, key: RadixKey) -> Found:
        """Return the cached prefix of a prompt, after copying it to the device as far as there is room."""
        match = self._cache.match_prefix(MatchPrefixParams(key))
        if self._prefetch(key, match.last_host_node):
            match = self._cache.match_prefix(MatchPrefixParams(key))
        rows, node = match.device_indices, match.last_device_node
        if match.host_hit_length or match.mamba_host_hit_length:
            loaded, node = self._cache.init_load_back(InitLoadBackParams(match.best_match_node, match.host_hit_length))
            self._cache.ready_to_load_host_cache()
            self.settle()
            rows = np.concatenate((rows, loaded))
        return Found(rows[: _prefix_len(node)], node, match.mamba_branching_seqlen)

    def settle(self) -> None:
        """Finish copies and update the tree, twice, because a finished backup starts an archive."""
        for _ in range(2):
            self._engine.drain()
            self._cache.check_hicache_events()

    def on_disk(self) -> tuple[U64Array, int]:
        """Return the sequence hashes of the pages on disk, and the number of pages there that were not announced."""
        keys, announced = self.store.held_keys(), dict(self._cache.iter_announced())
        words = b"".join(event.sequence_hashes for key, event in announced.items() if key in keys)
        return np.frombuffer(words, "<u8").astype(np.uint64), len(keys - announced.keys())

    def _prefetch(self, key: RadixKey, start_node: TreeNode) -> bool:
        """Prefetch the pages on disk that follow the prefix of the start node. Returns whether there were any."""
        req_id, rest = str(next(self._request_ids)), key[_prefix_len(start_node) :]
        self._cache.prefetch_from_storage(req_id, start_node, rest.raw, extra_key=key.extra_key)
        self.settle()  # a prefetch that found too little has ended
        self._cache.check_prefetch_progress(req_id)
        return self._cache.pop_prefetch_loaded_tokens(req_id) > 0


def _prefix_len(node: TreeNode) -> int:
    return sum(len(each.key) for each in path_down(node, lambda _: True))


class States:
    """The state slots of a cache for a model with recurrent layers."""

    def __init__(self, cache: TreeCache, slots: MambaSlotAllocator) -> None:
        self._cache = cache
        self._slots = slots
        self.most_running = slots.size // 2
        """Requests that may run at the same time: each locks one state."""

    def insert(self, key: RadixKey, rows: IndexArray, num_found: int, ends: set[int]) -> None:
        """Insert the key with a state at its end and, if slots are available, at each of `ends`.

        rows: one for each unit. The tree owns the first `num_found` and becomes the owner of the others.
        """
        lengths = sorted({end for end in ends if num_found < end < len(key)} | {len(key)})
        # all slots first: an eviction for one must not remove what the previous insert has added
        slots = self._allocate(len(lengths))
        for length, slot in zip(lengths[len(lengths) - len(slots) :], slots, strict=True):
            state = slot.reshape(1)
            params = InsertParams(key[:length], rows[:length], mamba_value=state, prev_prefix_len=num_found)
            if self._cache.insert(params).mamba_exist:
                self._slots.free(state)
            num_found = max(num_found, length)

    def _allocate(self, wanted: int) -> IndexArray:
        missing = wanted - self._slots.available_size()
        if missing > 0:
            self._cache.evict(EvictParams(0, mamba_num=missing))
        slots = self._slots.alloc(min(wanted, self._slots.available_size()))
        assert slots is not None, "the request fits into the free slots"
        return slots


class WorkerCache(NamedTuple):
    """A cache with its tiers and states."""

    cache: TreeCache
    allocator: PagedTokenToKVPoolAllocator
    tiers: Tiers | None = None
    """None if the cache has only the device."""
    states: States | None = None
    """None if the model has no recurrent layers."""


def create_cache(settings: SimulationSettings) -> WorkerCache:
    """Return an empty cache of the kind `settings.cache`."""
    allocator = PagedTokenToKVPoolAllocator(settings.capacity_tokens, settings.page_size)
    options: dict[str, Any] = {
        "page_size": settings.page_size,
        "allocator": allocator,
        "enable_kv_cache_events": True,
        "emit_group_events": settings.groups,
    }
    slots = None
    if settings.has_states:
        slots = MambaSlotAllocator(max(_MIN_STATES, settings.capacity_tokens // _TOKENS_PER_STATE))
        options |= {
            "mamba_allocator": slots,
            "enable_mamba_extra_buffer": True,
            "mamba_cache_chunk_size": math.lcm(_CHUNK_TOKENS, settings.page_size),
        }
    tiers = None
    if settings.has_tiers:
        engine = ManualCopyEngine()
        tiered = HiMambaRadixCache if slots else HiRadixCache
        cache: TreeCache = tiered(controller=_controller(settings, allocator, slots, engine), **options)
        tiers = Tiers(cache, engine, BytelessStore(_disk_pages(settings)))
    else:
        cache = (MambaRadixCache if slots else RadixCache)(**options)
    return WorkerCache(cache, allocator, tiers, States(cache, slots) if slots else None)


def _controller(
    settings: SimulationSettings,
    allocator: PagedTokenToKVPoolAllocator,
    slots: MambaSlotAllocator | None,
    engine: ManualCopyEngine,
) -> HybridCacheController:
    host = BytelessHostPool(_host_rows(settings), settings.page_size)
    kv = PoolEntry(PoolName.KV, host, None, allocator)
    if slots is None:
        return HiCacheController(kv, engine)
    host_slots = BytelessHostPool(host_pool_size(slots.size, 1, 1, ratio=settings.host_ratio), 1)
    return HybridCacheController(HostPoolGroup.of(kv, PoolEntry(PoolName.MAMBA, host_slots, None, slots)), engine)


def capacity_pages(settings: SimulationSettings) -> dict[str, int]:
    """Return the pages for which a worker has room, by medium."""
    pages = [settings.capacity_tokens // settings.page_size]
    if settings.has_tiers:
        pages += [_host_rows(settings) // settings.page_size, _disk_pages(settings)]
    return {medium.value: number for medium, number in zip(MEDIA, pages, strict=False)}


def _host_rows(settings: SimulationSettings) -> int:
    return host_pool_size(settings.capacity_tokens, settings.page_size, 1, ratio=settings.host_ratio)


def _disk_pages(settings: SimulationSettings) -> int:
    return math.ceil(settings.capacity_tokens * settings.disk_ratio / settings.page_size)
