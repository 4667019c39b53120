"""The index of a sparse-attention model on the device and on the host, where it uses the rows of KV."""

import numpy as np
import pytest
import torch

from engine_cache import PoolError
from engine_cache.pools.device import NSATokenToKVPool, PoolShape
from engine_cache.pools.host import HOST_LAYOUTS, MLATokenToKVPoolHost, NSAIndexerPoolHost
from kv_events.errors import InvalidValueError

pytestmark = pytest.mark.torch
SIZE, LAYERS = 24, 3


def filled_pool(page_size, index_head_dim=128):
    shape = PoolShape(SIZE, page_size, LAYERS, torch.bfloat16)
    pool = NSATokenToKVPool(shape, 6, 3, index_head_dim=index_head_dim)
    for layer, tensor in enumerate(pool.index_k_with_scale_buffer):
        tensor.copy_(torch.randint(0, 256, tensor.shape, generator=torch.Generator().manual_seed(layer)))
    return pool


def host_of(device, layout="layer_first"):
    anchor = MLATokenToKVPoolHost(device, layout=layout, reserve_bytes=0)
    return NSAIndexerPoolHost(device, anchor, layout=layout, reserve_bytes=0)


def rows(page_size, *pages):
    return (np.array(pages)[:, None] * page_size + np.arange(page_size)).reshape(-1)


@pytest.fixture(params=[1, 3, 8], ids=lambda page_size: f"page {page_size}")
def page_size(request):
    return request.param


@pytest.fixture(params=[128, 384], ids=lambda dim: f"head {dim}")
def device(request, page_size):
    return filled_pool(page_size, request.param)


@pytest.mark.parametrize("layout", HOST_LAYOUTS)
def test_an_index_that_went_to_the_host_and_back_is_the_same_bit_for_bit(device, page_size, layout):
    host = host_of(device, layout)
    before = [tensor.clone() for tensor in device.index_k_with_scale_buffer]
    there = rows(page_size, 5, 0, 3)
    host.backup_from_device_all_layer(device, there, rows(page_size, 1, 2, 3))
    for layer, tensor in enumerate(device.index_k_with_scale_buffer):
        tensor.zero_()
        host.load_to_device_per_layer(device, there[: 2 * page_size], rows(page_size, 2, 1), layer)
        assert torch.equal(tensor[2], before[layer][1])
        assert torch.equal(tensor[1], before[layer][2])
        assert not tensor[3:].any()
        assert not tensor[0].any()


@pytest.mark.parametrize("layout", HOST_LAYOUTS)
def test_a_flat_page_is_every_layer_of_the_index_and_can_be_written_back(device, page_size, layout):
    host = host_of(device, layout)
    host.backup_from_device_all_layer(device, rows(page_size, 2), rows(page_size, 1))
    flat = host.get_data_page(2 * page_size)
    assert torch.equal(flat, torch.cat([tensor[1] for tensor in device.index_k_with_scale_buffer]))
    assert flat.shape == host.get_dummy_flat_data_page().shape
    host.set_from_flat_data_page(4 * page_size, flat)
    for layer, tensor in enumerate(device.index_k_with_scale_buffer):
        host.load_to_device_per_layer(device, rows(page_size, 4), rows(page_size, 2), layer)
        assert torch.equal(tensor[2], tensor[1])


def test_the_host_index_has_the_size_and_pages_of_the_kv_it_belongs_to(device, page_size):
    host = host_of(device)
    row = device.index_head_dim + device.index_head_dim // 128 * 4
    anchor = MLATokenToKVPoolHost(device, reserve_bytes=0)
    pages = (anchor.size + page_size + 1) // page_size
    assert (host.size, host.page_size) == (anchor.size, anchor.page_size)
    assert host.size_per_token == row * LAYERS
    assert tuple(host.index_k_with_scale_buffer.shape) == (LAYERS, pages, page_size * row)
    assert host.required_bytes == host.index_k_with_scale_buffer.nbytes


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_addresses_of_an_index_page_hold_its_bytes(device, page_size, layout):
    host = host_of(device, layout)
    host.backup_from_device_all_layer(device, rows(page_size, 4, 1), rows(page_size, 1, 2))
    (buffer,) = host.get_hybrid_pool_buffer()
    assert buffer.shape[1:] == (LAYERS, 1, page_size * device.index_row_bytes)
    addresses, lengths = host.get_page_buffer_meta(rows(page_size, 1, 4))
    held = buffer.flatten()
    for page, address, length in zip((1, 4), addresses, lengths, strict=True):
        start = address - buffer.data_ptr()
        assert torch.equal(held[start : start + length], host.get_data_page(page * page_size))


def test_layer_first_has_no_page_in_one_run(device, page_size):
    with pytest.raises(InvalidValueError, match=r"host pool indexer.*layer_first"):
        host_of(device).get_page_buffer_meta(rows(page_size, 0))


def test_rows_that_are_no_pages_are_refused_on_both_sides():
    device = filled_pool(8)
    host = host_of(device)
    page = rows(8, 1)
    with pytest.raises(InvalidValueError, match="device pool indexer"):
        host.backup_from_device_all_layer(device, page, page + 1)
    with pytest.raises(InvalidValueError, match="host pool indexer"):
        host.backup_from_device_all_layer(device, page + 1, page)
    with pytest.raises(InvalidValueError, match="a multiple of 8"):
        host.load_to_device_per_layer(device, page[:5], page[:5], 0)


def test_the_index_has_no_rows_to_give_or_take():
    host = host_of(filled_pool(8))
    with pytest.raises(PoolError, match="indexer"):
        host.alloc(8)
    with pytest.raises(PoolError, match="indexer"):
        host.free(rows(8, 0))
    assert host.available_size() == host.size


def test_an_index_with_other_pages_than_its_kv_is_refused():
    anchor = MLATokenToKVPoolHost(filled_pool(3), reserve_bytes=0)
    with pytest.raises(InvalidValueError, match="KV's, 3"):
        NSAIndexerPoolHost(filled_pool(8), anchor, reserve_bytes=0)


def test_keys_and_scales_of_a_token_are_in_their_page_keys_first():
    pool = filled_pool(4, 256)
    keys = torch.arange(2 * 256).to(torch.uint8).view(2, 256)
    scales = torch.tensor([[1.5, -2.0], [0.25, 8.0]])
    pool.set_index_k_with_scale(1, np.array([6, 13]), keys, scales)
    for row, (page, place) in enumerate([(1, 2), (3, 1)]):
        held = pool.get_index_k_with_scale_buffer(1)[page]
        assert torch.equal(held[place * 256 : (place + 1) * 256], keys[row])
        assert torch.equal(held[4 * 256 :].view(4, 8)[place].clone().view(torch.float32), scales[row])
    assert torch.equal(pool.get_index_k_with_scale_buffer(0), filled_pool(4, 256).get_index_k_with_scale_buffer(0))


@pytest.mark.parametrize("index_head_dim", [0, 64, -128])
def test_a_key_is_whole_blocks_of_numbers(index_head_dim):
    with pytest.raises(InvalidValueError, match="index_head_dim"):
        filled_pool(4, index_head_dim)
