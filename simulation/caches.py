"""Construction of the caches of simulated workers: pools without bytes, tiers, states."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from engine_cache import (
    BytelessHostPool,
    HiCacheController,
    HiMambaRadixCache,
    HiRadixCache,
    HostPoolGroup,
    HybridCacheController,
    MambaRadixCache,
    MambaSlotAllocator,
    ManualCopyEngine,
    PagedTokenToKVPoolAllocator,
    PoolEntry,
    RadixCache,
    TreeCache,
)
from engine_cache.pools.host_rows import host_pool_size
from engine_cache.storage import PoolName
from simulation.byteless_store import BytelessStore
from simulation.settings import SimulationSettings
from simulation.states import States
from simulation.tiers import Tiers

_TOKENS_PER_STATE = 512  # a state is as large as the KV of a few hundred tokens, so there are few of them
_MIN_STATES = 8
_CHUNK_TOKENS = 64  # an engine saves states only between chunks


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
    return _CREATE[settings.cache](settings, allocator)


def num_ledger_pages(settings: SimulationSettings) -> int:
    """Return the number of pages that a worker can hold on all tiers together."""
    pages = settings.capacity_tokens // settings.page_size
    if settings.has_tiers:
        pages += _host_rows(settings) // settings.page_size + _disk_pages(settings)
    return pages


def _radix(settings: SimulationSettings, allocator: PagedTokenToKVPoolAllocator) -> WorkerCache:
    return WorkerCache(
        RadixCache(page_size=settings.page_size, allocator=allocator, enable_kv_cache_events=True), allocator
    )


def _hiradix(settings: SimulationSettings, allocator: PagedTokenToKVPoolAllocator) -> WorkerCache:
    engine = ManualCopyEngine()
    cache = HiRadixCache(
        page_size=settings.page_size,
        allocator=allocator,
        controller=HiCacheController(_kv_entry(settings, allocator), engine),
        enable_kv_cache_events=True,
    )
    return WorkerCache(cache, allocator, Tiers(cache, engine, BytelessStore(_disk_pages(settings))))


def _mamba(settings: SimulationSettings, allocator: PagedTokenToKVPoolAllocator) -> WorkerCache:
    slots = MambaSlotAllocator(_num_states(settings))
    cache = MambaRadixCache(
        page_size=settings.page_size,
        allocator=allocator,
        mamba_allocator=slots,
        enable_mamba_extra_buffer=True,
        mamba_cache_chunk_size=_chunk_tokens(settings),
        enable_kv_cache_events=True,
        emit_group_events=settings.groups,
    )
    return WorkerCache(cache, allocator, None, States(cache, slots))


def _himamba(settings: SimulationSettings, allocator: PagedTokenToKVPoolAllocator) -> WorkerCache:
    slots, engine = MambaSlotAllocator(_num_states(settings)), ManualCopyEngine()
    host_slots = BytelessHostPool(host_pool_size(slots.size, 1, 1, ratio=settings.host_ratio), 1)
    states = PoolEntry(PoolName.MAMBA, host_slots, None, slots)
    cache = HiMambaRadixCache(
        page_size=settings.page_size,
        allocator=allocator,
        mamba_allocator=slots,
        controller=HybridCacheController(HostPoolGroup.of(_kv_entry(settings, allocator), states), engine),
        enable_mamba_extra_buffer=True,
        mamba_cache_chunk_size=_chunk_tokens(settings),
        enable_kv_cache_events=True,
        emit_group_events=settings.groups,
    )
    tiers = Tiers(cache, engine, BytelessStore(_disk_pages(settings)))
    return WorkerCache(cache, allocator, tiers, States(cache, slots))


_CREATE: dict[str, Callable[[SimulationSettings, PagedTokenToKVPoolAllocator], WorkerCache]] = {
    "radix": _radix,
    "hiradix": _hiradix,
    "mamba": _mamba,
    "himamba": _himamba,
}


def _kv_entry(settings: SimulationSettings, allocator: PagedTokenToKVPoolAllocator) -> PoolEntry:
    return PoolEntry(PoolName.KV, BytelessHostPool(_host_rows(settings), settings.page_size), None, allocator)


def _host_rows(settings: SimulationSettings) -> int:
    return host_pool_size(settings.capacity_tokens, settings.page_size, 1, ratio=settings.host_ratio)


def _disk_pages(settings: SimulationSettings) -> int:
    return math.ceil(settings.capacity_tokens * settings.disk_ratio / settings.page_size)


def _num_states(settings: SimulationSettings) -> int:
    return max(_MIN_STATES, settings.capacity_tokens // _TOKENS_PER_STATE)


def _chunk_tokens(settings: SimulationSettings) -> int:
    return math.lcm(_CHUNK_TOKENS, settings.page_size)
