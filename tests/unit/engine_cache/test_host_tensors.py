"""The guarantees of all host pools with tensors, for every kind of device pool."""

from itertools import pairwise
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from engine_cache.pools.device import MHATokenToKVPool, MLATokenToKVPool, NSATokenToKVPool, PoolShape
from engine_cache.pools.device_swa import SWAKVPool
from engine_cache.pools.host import (
    HOST_LAYOUTS,
    MambaPoolHost,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    NSAIndexerPoolHost,
    allocate_host_pools,
)
from engine_cache.pools.mamba import MambaPool
from kv_events.errors import InvalidValueError

pytestmark = pytest.mark.torch
PAGE, SIZE, LAYERS = 2, 8, 3
SHAPE = PoolShape(SIZE, PAGE, LAYERS, torch.float16)
KINDS = ["mha", "mla", "mamba", "indexer"]


def pair(kind, **options):
    """Return a device pool and its host pool."""
    options = {"reserve_bytes": 0, **options}
    device: Any
    match kind:
        case "mha":
            device = MHATokenToKVPool(SHAPE, 3, 5)
            return device, MHATokenToKVPoolHost(device, **options)
        case "mla":
            device = MLATokenToKVPool(SHAPE, 4, 3)
            return device, MLATokenToKVPoolHost(device, **options)
        case "mamba":
            device = MambaPool(SIZE, LAYERS, [(3, 1), (), (7,)], (2, 5), temporal_dtype=torch.float64)
            return device, MambaPoolHost(device, **options)
    device = NSATokenToKVPool(SHAPE, 4, 3)
    return device, NSAIndexerPoolHost(device, MLATokenToKVPoolHost(device, reserve_bytes=0), **options)


def device_tensors(device):
    """Return tensors whose first dimension is rows, slots or pages."""
    if isinstance(device, NSATokenToKVPool):
        return device.index_k_with_scale_buffer
    if isinstance(device, MambaPool):
        return [tensor[layer] for tensor in device.mamba_cache.tensors() for layer in range(LAYERS)]
    return [*device.k_buffer, *device.v_buffer] if isinstance(device, MHATokenToKVPool) else device.kv_buffer


def fill(device):
    for seed, tensor in enumerate(device_tensors(device)):
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
        tensor.copy_((noise * 100).to(tensor.dtype))


def page(host, number):
    return np.arange(number * host.page_size, (number + 1) * host.page_size)


@pytest.mark.parametrize("layout", HOST_LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_odd_shapes_and_mixed_dtypes_survive_a_round_trip(kind, layout):
    device, host = pair(kind, layout=layout)
    fill(device)
    before = [tensor.clone() for tensor in device_tensors(device)]
    host.backup_from_device_all_layer(device, page(host, 3), page(host, 1))
    host.set_from_flat_data_page(0, host.get_data_page(3 * host.page_size))
    for tensor in device_tensors(device):
        tensor.zero_()
    for layer in range(LAYERS):
        host.load_to_device_per_layer(device, page(host, 0), page(host, 1), layer)
    first = 1 if kind in ("mamba", "indexer") else PAGE
    for tensor, old in zip(device_tensors(device), before, strict=True):
        last = first + (1 if kind in ("mamba", "indexer") else PAGE)
        assert torch.equal(tensor[first:last], old[first:last])
        assert not tensor[:first].any()
        assert not tensor[last:].any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_takes_as_many_bytes_as_the_size_of_a_row_says(kind):
    _, host = pair(kind)
    assert host.get_data_page(0).numel() == host.page_size * host.size_per_token
    assert sum(tensor.nbytes for tensor in host.get_hybrid_pool_buffer()) == host.required_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_no_page_of_its_own_is_outside_the_tensors_that_a_store_receives(kind):
    _, host = pair(kind, layout="page_first")
    spans = [(held.data_ptr(), held.data_ptr() + held.nbytes) for held in host.get_hybrid_pool_buffer()]
    addresses, lengths = host.get_page_buffer_meta(np.arange(host.size))
    runs = sorted(zip(addresses, lengths, strict=True))
    assert all(any(start <= at and at + n <= end for start, end in spans) for at, n in runs)
    assert all(at + n <= following for (at, n), (following, _) in pairwise(runs))


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_row_that_does_not_exist_is_an_error_before_anything_is_copied(kind):
    device, host = pair(kind)
    far = page(host, 1000)
    with pytest.raises(IndexError, match=f"device pool {host.name}: row"):
        host.backup_from_device_all_layer(device, page(host, 0), far)
    with pytest.raises(IndexError, match=f"device pool {host.name}: row"):
        host.load_to_device_per_layer(device, page(host, 0), far, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_host_page_that_does_not_exist_is_an_error_that_names_the_pool(kind):
    device, host = pair(kind, layout="page_first")
    beyond = host.size // host.page_size
    for number in (-1, beyond):
        with pytest.raises(IndexError, match=f"host pool {host.name}: page at row {number * host.page_size}"):
            host.backup_from_device_all_layer(device, page(host, number), page(host, 1))
        with pytest.raises(IndexError, match=f"host pool {host.name}"):
            host.get_page_buffer_meta(page(host, number))
        with pytest.raises(IndexError, match=f"host pool {host.name}"):
            host.get_data_page(number * host.page_size)


# --- memory of several pools ---


def free_memory(monkeypatch, available):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": available}))


def planned():
    window = MLATokenToKVPoolHost(MLATokenToKVPool(SHAPE, 4, 3), "swa", allocate=False)
    return [pair("mha", allocate=False)[1], window, pair("mamba", allocate=False)[1]]


def num_bytes(pools):
    return sum(tensor.nbytes for pool in pools for tensor in pool.get_hybrid_pool_buffer())


def test_pools_that_fit_one_by_one_but_not_together_are_refused_together(monkeypatch):
    pools = planned()
    total = sum(pool.required_bytes for pool in pools)
    assert max(pool.required_bytes for pool in pools) < total - 1
    free_memory(monkeypatch, total + 99)
    with pytest.raises(InvalidValueError, match="memory of host pool kv, swa, mamba"):
        allocate_host_pools(pools, 100)
    assert num_bytes(pools) == 0


def test_pools_that_fit_together_hold_what_was_planned(monkeypatch):
    pools = planned()
    total = sum(pool.required_bytes for pool in pools)
    free_memory(monkeypatch, total + 100)
    allocate_host_pools(pools, 100)
    assert num_bytes(pools) == total


def test_a_pool_that_finds_no_memory_takes_the_others_with_it(monkeypatch):
    def fail():
        raise MemoryError("injected")

    pools = planned()
    monkeypatch.setattr(pools[2], "allocate", fail)
    with pytest.raises(MemoryError, match="injected"):
        allocate_host_pools(pools, 0)
    assert num_bytes(pools) == 0


# --- sliding windows ---


def test_each_layer_of_a_window_model_is_kept_in_its_own_pool():
    full, window = MHATokenToKVPool(PoolShape(SIZE, PAGE, 1, torch.float32), 1, 2), MLATokenToKVPool(SHAPE, 4, 3)
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
    with pytest.raises(InvalidValueError, match=r"layer_id.*0 \.\. 3"):
        pool.get_kv_buffer(4)


@pytest.mark.parametrize(
    ("full_layers", "swa_layers", "words"),
    [([0, 1], [2], "one id for each of 1"), ([0], [0, 1, 2], "each of 0"), ([4], [0, 1, 2], "each of 0")],
)
def test_a_window_model_has_each_layer_once(full_layers, swa_layers, words):
    full, window = MHATokenToKVPool(PoolShape(SIZE, PAGE, 1, torch.float32), 1, 2), MLATokenToKVPool(SHAPE, 4, 3)
    with pytest.raises(InvalidValueError, match=words):
        SWAKVPool(full, window, full_layers, swa_layers)
