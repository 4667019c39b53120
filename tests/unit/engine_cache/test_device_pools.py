import numpy as np
import pytest

from engine_cache import PagedTokenToKVPoolAllocator

torch = pytest.importorskip("torch", reason="device pools need torch: pip install kvsight[engine]")
device = pytest.importorskip("engine_cache.pools.device")

pytestmark = pytest.mark.torch
SHAPE = device.PoolShape(size=32, page_size=4, layer_num=3, dtype=torch.bfloat16)


def test_multi_head_rows_are_written_where_they_were_allocated():
    pool = device.MHATokenToKVPool(SHAPE, head_num=2, head_dim=8)
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
    pool = device.MLATokenToKVPool(SHAPE, kv_lora_rank=16, qk_rope_head_dim=4)
    rows = PagedTokenToKVPoolAllocator(32, 4).alloc(8)
    kv = torch.randn(8, 1, 20)
    pool.set_kv_buffer(2, rows, kv)
    assert pool.kv_cache_dim == 20
    assert pool.get_kv_buffer(2).shape == (36, 1, 20)
    assert torch.equal(pool.get_kv_buffer(2)[rows], kv.bfloat16())


def test_the_last_row_handed_out_is_inside_the_tensors():
    pool = device.MLATokenToKVPool(SHAPE, kv_lora_rank=2, qk_rope_head_dim=2)
    rows = PagedTokenToKVPoolAllocator(32, 4).alloc(32)
    pool.set_kv_buffer(0, rows, torch.ones(32, 1, 4))
    assert pool.get_kv_buffer(0).float().sum() == 32 * 4


@pytest.mark.parametrize("name", ["size", "page_size", "layer_num"])
def test_an_empty_pool_is_refused(name):
    figures = {"size": 4, "page_size": 4, "layer_num": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name}: got 0"):
        device.PoolShape(**figures, dtype=torch.float16)
