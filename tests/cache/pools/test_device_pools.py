"""Tensors of device pools, and the slots of recurrent states."""

from typing import Any

import numpy as np
import pytest
import torch

from engine_cache import MambaSlotAllocator, PagedTokenToKVPoolAllocator
from engine_cache.pools.device import (
    HybridLinearKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    NSATokenToKVPool,
    PoolShape,
    SWAKVPool,
)
from engine_cache.pools.mamba import HybridReqToTokenPool, MambaPool
from kv_events.errors import InvalidValueError

SLOTS = 4
SHAPE = PoolShape(size=32, page_size=4, layer_num=3, dtype=torch.bfloat16)
TWO_LAYERS = PoolShape(size=8, page_size=2, layer_num=2, dtype=torch.float32)


# --- KV ---


def test_multi_head_rows_are_written_where_they_were_allocated():
    pool = MHATokenToKVPool(SHAPE, head_num=2, head_dim=8)
    allocator = PagedTokenToKVPoolAllocator(32, 4)
    allocator.alloc(8)
    rows = allocator.alloc(12)
    k, v = torch.randn(2, 12, 2, 8)
    pool.set_kv_buffer(1, rows, k, v)
    held_k, held_v = pool.get_kv_buffer(1)
    assert held_k.shape == held_v.shape == (36, 2, 8)
    assert torch.equal(held_k[rows], k.bfloat16())
    assert torch.equal(held_v[rows], v.bfloat16())
    untouched = np.setdiff1d(np.arange(36), rows)
    assert not held_k[untouched].any()
    assert not any(buffer.any() for layer in (0, 2) for buffer in pool.get_kv_buffer(layer))


def test_latent_rows_are_written_where_they_were_allocated():
    pool = MLATokenToKVPool(SHAPE, kv_lora_rank=16, qk_rope_head_dim=4)
    rows = PagedTokenToKVPoolAllocator(32, 4).alloc(8)
    kv = torch.randn(8, 1, 20)
    pool.set_kv_buffer(2, rows, kv)
    assert pool.kv_cache_dim == 20
    assert pool.get_kv_buffer(2).shape == (36, 1, 20)
    assert torch.equal(pool.get_kv_buffer(2)[rows], kv.bfloat16())


@pytest.mark.parametrize("name", ["size", "page_size", "layer_num"])
def test_an_empty_pool_is_refused(name):
    figures: Any = {"size": 4, "page_size": 4, "layer_num": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name}: got 0"):
        PoolShape(**figures, dtype=torch.float16)


def test_keys_and_scales_of_a_token_are_in_their_page_keys_first():
    pool = NSATokenToKVPool(SHAPE, 4, 3, index_head_dim=256)
    keys = torch.arange(2 * 256).to(torch.uint8).view(2, 256)
    scales = torch.tensor([[1.5, -2.0], [0.25, 8.0]])
    pool.set_index_k_with_scale(1, np.array([6, 13]), keys, scales)
    for row, (page, place) in enumerate([(1, 2), (3, 1)]):
        index = pool.get_index_k_with_scale_buffer(1)[page]
        assert torch.equal(index[place * 256 : (place + 1) * 256], keys[row])
        assert torch.equal(index[4 * 256 :].view(4, 8)[place].clone().view(torch.float32), scales[row])
    assert not pool.get_index_k_with_scale_buffer(0).any()


@pytest.mark.parametrize("index_head_dim", [0, 64, -128])
def test_a_key_is_whole_blocks_of_numbers(index_head_dim):
    with pytest.raises(InvalidValueError, match="index_head_dim"):
        NSATokenToKVPool(SHAPE, 6, 3, index_head_dim=index_head_dim)


# --- models with layers of several kinds ---


def window_pools():
    full = MHATokenToKVPool(PoolShape(8, 2, 1, torch.float32), 1, 2)
    return full, MLATokenToKVPool(PoolShape(8, 2, 3, torch.float16), 4, 3)


def test_each_layer_of_a_window_model_is_kept_in_its_own_pool():
    full, window = window_pools()
    pool = SWAKVPool(full, window, [2], [0, 1, 3])
    assert pool.layers_mapping == {0: (0, True), 1: (1, True), 2: (0, False), 3: (2, True)}
    compressed, k, v = torch.ones(2, 1, 7), torch.ones(2, 1, 2), torch.full((2, 1, 2), 2.0)
    pool.set_kv_buffer(3, np.array([4, 5]), compressed)
    pool.set_kv_buffer(2, np.array([6, 7]), k, v)
    assert torch.equal(window.get_kv_buffer(2)[4:6], compressed.half())
    assert pool.get_kv_buffer(3) is window.get_kv_buffer(2)
    assert torch.equal(pool.get_kv_buffer(2)[1][6:8], v)
    with pytest.raises(InvalidValueError, match="a tensor beside k"):
        pool.set_kv_buffer(2, np.array([6]), k[:1])
    with pytest.raises(InvalidValueError, match=r"layer_id.*\[0, 1, 2, 3\]"):
        pool.get_kv_buffer(4)


@pytest.mark.parametrize(
    ("full_layers", "swa_layers", "words"),
    [([0, 1], [2], "one id for each of 1"), ([0], [0, 1, 2], "each of 0"), ([4], [0, 1, 2], "each of 0")],
)
def test_a_window_model_has_each_layer_once(full_layers, swa_layers, words):
    full, window = window_pools()
    with pytest.raises(InvalidValueError, match=words):
        SWAKVPool(full, window, full_layers, swa_layers)


def test_global_attention_layers_reach_their_local_tensors():
    hybrid: Any = HybridLinearKVPool(MHATokenToKVPool(TWO_LAYERS, head_num=2, head_dim=4), [2, 5])
    rows, (k, v) = np.array([4, 5, 6]), torch.randn(2, 3, 2, 4)
    hybrid.set_kv_buffer(5, rows, k, v)
    held_k, held_v = hybrid.get_kv_buffer(5)
    assert torch.equal(held_k[rows], k)
    assert torch.equal(held_v[rows], v)
    assert hybrid.full_kv_pool.k_buffer[1] is held_k
    assert not hybrid.get_kv_buffer(2)[0].any()
    assert not hybrid.use_mla


def test_a_hybrid_pool_over_latent_attention_takes_one_tensor():
    hybrid: Any = HybridLinearKVPool(MLATokenToKVPool(TWO_LAYERS, kv_lora_rank=4, qk_rope_head_dim=2), [0, 3])
    kv = torch.randn(2, 1, 6)
    hybrid.set_kv_buffer(3, np.array([2, 3]), kv)
    assert torch.equal(hybrid.get_kv_buffer(3)[2:4], kv)
    assert hybrid.use_mla
    with pytest.raises(ValueError, match="v: got 'Tensor'"):
        hybrid.set_kv_buffer(3, np.array([2, 3]), kv, kv)


def test_layers_that_do_not_fit_are_refused(pool, lines):
    kv = MHATokenToKVPool(TWO_LAYERS, head_num=1, head_dim=1)
    parts = {"mamba_pool": pool, "mamba_allocator": MambaSlotAllocator(SLOTS), "mamba_map": {0: 0, 1: 1, 2: 2}}
    for use, words in (
        (lambda: HybridLinearKVPool(kv, [2, 5]).get_kv_buffer(3), r"layer_id: got 3, expected one of \[2, 5\]"),
        (lambda: lines.mamba_layer(2), r"layer_id: got 2, expected one of \[0, 1, 3\]"),
        (lambda: HybridLinearKVPool(kv, [2]), "one id for each of 2 layers"),
        (lambda: HybridReqToTokenPool(2, 16, **{**parts, "mamba_map": {0: 0, 1: 2}}), r"local layers 0 \.\. 2"),
        (lambda: HybridReqToTokenPool(2, 16, **{**parts, "mamba_allocator": MambaSlotAllocator(9)}), "the pool's, 4"),
    ):
        with pytest.raises(InvalidValueError, match=words):
            use()


# --- recurrent states ---


@pytest.fixture
def pool():
    return MambaPool(SLOTS, 3, conv_shapes=[(4, 2), (5,)], temporal_shape=(2, 3, 4))


@pytest.fixture
def lines(pool):
    allocator = MambaSlotAllocator(SLOTS)
    return HybridReqToTokenPool(2, 16, mamba_pool=pool, mamba_allocator=allocator, mamba_map={0: 0, 1: 1, 3: 2})


def fill(pool, slot):
    """Write random states to all layers of one slot. Returns the content, tensor by tensor."""
    written = []
    for tensor in pool.mamba_cache.tensors():
        tensor[:, slot] = torch.randn(tensor[:, slot].shape).to(tensor.dtype)
        written.append(tensor[:, slot].clone())
    return written


def held(pool, slot):
    return [tensor[:, slot] for tensor in pool.mamba_cache.tensors()]


def equal(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def test_all_layers_of_a_kind_of_state_are_one_tensor_with_a_dummy_slot(pool):
    cache = pool.mamba_cache
    assert [tuple(conv.shape) for conv in cache.conv] == [(3, SLOTS + 1, 4, 2), (3, SLOTS + 1, 5)]
    assert tuple(cache.temporal.shape) == (3, SLOTS + 1, 2, 3, 4)
    assert (cache.conv[0].dtype, cache.temporal.dtype) == (torch.bfloat16, torch.float32)


def test_a_copied_state_is_bit_equal_in_every_layer_and_its_own(pool):
    written = fill(pool, 1)
    other = fill(pool, 3)
    pool.copy_from(np.array([1]), np.array([2]))
    assert equal(held(pool, 2), written)
    fill(pool, 1)
    assert equal(held(pool, 2), written)
    assert equal(held(pool, 3), other)


def test_cleared_slots_are_zero_and_others_stay(pool):
    fill(pool, 1)
    written = fill(pool, 2)
    pool.clear_slots(np.array([1, 3]))
    assert not any(tensor.any() for tensor in held(pool, 1))
    assert equal(held(pool, 2), written)


def test_a_layer_is_a_view_of_the_pool(pool):
    pool.layer(1).temporal[2] = 7
    assert pool.mamba_cache.temporal[1, 2].eq(7).all()


@pytest.mark.parametrize(("name", "sizes"), [("size", (0, 1)), ("layer_num", (1, 0))])
def test_an_empty_state_pool_is_refused(name, sizes):
    with pytest.raises(ValueError, match=f"{name}: got 0"):
        MambaPool(sizes[0], sizes[1], [(1,)], (1,))


def test_a_request_gets_a_line_and_a_cleared_state_together(lines, pool):
    for slot in range(1, SLOTS + 1):
        fill(pool, slot)
    line, slot = lines.alloc_with_state()
    assert lines.mamba_slots(np.array([line])).tolist() == slot.tolist()
    assert not lines.mamba_layer(3).temporal[slot].any()


def test_a_request_keeps_the_slot_that_a_match_gave_it(lines, pool):
    slot = lines.mamba_allocator.alloc(1)
    written = fill(pool, int(slot[0]))
    line, same = lines.alloc_with_state(slot)
    assert same is slot
    assert lines.mamba_slots(np.array([line])).tolist() == slot.tolist()
    assert equal(held(pool, int(slot[0])), written)


def test_a_request_without_room_takes_nothing(lines):
    slots = lines.mamba_allocator.alloc(SLOTS)
    assert lines.alloc_with_state() is None
    assert lines.available_size() == 2
    lines.mamba_allocator.free(slots)
    lines.alloc()
    lines.alloc()
    assert lines.alloc_with_state() is None
    assert lines.mamba_allocator.available_size() == SLOTS
