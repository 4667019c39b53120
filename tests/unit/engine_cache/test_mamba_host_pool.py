import numpy as np
import psutil
import pytest
import torch

from engine_cache.pools.device import MHATokenToKVPool, PoolShape
from engine_cache.pools.host import HOST_LAYOUTS, MambaPoolHost
from engine_cache.pools.mamba import MambaPool
from kv_events.errors import InvalidValueError

pytestmark = pytest.mark.torch
SIZE, LAYERS = 3, 2
CONV_SHAPES, TEMPORAL_SHAPE = [(3, 2), (5,)], (2, 1, 3)
# bytes of a state: two layers of 6 + 5 bfloat16 and 6 float32
BYTES = 2 * (11 * 2 + 6 * 4)


def filled_pool():
    pool = MambaPool(SIZE, LAYERS, CONV_SHAPES, TEMPORAL_SHAPE)
    generator = torch.Generator().manual_seed(0)
    for tensor in pool.mamba_cache.tensors():
        tensor.copy_(torch.rand(tensor.shape, generator=generator))
    return pool


@pytest.fixture
def device():
    return filled_pool()


@pytest.fixture(params=HOST_LAYOUTS)
def host(request, device):
    return MambaPoolHost(device, layout=request.param, ratio=2.0, reserve_bytes=0)


def slots(*numbers):
    return np.array(numbers, np.int64)


def state(pool, slot):
    return [tensor[:, slot].clone() for tensor in pool.mamba_cache.tensors()]


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def state_bytes(pool, slot):
    return b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in state(pool, slot))


def test_a_state_that_went_to_the_host_and_back_is_the_same_in_every_tensor(device, host):
    before = [state(device, slot) for slot in (1, 3)]
    host.backup_from_device_all_layer(device, slots(5, 0), slots(1, 3))
    device.clear_slots(slots(1, 2, 3))
    for layer in range(LAYERS):
        host.load_to_device_per_layer(device, slots(0, 5, 5), slots(1, 2, 3), layer)
    assert equal(state(device, 1), before[1])
    assert equal(state(device, 2), before[0])
    assert equal(state(device, 3), before[0])


def test_a_layer_is_loaded_alone(device, host):
    before = state(device, 1)
    host.backup_from_device_all_layer(device, slots(4), slots(1))
    device.clear_slots(slots(1))
    host.load_to_device_per_layer(device, slots(4), slots(1), 1)
    for now, then in zip(state(device, 1), before, strict=True):
        assert torch.equal(now[1], then[1])
        assert not now[0].any()


def test_a_flat_state_is_the_bytes_of_each_tensor_in_order_and_can_be_written_back(device, host):
    host.backup_from_device_all_layer(device, slots(2), slots(1))
    flat = host.get_data_page(2)
    assert flat.numpy().tobytes() == state_bytes(device, 1)
    blank = host.get_dummy_flat_data_page()
    assert (blank.shape, blank.dtype) == (flat.shape, flat.dtype)
    host.set_from_flat_data_page(4, flat)
    host.load_to_device_per_layer(device, slots(4), slots(2), 0)
    host.load_to_device_per_layer(device, slots(4), slots(2), 1)
    assert equal(state(device, 2), state(device, 1))


def test_a_flat_state_is_a_copy(device, host):
    flat = host.get_data_page(0)
    expected = flat.clone()
    host.set_from_flat_data_page(0, torch.full_like(flat, 7))
    assert torch.equal(flat, expected)


def test_the_size_of_a_state_counts_every_tensor_by_its_own_dtype(host):
    assert host.size_per_token == BYTES
    assert len(host.get_dummy_flat_data_page()) == BYTES


def test_every_tensor_is_named_to_a_store_the_temporal_one_first(host):
    lead = (LAYERS, 7) if host.layout == "layer_first" else (7, LAYERS, 1)
    shapes = [tuple(buffer.shape) for buffer in host.get_hybrid_pool_buffer()]
    assert shapes == [(*lead, *shape) for shape in (TEMPORAL_SHAPE, *CONV_SHAPES)]


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_addresses_of_a_state_are_in_those_tensors_and_hold_its_bytes(device, layout):
    host = MambaPoolHost(device, layout=layout, reserve_bytes=0)
    host.backup_from_device_all_layer(device, slots(1, 4), slots(1, 2))
    pointers, lengths = host.get_page_buffer_meta(slots(4, 1))
    assert lengths == 2 * [LAYERS * 6 * 4, LAYERS * 6 * 2, LAYERS * 5 * 2]
    buffers = host.get_hybrid_pool_buffer()
    expected = [buffer[slot].data_ptr() for slot in (4, 1) for buffer in buffers]
    assert pointers == expected


def test_layer_first_has_no_run_of_memory_to_name(device):
    with pytest.raises(InvalidValueError, match=r"layout of host pool mamba.*layer_first"):
        MambaPoolHost(device, reserve_bytes=0).get_page_buffer_meta(slots(0))


@pytest.mark.parametrize("slot", [-1, 7])
def test_a_slot_that_is_not_there_is_an_error_that_names_pool_and_slot(device, host, slot):
    for use in (
        lambda: host.get_data_page(slot),
        lambda: host.set_from_flat_data_page(slot, host.get_dummy_flat_data_page()),
        lambda: host.backup_from_device_all_layer(device, slots(0, slot), slots(1, 2)),
        lambda: host.load_to_device_per_layer(device, slots(slot), slots(1), 0),
    ):
        with pytest.raises(IndexError, match=f"host pool mamba: page at row {slot}, the pool has rows 0 .. 6"):
            use()


def test_each_slot_of_the_host_has_one_of_the_device(device, host):
    with pytest.raises(InvalidValueError, match=r"host indices of pool mamba.*2.*1"):
        host.backup_from_device_all_layer(device, slots(0, 1), slots(1))


def test_a_pool_of_another_kind_is_refused(host):
    kv = MHATokenToKVPool(PoolShape(2, 1, LAYERS, torch.float32), 1, 1)
    with pytest.raises(InvalidValueError, match="MHATokenToKVPool"):
        host.backup_from_device_all_layer(kv, slots(0), slots(1))


def test_the_pool_is_larger_than_the_devices_and_leaves_the_reserve(device, monkeypatch):
    assert MambaPoolHost(device, ratio=1.0, reserve_bytes=0).size == 4
    assert MambaPoolHost(device, host_size_gb=9.5 * BYTES / 1e9, reserve_bytes=0).size == 10
    with pytest.raises(InvalidValueError, match="3"):
        MambaPoolHost(device, ratio=0.5, reserve_bytes=0)
    with pytest.raises(InvalidValueError, match=r"layout.*rows_first"):
        MambaPoolHost(device, layout="rows_first", reserve_bytes=0)
    available = psutil.virtual_memory().available
    with pytest.raises(InvalidValueError, match="memory of host pool mamba"):
        MambaPoolHost(device, reserve_bytes=2 * available)
