"""Hybrid stacks: a cache, its controller and the host pools of all kinds of state of a model.

    PoolSpec, PoolSpec, ... ── build_hybrid_stack ──> HybridStack: cache ── controller ── group ── host pools
                                                                      └──── store         └─ copy engine

A model is described by a list of `PoolSpec`, the anchor first. `pools_of` creates it for the known kinds of models; a
new kind needs only such a list. If a step fails, everything built before is closed. Modules that import torch are
imported when a stack is built.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypedDict, TypeVar, Unpack

from engine_cache.errors import StackError
from engine_cache.pools.entry import HostPool, HostPoolGroup, PoolEntry, RowAllocator
from engine_cache.storage.base import HiCacheStorage, PoolName
from engine_cache.storage.operations import StoragePolicy
from engine_cache.tiers.copying import CopyEngine
from engine_cache.tiers.transfer import HybridCacheController
from kv_events.errors import InvalidValueError

if TYPE_CHECKING:
    from engine_cache.pools.device import HybridLinearKVPool, NSATokenToKVPool, SWAKVPool
    from engine_cache.pools.mamba import HybridReqToTokenPool

logger = logging.getLogger(__name__)


class TieredCache(Protocol):
    def attach_store(self, backend: HiCacheStorage, policy: StoragePolicy | None = None) -> None:
        """Attach a storage backend to a cache without one. Raises if that fails."""


CacheT = TypeVar("CacheT", bound=TieredCache)


@dataclass(frozen=True, slots=True)
class HostTierConfig:
    """Sizes and layout of the host pools of a stack."""

    ratio: float = 2.0
    """Host rows per device row, in each pool."""
    host_size_gb: float = 0.0
    """Size of the anchor's pool, instead of `ratio`. Other pools with rows of their own get the resulting ratio."""
    layout: str = "layer_first"
    reserve_bytes: int | None = None
    """Memory that all pools together must leave free. Defaults to `KVSIGHT_HOST_MEMORY_RESERVE_BYTES`."""


@dataclass(frozen=True, slots=True)
class PoolSpec:
    name: PoolName
    make_host_pool: Callable[..., Any]
    """Class of the host pool. Called with the device pool, the anchor's host pool if rows are shared, and options."""
    device_pool: Any
    device_allocator: RowAllocator
    layers: Mapping[int, int]
    """Layer of the model -> layer of the pool."""
    share_indices_with_anchor: bool = False


class StackOptions(TypedDict, total=False):
    config: HostTierConfig
    make_engine: Callable[[], CopyEngine]
    """Defaults to CUDA streams, or threads for other devices."""
    open_store: Callable[[], HiCacheStorage]
    """Opens the storage backend to attach, which is closed with the stack. No backend by default."""
    policy: StoragePolicy


class HybridStack(Generic[CacheT]):
    """A cache with its controller and pools. `close` or the end of the context waits for copies and releases all."""

    def __init__(self, cache: CacheT, controller: HybridCacheController, opened: ExitStack) -> None:
        self.cache = cache
        self.cache_controller = controller
        self.token_to_kv_pool_host: HostPoolGroup = controller.group
        self.full_kv_pool_host: HostPool = controller.kv.host_pool
        self._opened = opened

    def close(self) -> None:
        """Close the stack; the cache must not be used afterwards. Closing twice is harmless."""
        self._opened.close()

    def __enter__(self) -> HybridStack[CacheT]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def build_nsa_hybrid_stack(
    make_cache: Callable[[HybridCacheController], CacheT],
    kv_pool: NSATokenToKVPool,
    allocator: RowAllocator,
    **options: Unpack[StackOptions],
) -> HybridStack[CacheT]:
    """Build the stack of a model with sparse attention: compressed KV and its index. See `build_hybrid_stack`."""
    return build_hybrid_stack(nsa_pools(kv_pool, allocator), make_cache, **options)


def build_mamba_hybrid_stack(
    make_cache: Callable[[HybridCacheController], CacheT],
    kv_pool: HybridLinearKVPool,
    req_pool: HybridReqToTokenPool,
    allocator: RowAllocator,
    **options: Unpack[StackOptions],
) -> HybridStack[CacheT]:
    """Build the stack of a model with recurrent layers: KV and recurrent states. See `build_hybrid_stack`."""
    return build_hybrid_stack(mamba_pools(kv_pool, req_pool, allocator), make_cache, **options)


def nsa_pools(kv_pool: NSATokenToKVPool, allocator: RowAllocator) -> list[PoolSpec]:
    """Compressed KV and INDEXER on the same rows, in every layer."""
    from engine_cache.pools.host import NSAIndexerPoolHost

    layers = {layer: layer for layer in range(kv_pool.shape.layer_num)}
    return [
        _rows_of_kv(PoolName.KV, kv_pool, allocator, layers),
        PoolSpec(PoolName.INDEXER, NSAIndexerPoolHost, kv_pool, allocator, layers, share_indices_with_anchor=True),
    ]


def mamba_pools(kv_pool: HybridLinearKVPool, req_pool: HybridReqToTokenPool, allocator: RowAllocator) -> list[PoolSpec]:
    """KV of the attention layers, and MAMBA."""
    from engine_cache.pools.host import MambaPoolHost

    full_layers = kv_pool.full_attention_layer_id_mapping
    return [
        _rows_of_kv(PoolName.KV, kv_pool.full_kv_pool, allocator, full_layers),
        PoolSpec(PoolName.MAMBA, MambaPoolHost, req_pool.mamba_pool, req_pool.mamba_allocator, req_pool.mamba_map),
    ]


def swa_pools(kv_pool: SWAKVPool, full_allocator: RowAllocator, swa_allocator: RowAllocator) -> list[PoolSpec]:
    """KV of the layers with full attention and SWA of those with a window, each with its own rows."""
    return [
        _rows_of_kv(PoolName.KV, kv_pool.full_kv_pool, full_allocator, kv_pool.full_layers),
        _rows_of_kv(PoolName.SWA, kv_pool.swa_kv_pool, swa_allocator, kv_pool.swa_layers),
    ]


def pools_of(
    kv_pool: object,
    allocator: RowAllocator,
    *,
    req_pool: HybridReqToTokenPool | None = None,
    swa_allocator: RowAllocator | None = None,
) -> list[PoolSpec]:
    """Return the pools of the kind of model with this KV pool and, optionally, recurrent states (req_pool) or windows
    (swa_allocator). Raises InvalidValueError, with pool and components, for an unknown kind.
    """
    from engine_cache.pools.device import (
        HybridLinearKVPool,
        MHATokenToKVPool,
        MLATokenToKVPool,
        NSATokenToKVPool,
        SWAKVPool,
    )  # fmt: skip

    match kv_pool, req_pool, swa_allocator:
        case HybridLinearKVPool(), req_pool, None if req_pool is not None:
            return mamba_pools(kv_pool, req_pool, allocator)
        case SWAKVPool(), None, swa_allocator if swa_allocator is not None:
            return swa_pools(kv_pool, allocator, swa_allocator)
        case NSATokenToKVPool(), None, None:
            return nsa_pools(kv_pool, allocator)
        case MHATokenToKVPool() | MLATokenToKVPool(), None, None:
            layers = {layer: layer for layer in range(kv_pool.shape.layer_num)}
            return [_rows_of_kv(PoolName.KV, kv_pool, allocator, layers)]
    components = {"full": allocator, "mamba": req_pool, "swa": swa_allocator}
    named = [name for name, part in components.items() if part is not None]
    raise InvalidValueError(f"components of a {type(kv_pool).__name__}", named, "those of a known kind of model")


def build_hybrid_stack(
    specs: Sequence[PoolSpec], make_cache: Callable[[HybridCacheController], CacheT], **options: Unpack[StackOptions]
) -> HybridStack[CacheT]:
    """Build the host pools of all specs (the first is the anchor's), a copy engine, a controller and the cache, and
    attach a storage backend.

    The memory of all pools is checked together before any is allocated. Raises StackError with the name of the failed
    step and its cause; nothing stays open or allocated then.
    """
    config = options.get("config", HostTierConfig())
    step = "host pools"
    with ExitStack() as opened:
        try:
            group = _host_pools(specs, config, opened)
            step = "store"
            store = options["open_store"]() if "open_store" in options else None
            if store is not None:
                opened.callback(store.close)
            step = "copy engine"
            engine = _engine(specs, options)
            opened.callback(engine.close)
            step = "controller"
            num_layers = len({layer for spec in specs for layer in spec.layers})
            controller = HybridCacheController(group, engine, transfer_layer_num=num_layers)
            step = "cache"
            cache = make_cache(controller)
            step = "attaching the store"
            if store is not None:
                cache.attach_store(store, options.get("policy"))
        except Exception as error:
            names = ", ".join(spec.name.value for spec in specs)
            logger.exception("building the stack of pools %s failed at: %s", names, step)
            raise StackError(f"stack of pools {names}, {step}: {error}") from error
        return HybridStack(cache, controller, opened.pop_all())


def _host_pools(specs: Sequence[PoolSpec], config: HostTierConfig, opened: ExitStack) -> HostPoolGroup:
    from engine_cache.pools.host import allocate_host_pools

    entries: list[PoolEntry] = []
    for spec in specs:
        pool = _planned_host_pool(spec, entries[0] if entries else None, config)
        entry = PoolEntry(spec.name, pool, spec.device_pool, spec.device_allocator, spec.layers.get)
        entry.is_primary_index_anchor = not entries
        entry.share_indices_with_anchor = spec.share_indices_with_anchor
        entries.append(entry)
    group = HostPoolGroup(entries)
    pools: list[Any] = [entry.host_pool for entry in entries]
    allocate_host_pools(pools, config.reserve_bytes)
    for pool in pools:
        opened.callback(pool.release)
    return group


def _planned_host_pool(spec: PoolSpec, anchor: PoolEntry | None, config: HostTierConfig) -> HostPool:
    size: dict[str, Any] = {"ratio": config.ratio}
    if anchor is None:
        size["host_size_gb"] = config.host_size_gb
    elif spec.share_indices_with_anchor:
        size = {"anchor": anchor.host_pool}
    elif config.host_size_gb:
        size["ratio"] = anchor.host_pool.size / anchor.device_allocator.size
    make: Callable[..., HostPool] = spec.make_host_pool
    return make(spec.device_pool, name=spec.name.value, layout=config.layout, allocate=False, **size)


def _rows_of_kv(name: PoolName, pool: Any, allocator: RowAllocator, layers: Mapping[int, int]) -> PoolSpec:
    from engine_cache.pools.host import HostKVPool

    return PoolSpec(name, HostKVPool, pool, allocator, layers)


def _engine(specs: Sequence[PoolSpec], options: StackOptions) -> CopyEngine:
    if "make_engine" in options:
        return options["make_engine"]()
    from engine_cache.tiers.cuda import copy_engine_for

    return copy_engine_for(specs[0].device_pool.shape.device)
