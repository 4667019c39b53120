"""A hybrid stack is built completely or not at all."""

import logging
import threading
from typing import ClassVar

import psutil
import pytest
import torch

from engine_cache import (
    HiRadixCache,
    HybridCacheController,
    InsertParams,
    Lane,
    PagedTokenToKVPoolAllocator,
    RadixKey,
    StackError,
    StoragePolicy,
    ThreadCopyEngine,
)
from engine_cache.pools.device import NSATokenToKVPool, PoolShape
from engine_cache.pools.host import MLATokenToKVPoolHost, NSAIndexerPoolHost
from engine_cache.stacks import (
    HostTierConfig,
    PoolSpec,
    build_hybrid_stack,
    build_nsa_hybrid_stack,
    nsa_pools,
)
from engine_cache.storage.base import PoolName
from kv_events.errors import InvalidValueError
from tests.rigs.cache_stores import MemoryStorage

pytestmark = pytest.mark.torch
PAGE, SIZE = 4, 32
KV, INDEXER = PoolName.KV, PoolName.INDEXER


def nsa_model(page_size=PAGE):
    return NSATokenToKVPool(PoolShape(SIZE, page_size, 2, torch.float16), 4, 3)


def hiradix(allocator):
    return lambda controller: HiRadixCache(page_size=PAGE, allocator=allocator, controller=controller)


class WatchedPools:
    """Records all host pools that are created with the given classes."""

    def __init__(self, monkeypatch, *classes):
        self.made = []
        for cls in classes:
            monkeypatch.setattr(cls, "__init__", self._watched(cls.__init__))

    def _watched(self, init):
        def watched(pool, *args, **options):
            self.made.append(pool)
            init(pool, *args, **options)

        return watched

    def held_bytes(self):
        return sum(held.nbytes for pool in self.made for held in pool.get_hybrid_pool_buffer())


class NoCache:
    """A cache that accepts a controller and refuses every store."""

    def __init__(self, controller):
        self.controller = controller

    def attach_store(self, backend, policy=None):
        raise InvalidValueError("store", backend, "not here")


def fail(*_args, **_options):
    raise RuntimeError("injected")


class ClosingStore(MemoryStorage):
    """Records whether it was closed."""

    is_closed = False

    def close(self):
        super().close()
        self.is_closed = True


class ClosingEngine(ThreadCopyEngine):
    """Starts its thread at once, and records whether it was closed."""

    made: ClassVar[list["ClosingEngine"]] = []
    is_closed = False

    def __init__(self):
        super().__init__()
        self.made.append(self)
        self.submit(Lane.WRITE, [lambda: None]).synchronize()

    def close(self):
        super().close()
        self.is_closed = True


FAILING_STEPS = {
    "host pools": (NSAIndexerPoolHost, "allocate"),
    "store": (ClosingStore, "__init__"),
    "copy engine": (ThreadCopyEngine, "__init__"),
    "controller": (HybridCacheController, "__init__"),
    "cache": (HiRadixCache, "__init__"),
    "attaching the store": (ClosingStore, "register_mem_host_pool_v2"),
}


@pytest.mark.parametrize("step", FAILING_STEPS)
def test_a_step_that_fails_is_reported_with_its_cause_and_leaves_nothing_behind(step, monkeypatch, caplog):
    pools = WatchedPools(monkeypatch, MLATokenToKVPoolHost, NSAIndexerPoolHost)
    stores, threads = [], threading.active_count()
    monkeypatch.setattr(ClosingEngine, "made", [])
    allocator = PagedTokenToKVPoolAllocator(SIZE, PAGE)

    def open_store():
        stores.append(ClosingStore())
        return stores[-1]

    monkeypatch.setattr(*FAILING_STEPS[step], fail)
    with caplog.at_level(logging.ERROR), pytest.raises(StackError, match=f"kv, indexer, {step}: .*injected") as raised:
        build_nsa_hybrid_stack(
            hiradix(allocator),
            nsa_model(),
            allocator,
            config=HostTierConfig(reserve_bytes=0),
            make_engine=ClosingEngine,
            open_store=open_store,
            policy=StoragePolicy(),
        )
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert str(raised.value.__cause__) == "injected"
    assert f"kv, indexer failed at: {step}" in caplog.text
    assert len(pools.made) == 2
    assert pools.held_bytes() == 0
    assert all(part.is_closed for part in (*stores, *ClosingEngine.made))  # type: ignore[attr-defined]
    assert threading.active_count() == threads


def test_a_cache_that_refuses_the_store_is_not_handed_out():
    allocator, store = PagedTokenToKVPoolAllocator(SIZE, PAGE), ClosingStore()
    with pytest.raises(StackError, match=r"attaching the store.*not here"):
        build_nsa_hybrid_stack(
            NoCache, nsa_model(), allocator, config=HostTierConfig(reserve_bytes=0), open_store=lambda: store
        )
    assert store.is_closed


def test_a_stack_that_is_closed_gives_memory_threads_and_store_back():
    allocator, store, threads = PagedTokenToKVPoolAllocator(SIZE, PAGE), ClosingStore(), threading.active_count()
    stack = build_nsa_hybrid_stack(
        hiradix(allocator), nsa_model(), allocator, config=HostTierConfig(reserve_bytes=0), open_store=lambda: store
    )
    stack.cache.insert(InsertParams(RadixKey(range(8)), allocator.alloc(8)))
    assert threading.active_count() > threads
    stack.close()
    stack.close()
    pools = [stack.token_to_kv_pool_host.get_pool(name) for name in (KV, INDEXER)]
    assert sum(held.nbytes for pool in pools for held in pool.get_hybrid_pool_buffer()) == 0  # type: ignore[attr-defined]
    assert store.is_closed
    assert threading.active_count() == threads


def test_pools_that_fit_one_by_one_but_not_together_are_no_stack(monkeypatch):
    allocator = PagedTokenToKVPoolAllocator(SIZE, PAGE)
    with build_nsa_hybrid_stack(
        hiradix(allocator), nsa_model(), allocator, config=HostTierConfig(reserve_bytes=0)
    ) as s:
        needed = [s.token_to_kv_pool_host.get_pool(name).required_bytes for name in (KV, INDEXER)]  # type: ignore[attr-defined]
    pools = WatchedPools(monkeypatch, MLATokenToKVPoolHost, NSAIndexerPoolHost)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": sum(needed) + 99}))
    with pytest.raises(StackError, match="memory of host pool kv, indexer") as raised:
        build_nsa_hybrid_stack(hiradix(allocator), nsa_model(), allocator, config=HostTierConfig(reserve_bytes=100))
    assert isinstance(raised.value.__cause__, InvalidValueError)
    assert pools.held_bytes() == 0


@pytest.mark.parametrize("layers", [{0: 0, 3: 1}, {0: 0}, {0: 0, 1: 0}, {0: 0, 1: 2}])
def test_layers_that_would_never_be_copied_are_refused(layers):
    allocator = PagedTokenToKVPoolAllocator(SIZE, PAGE)
    kv, index = nsa_pools(nsa_model(), allocator)
    kv = PoolSpec(KV, kv.make_host_pool, kv.device_pool, allocator, layers)
    with pytest.raises(StackError, match=r"controller: layers of pool kv|controller: layers that no pool"):
        build_hybrid_stack([kv, index], hiradix(allocator), config=HostTierConfig(reserve_bytes=0))


def test_a_list_without_pools_or_with_a_pool_twice_is_no_stack():
    allocator = PagedTokenToKVPoolAllocator(SIZE, PAGE)
    kv, _ = nsa_pools(nsa_model(), allocator)
    for specs in ([], [kv, kv]):
        with pytest.raises(StackError, match="at least one pool, each name once"):
            build_hybrid_stack(specs, hiradix(allocator), config=HostTierConfig(reserve_bytes=0))
