"""The parts of a hybrid stack, and the round trip of each kind of state."""

from typing import Any

import pytest
import torch

from engine_cache import (
    EvictParams,
    HiMambaRadixCache,
    InitLoadBackParams,
    InsertParams,
    MambaSlotAllocator,
    ManualCopyEngine,
    MatchPrefixParams,
    PagedTokenToKVPoolAllocator,
    RadixKey,
)
from engine_cache.pools.device import (
    HybridLinearKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    NSATokenToKVPool,
    PoolShape,
    SWAKVPool,
)
from engine_cache.pools.host import HOST_LAYOUTS
from engine_cache.pools.mamba import HybridReqToTokenPool, MambaPool
from engine_cache.stacks import (
    HostTierConfig,
    build_hybrid_stack,
    build_mamba_hybrid_stack,
    pools_of,
    swa_pools,
)
from engine_cache.storage.base import PoolName, PoolTransfer
from kv_events.errors import InvalidValueError

pytestmark = pytest.mark.torch
PAGE, SIZE, SLOTS = 4, 32, 6
KV, MAMBA, SWA = PoolName.KV, PoolName.MAMBA, PoolName.SWA


def filled(*tensors):
    for seed, tensor in enumerate(tensors):
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
        tensor.copy_((noise * 100).to(tensor.dtype))


def requests_of(states, slots):
    return HybridReqToTokenPool(2, 64, mamba_pool=states, mamba_allocator=slots, mamba_map={0: 0, 3: 1})


class Mamba:
    """A stack with recurrent layers 0 and 3 and attention layers 1 and 2, and the bytes of rows and slots."""

    def __init__(self, *, use_mla=False, **options):
        shape = PoolShape(SIZE, PAGE, 2, torch.float16)
        self.kv = MLATokenToKVPool(shape, 4, 3) if use_mla else MHATokenToKVPool(shape, 3, 5)
        self.states = MambaPool(SLOTS, 2, [(3, 2), (5,)], (2, 1, 3), temporal_dtype=torch.float64)
        self.rows, self.slots = PagedTokenToKVPoolAllocator(SIZE, PAGE), MambaSlotAllocator(SLOTS)
        requests = requests_of(self.states, self.slots)
        defaults: dict[str, Any] = {"config": HostTierConfig(reserve_bytes=0), "make_engine": ManualCopyEngine}
        layers = HybridLinearKVPool(self.kv, [1, 2])
        self.stack = build_mamba_hybrid_stack(self._cache, layers, requests, self.rows, **defaults | options)
        filled(*self._kv_tensors(), *self.states.mamba_cache.tensors())

    def _cache(self, controller):
        return HiMambaRadixCache(
            page_size=PAGE,
            allocator=self.rows,
            mamba_allocator=self.slots,
            controller=controller,
            mamba_pool=self.states,
            enable_mamba_extra_buffer=True,
            load_back_threshold=1,
        )

    def _kv_tensors(self):
        return self.kv.kv_buffer if isinstance(self.kv, MLATokenToKVPool) else [*self.kv.k_buffer, *self.kv.v_buffer]

    def content(self, rows, slot):
        return [held[rows] for held in self._kv_tensors()] + [
            held[:, slot] for held in self.states.mamba_cache.tensors()
        ]

    def zero(self):
        for held in (*self._kv_tensors(), *self.states.mamba_cache.tensors()):
            held.zero_()


def settle(stack):
    stack.cache.ready_to_load_host_cache()
    stack.cache_controller.engine.drain()
    stack.cache.check_hicache_events()


@pytest.mark.parametrize("layout", HOST_LAYOUTS)
@pytest.mark.parametrize("use_mla", [False, True])
def test_kv_and_every_tensor_of_a_state_come_back_bit_for_bit(layout, use_mla):
    model = Mamba(use_mla=use_mla, config=HostTierConfig(layout=layout, reserve_bytes=0))
    cache, key = model.stack.cache, RadixKey(range(3 * PAGE))
    rows, slot = model.rows.alloc(3 * PAGE), model.slots.alloc(1)
    before = model.content(rows, slot)
    cache.insert(InsertParams(key, rows, mamba_value=slot))
    settle(model.stack)
    cache.evict(EvictParams(3 * PAGE))
    model.zero()
    match = cache.match_prefix(MatchPrefixParams(key))
    loaded, node = cache.init_load_back(InitLoadBackParams(match.best_match_node, match.host_hit_length))
    settle(model.stack)
    for held, expected in zip(model.content(loaded, node.mamba_value), before, strict=True):
        assert torch.equal(held, expected)


def test_a_stack_names_the_group_the_kv_pool_and_the_controller_of_its_cache():
    stack = Mamba().stack
    assert stack.cache.cache_controller is stack.cache_controller
    assert stack.token_to_kv_pool_host is stack.cache_controller.group
    assert stack.full_kv_pool_host is stack.token_to_kv_pool_host.get_pool(KV)
    assert stack.cache_controller.transfer_layer_num == 4


def window_model():
    full = MHATokenToKVPool(PoolShape(SIZE, PAGE, 1, torch.float16), 1, 3)
    window = MHATokenToKVPool(PoolShape(SIZE // 2, PAGE, 2, torch.float16), 2, 2)
    filled(*full.k_buffer, *full.v_buffer, *window.k_buffer, *window.v_buffer)
    return SWAKVPool(full, window, [1], [0, 2])


class NoCache:
    """An object that accepts a controller but has no tree."""

    def __init__(self, controller):
        self.controller = controller

    def attach_store(self, backend, policy=None):
        raise InvalidValueError("store", backend, "not here")


def test_a_model_with_windows_needs_no_more_than_its_list_of_pools():
    pool, allocators = window_model(), [PagedTokenToKVPoolAllocator(n, PAGE) for n in (SIZE, SIZE // 2)]
    specs = swa_pools(pool, *allocators)
    with build_hybrid_stack(specs, NoCache, config=HostTierConfig(reserve_bytes=0)) as stack:
        controller = stack.cache.controller
        full, window = allocators[0].alloc(8), allocators[1].alloc(4)
        before = pool.full_kv_pool.k_buffer[0][full].clone(), pool.swa_kv_pool.v_buffer[1][window].clone()
        kept = PoolTransfer(SWA, device_indices=window)
        host_rows = controller.write(full, 0, [kept])
        controller.finished_writes(wait=True)
        back = PoolTransfer(SWA, host_indices=kept.host_indices)
        loaded = controller.load(host_rows, 1, [back])
        controller.wait_for_layer(controller.start_loading(), 2)
        assert torch.equal(pool.full_kv_pool.k_buffer[0][loaded], before[0])
        assert torch.equal(pool.swa_kv_pool.v_buffer[1][back.device_indices], before[1])
        assert set(loaded.tolist()).isdisjoint(full.tolist())


@pytest.mark.parametrize(
    ("config", "kv_rows", "states"),
    [
        (HostTierConfig(ratio=1.5, reserve_bytes=0), 52, 10),
        # KV of 120 bytes a row: 80 rows and a page; as many states a slot as that is rows a row, and one
        (HostTierConfig(ratio=9.0, host_size_gb=80 * 120 / 1e9, reserve_bytes=0), 84, 16),
    ],
)
def test_pools_with_rows_of_their_own_grow_with_kv(config, kv_rows, states):
    group = Mamba(config=config).stack.token_to_kv_pool_host
    assert (group.get_pool(KV).size, group.get_pool(MAMBA).size) == (kv_rows, states)


def test_the_kind_of_model_follows_from_its_pool_and_components():
    shape = PoolShape(SIZE, PAGE, 2, torch.float16)
    rows, others = PagedTokenToKVPoolAllocator(SIZE, PAGE), PagedTokenToKVPoolAllocator(SIZE // 2, PAGE)
    mha, nsa = MHATokenToKVPool(shape, 1, 2), NSATokenToKVPool(shape, 4, 3)
    linear, slots = HybridLinearKVPool(mha, [1, 2]), MambaSlotAllocator(SLOTS)
    requests = requests_of(MambaPool(SLOTS, 2, [(3,)], (2,)), slots)

    def names(*args, **parts):
        return [spec.name for spec in pools_of(*args, **parts)]

    assert names(mha, rows) == [KV]
    assert names(nsa, rows) == [KV, PoolName.INDEXER]
    assert names(linear, rows, req_pool=requests) == [KV, MAMBA]
    assert names(window_model(), rows, swa_allocator=others) == [KV, SWA]
    for pool, parts in [(mha, {"req_pool": requests}), (linear, {}), (window_model(), {"req_pool": requests})]:
        expected = rf"components of a {type(pool).__name__}: got \['full'{', .mamba.' if parts else ''}\]"
        with pytest.raises(InvalidValueError, match=expected):
            pools_of(pool, rows, **parts)
