import numpy as np
import pytest

from engine_cache import PagedTokenToKVPoolAllocator
from kv_events.errors import InvalidValueError

torch = pytest.importorskip("torch", reason="device pools need torch: pip install kvsight[engine]")
device = pytest.importorskip("engine_cache.pools.device")


pytestmark = pytest.mark.torch
WINDOW = device.PoolShape(8, 2, 3, torch.float16)
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


# --- sliding windows ---


def test_each_layer_of_a_window_model_is_kept_in_its_own_pool():
    full, window = (
        device.MHATokenToKVPool(device.PoolShape(8, 2, 1, torch.float32), 1, 2),
        device.MLATokenToKVPool(WINDOW, 4, 3),
    )
    pool = device.SWAKVPool(full, window, [2], [0, 1, 3])
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
    full, window = (
        device.MHATokenToKVPool(device.PoolShape(8, 2, 1, torch.float32), 1, 2),
        device.MLATokenToKVPool(WINDOW, 4, 3),
    )
    with pytest.raises(InvalidValueError, match=words):
        device.SWAKVPool(full, window, full_layers, swa_layers)
