"""A tree over the real pools of every kind of model. Data that is copied to the host and back does not change."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engine_cache import (
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MambaComponent,
    MambaSlotAllocator,
    ManualCopyEngine,
    MatchPrefixParams,
    PagedTokenToKVPoolAllocator,
    RadixKey,
    Request,
    SWAComponent,
    SWATokenToKVPoolAllocator,
    UnifiedRadixCache,
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
from engine_cache.stacks import HostTierConfig, build_hybrid_stack, pools_of

pytestmark = pytest.mark.torch
PAGE, SIZE, SLOTS = 4, 32, 6


class Model:
    """`kv`, `rows`, other arguments of `pools_of` and the tree, and the `content` of rows and slots."""

    components: Sequence[Any] = ()
    slots: Any = None

    def __init__(self):
        self.rows: Any = PagedTokenToKVPoolAllocator(SIZE, PAGE)
        self.kv: Any = self.make_kv(PoolShape(SIZE, PAGE, 2, torch.float16))
        self.others = {}

    def make_kv(self, shape) -> Any:
        return MHATokenToKVPool(shape, 2, 3)

    def tensors(self, rows, slot):
        """Return (tensor, index along its first axis) of all data of the rows and the slot."""
        is_latent = isinstance(self.kv, MLATokenToKVPool)
        buffers = self.kv.kv_buffer if is_latent else (*self.kv.k_buffer, *self.kv.v_buffer)
        return [(held, rows) for held in buffers]


class NSA(Model):
    def make_kv(self, shape):
        return NSATokenToKVPool(shape, kv_lora_rank=4, qk_rope_head_dim=3)

    def tensors(self, rows, slot):
        pages = rows[::PAGE] // PAGE
        return super().tensors(rows, slot) + [(held, pages) for held in self.kv.index_k_with_scale_buffer]


class Windows(Model):
    def __init__(self):
        window = MHATokenToKVPool(PoolShape(SIZE, PAGE, 3, torch.float32), 1, 5)
        super().__init__()
        self.kv = SWAKVPool(self.kv, window, [1, 3], [0, 2, 4])
        self.rows = SWATokenToKVPoolAllocator(SIZE, SIZE, PAGE)
        self.components = [SWAComponent(self.rows, 2 * PAGE)]
        self.others = {"swa_allocator": self.rows.swa}

    def tensors(self, rows, slot):
        full, window = self.kv.full_kv_pool, self.kv.swa_kv_pool
        mapped = self.rows.translate(rows[PAGE:])  # the last window of the prompt, all that is loaded
        held = [(tensor, rows) for tensor in (*full.k_buffer, *full.v_buffer)]
        return held + [(tensor, mapped) for tensor in (*window.k_buffer, *window.v_buffer)]


class Recurrent(Model):
    def __init__(self):
        super().__init__()
        self.slots = MambaSlotAllocator(SLOTS)
        self.states = MambaPool(SLOTS, 2, [(3, 2), (5,)], (2, 1, 3), temporal_dtype=torch.float64)
        requests = HybridReqToTokenPool(
            2, 64, mamba_pool=self.states, mamba_allocator=self.slots, mamba_map={0: 0, 3: 1}
        )
        self.linear, self.others = HybridLinearKVPool(self.kv, [1, 2]), {"req_pool": requests}
        self.components = [MambaComponent(self.slots, enable_mamba_extra_buffer=True)]

    def tensors(self, rows, slot):
        states = [(held.transpose(0, 1), slot) for held in self.states.mamba_cache.tensors()]
        return super().tensors(rows, slot) + states


class LatentRecurrent(Recurrent):
    def make_kv(self, shape):
        return MLATokenToKVPool(shape, 4, 3)


def build(model, layout):
    full = getattr(model.rows, "full", model.rows)
    specs = pools_of(getattr(model, "linear", model.kv), full, **model.others)

    def make_cache(controller):
        cache = UnifiedRadixCache(page_size=PAGE, allocator=model.rows, components=model.components)
        cache.init_hicache(controller, load_back_threshold=1)
        return cache

    config = HostTierConfig(layout=layout, reserve_bytes=0)
    return build_hybrid_stack(specs, make_cache, config=config, make_engine=ManualCopyEngine)


def settle(stack):
    stack.cache.ready_to_load_host_cache()
    stack.cache_controller.engine.drain()
    stack.cache.check_hicache_events()


@pytest.mark.parametrize("layout", HOST_LAYOUTS)
@pytest.mark.parametrize("kind", [Model, NSA, Windows, Recurrent, LatentRecurrent])
def test_what_was_demoted_comes_back_bit_for_bit(kind, layout):
    model = kind()
    with build(model, layout) as stack:
        cache, key = stack.cache, RadixKey(range(3 * PAGE))
        rows, slot = model.rows.alloc(3 * PAGE), model.slots.alloc(1) if model.slots else None
        for seed, (held, index) in enumerate(model.tensors(rows, slot)):
            noise = torch.randint(0, 100, held[index].shape, generator=torch.Generator().manual_seed(seed))
            held[index] = noise.to(held.dtype)
        before = [held[index].clone() for held, index in model.tensors(rows, slot)]
        cache.insert(InsertParams(key, rows, mamba_value=slot))
        settle(stack)
        assert cache.evict(EvictParams(3 * PAGE)).num_tokens_evicted == 3 * PAGE
        for held, _ in model.tensors(rows, slot):
            held.zero_()
        match = cache.match_prefix(MatchPrefixParams(key))
        req = Request("r", [], 0, last_node=match.last_device_node)
        loaded, node = cache.init_load_back(InitLoadBackParams(match.best_match_node, match.host_hit_length, req=req))
        settle(stack)
        assert (len(loaded), node) == (3 * PAGE, match.best_match_node)
        after = [held[index] for held, index in model.tensors(loaded, req.mamba_pool_idx)]
        assert all(map(torch.equal, after, before))
        assert any(held.any() for held in before)
