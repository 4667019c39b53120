"""A hybrid stack is built completely or not at all. Its parts and its sizes."""

import logging
import threading
from typing import Any, ClassVar

import psutil
import pytest
import torch

from engine_cache import (
    HiRadixCache,
    HybridCacheController,
    InsertParams,
    Lane,
    MambaSlotAllocator,
    ManualCopyEngine,
    PagedTokenToKVPoolAllocator,
    RadixKey,
    StackError,
    StoragePolicy,
    ThreadCopyEngine,
)
from engine_cache.pools.device import HybridLinearKVPool, MHATokenToKVPool, NSATokenToKVPool, PoolShape, SWAKVPool
from engine_cache.pools.host import HOST_LAYOUTS, MLATokenToKVPoolHost, NSAIndexerPoolHost
from engine_cache.pools.mamba import HybridReqToTokenPool, MambaPool
from engine_cache.stacks import (
    HostTierConfig,
    build_hybrid_stack,
    build_mamba_hybrid_stack,
    build_nsa_hybrid_stack,
    nsa_pools,
    pools_of,
)
from engine_cache.storage.base import PoolName, PoolTransfer
from kv_events.errors import InvalidValueError
from tests.rigs.cache_stores import MemoryStorage

PAGE, SIZE, SLOTS = 4, 32, 6
KV, INDEXER, MAMBA, SWA = PoolName.KV, PoolName.INDEXER, PoolName.MAMBA, PoolName.SWA
SHAPE = PoolShape(SIZE, PAGE, 2, torch.float16)
SMALL = HostTierConfig(reserve_bytes=0)


@pytest.fixture
def rows():
    return PagedTokenToKVPoolAllocator(SIZE, PAGE)


def nsa_model():
    return NSATokenToKVPool(SHAPE, 4, 3)


def recurrent_model():
    """Return KV of attention layers 1 and 2, and the requests with the states of layers 0 and 3."""
    states, slots = MambaPool(SLOTS, 2, [(3, 2), (5,)], (2, 1, 3)), MambaSlotAllocator(SLOTS)
    requests = HybridReqToTokenPool(2, 64, mamba_pool=states, mamba_allocator=slots, mamba_map={0: 0, 3: 1})
    return HybridLinearKVPool(MHATokenToKVPool(SHAPE, 3, 5), [1, 2]), requests


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
def test_a_step_that_fails_is_reported_with_its_cause_and_leaves_nothing_behind(rows, step, monkeypatch, caplog):
    pools = WatchedPools(monkeypatch, MLATokenToKVPoolHost, NSAIndexerPoolHost)
    stores, threads = [], threading.active_count()
    monkeypatch.setattr(ClosingEngine, "made", [])

    def open_store():
        stores.append(ClosingStore())
        return stores[-1]

    monkeypatch.setattr(*FAILING_STEPS[step], fail)
    with caplog.at_level(logging.ERROR), pytest.raises(StackError, match=f"kv, indexer, {step}: .*injected") as raised:
        build_nsa_hybrid_stack(
            hiradix(rows),
            nsa_model(),
            rows,
            config=SMALL,
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


def test_a_cache_that_refuses_the_store_is_not_handed_out(rows):
    store = ClosingStore()
    with pytest.raises(StackError, match=r"attaching the store.*not here"):
        build_nsa_hybrid_stack(NoCache, nsa_model(), rows, config=SMALL, open_store=lambda: store)
    assert store.is_closed


def test_a_stack_that_is_closed_gives_memory_threads_and_store_back(rows):
    store, threads = ClosingStore(), threading.active_count()
    stack = build_nsa_hybrid_stack(hiradix(rows), nsa_model(), rows, config=SMALL, open_store=lambda: store)
    stack.cache.insert(InsertParams(RadixKey(range(8)), rows.alloc(8)))
    assert threading.active_count() > threads
    stack.close()
    stack.close()
    pools = [stack.token_to_kv_pool_host.get_pool(name) for name in (KV, INDEXER)]
    assert sum(held.nbytes for pool in pools for held in pool.get_hybrid_pool_buffer()) == 0  # type: ignore[attr-defined]
    assert store.is_closed
    assert threading.active_count() == threads


def test_pools_that_fit_one_by_one_but_not_together_are_no_stack(rows, monkeypatch):
    with build_nsa_hybrid_stack(hiradix(rows), nsa_model(), rows, config=SMALL) as s:
        needed = [s.token_to_kv_pool_host.get_pool(name).required_bytes for name in (KV, INDEXER)]  # type: ignore[attr-defined]
    pools = WatchedPools(monkeypatch, MLATokenToKVPoolHost, NSAIndexerPoolHost)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": sum(needed) + 99}))
    with pytest.raises(StackError, match="memory of host pool kv, indexer") as raised:
        build_nsa_hybrid_stack(hiradix(rows), nsa_model(), rows, config=HostTierConfig(reserve_bytes=100))
    assert isinstance(raised.value.__cause__, InvalidValueError)
    assert pools.held_bytes() == 0


def test_a_list_without_pools_or_with_a_pool_twice_is_no_stack(rows):
    kv, _ = nsa_pools(nsa_model(), rows)
    for specs in ([], [kv, kv]):
        with pytest.raises(StackError, match="at least one pool, each name once"):
            build_hybrid_stack(specs, hiradix(rows), config=SMALL)


# --- parts and sizes ---


@pytest.mark.parametrize(
    ("config", "kv_rows", "states"),
    [
        (HostTierConfig(ratio=1.5, reserve_bytes=0), 52, 10),
        # KV of 120 bytes a row: 80 rows and a page; as many states a slot as that is rows a row, and one
        (HostTierConfig(ratio=9.0, host_size_gb=80 * 120 / 1e9, reserve_bytes=0), 84, 16),
    ],
)
def test_a_stack_has_its_group_and_pools_with_rows_of_their_own_grow_with_kv(rows, config, kv_rows, states):
    kv, requests = recurrent_model()
    stack = build_mamba_hybrid_stack(NoCache, kv, requests, rows, config=config)
    group = stack.token_to_kv_pool_host
    assert stack.cache.controller is stack.cache_controller
    assert group is stack.cache_controller.group
    assert stack.full_kv_pool_host is group.get_pool(KV)
    assert stack.cache_controller.transfer_layer_num == 4
    assert (group.get_pool(KV).size, group.get_pool(MAMBA).size) == (kv_rows, states)
    stack.close()


def test_the_kind_of_model_follows_from_its_pool_and_components(rows):
    mha, (linear, requests), others = (
        MHATokenToKVPool(SHAPE, 1, 2),
        recurrent_model(),
        PagedTokenToKVPoolAllocator(16, 4),
    )
    window = SWAKVPool(mha, MHATokenToKVPool(SHAPE, 2, 2), [1, 3], [0, 2])

    def names(*args, **parts):
        return [spec.name for spec in pools_of(*args, **parts)]

    assert names(mha, rows) == [KV]
    assert names(nsa_model(), rows) == [KV, INDEXER]
    assert names(linear, rows, req_pool=requests) == [KV, MAMBA]
    assert names(window, rows, swa_allocator=others) == [KV, SWA]
    for pool, parts in [(mha, {"req_pool": requests}), (linear, {}), (window, {"req_pool": requests})]:
        expected = rf"components of a {type(pool).__name__}: got \['full'{', .mamba.' if parts else ''}\]"
        with pytest.raises(InvalidValueError, match=expected):
            pools_of(pool, rows, **parts)


# --- bytes ---


def swa_model(rows):
    """Return KV of two layers with full attention and three with a window, and the allocator of the window's rows."""
    window = MHATokenToKVPool(PoolShape(SIZE, PAGE, 3, torch.float32), 1, 5)
    windows = PagedTokenToKVPoolAllocator(SIZE, PAGE)
    return pools_of(SWAKVPool(MHATokenToKVPool(SHAPE, 2, 3), window, [1, 3], [0, 2, 4]), rows, swa_allocator=windows)


MODELS: dict[str, Any] = {
    "mha": lambda rows: pools_of(MHATokenToKVPool(SHAPE, 2, 3), rows),
    "nsa": lambda rows: pools_of(nsa_model(), rows),
    "swa": swa_model,
    "recurrent": lambda rows: pools_of(recurrent_model()[0], rows, req_pool=recurrent_model()[1]),
}


def tensors(entry, rows):
    """Return (tensor, index along its first axis) of all device data of these rows or slots."""
    pool = entry.device_pool
    if entry.name is MAMBA:
        return [(held.transpose(0, 1), rows) for held in pool.mamba_cache.tensors()]
    if entry.name is INDEXER:
        return [(held, rows[::PAGE] // PAGE) for held in pool.index_k_with_scale_buffer]
    is_latent = isinstance(pool, NSATokenToKVPool)
    return [(held, rows) for held in (pool.kv_buffer if is_latent else (*pool.k_buffer, *pool.v_buffer))]


@pytest.mark.parametrize("layout", HOST_LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_what_was_backed_up_comes_back_bit_for_bit(rows, model, layout):
    config = HostTierConfig(layout=layout, reserve_bytes=0)
    with build_hybrid_stack(MODELS[model](rows), NoCache, config=config, make_engine=ManualCopyEngine) as stack:
        controller, entries = stack.cache_controller, stack.cache_controller.group.entries
        sizes = {KV: 2 * PAGE, SWA: 2 * PAGE, MAMBA: 3}
        own = {name: entries[name].device_allocator.alloc(sizes[name]) for name in entries.keys() & sizes}
        held = [part for name, entry in entries.items() for part in tensors(entry, own.get(name, own[KV]))]
        for tensor, index in held:
            tensor[index] = torch.randint(1, 100, tensor[index].shape).to(tensor.dtype)
        before = [tensor[index].clone() for tensor, index in held]
        extras = [PoolTransfer(name, device_indices=taken) for name, taken in own.items() if name is not KV]
        host_rows = controller.write(own[KV], 0, extras)
        controller.engine.drain()
        for tensor, _ in held:
            tensor.zero_()
        back = [PoolTransfer(each.name, host_indices=each.host_indices) for each in extras]
        loaded = {KV: controller.load(host_rows, 1, back)} | {each.name: each.device_indices for each in back}
        controller.wait_for_layer(controller.start_loading(), controller.transfer_layer_num - 1)
        assert set(loaded[KV]).isdisjoint(own[KV])
        after = [part for name, entry in entries.items() for part in tensors(entry, loaded.get(name, loaded[KV]))]
        assert all(torch.equal(tensor[index], one) for (tensor, index), one in zip(after, before, strict=True))
