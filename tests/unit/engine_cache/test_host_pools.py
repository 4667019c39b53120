import numpy as np
import psutil
import pytest
import torch

from engine_cache import PoolError
from engine_cache.pools.device import MHATokenToKVPool, MLATokenToKVPool, PoolShape
from engine_cache.pools.host import HOST_LAYOUTS, MHATokenToKVPoolHost, MLATokenToKVPoolHost, require_host_memory
from engine_cache.pools.host_rows import BytelessHostPool, host_pool_size
from engine_cache.settings import HICACHE_HOST_MEMORY_RESERVE_BYTES, host_memory_reserve_bytes
from kv_events.errors import InvalidValueError

pytestmark = pytest.mark.torch
PAGE, SIZE, LAYERS = 4, 32, 3


def device_pool(kind, dtype=torch.float32):
    shape = PoolShape(SIZE, PAGE, LAYERS, dtype)
    pool = MHATokenToKVPool(shape, 2, 5) if kind == "mha" else MLATokenToKVPool(shape, 6, 3)
    for tensor in tensors(pool):
        tensor.copy_(torch.randn(tensor.shape))
    return pool


def tensors(pool):
    return [*pool.k_buffer, *pool.v_buffer] if isinstance(pool, MHATokenToKVPool) else pool.kv_buffer


def host_pool(device, **options):
    kind = MHATokenToKVPoolHost if isinstance(device, MHATokenToKVPool) else MLATokenToKVPoolHost
    return kind(device, **({"reserve_bytes": 0} | options))


def pages(*numbers):
    return (np.array(numbers)[:, None] * PAGE + np.arange(PAGE)).reshape(-1)


@pytest.fixture(params=["mha", "mla"])
def kind(request):
    return request.param


@pytest.mark.parametrize("layout", HOST_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_loaded_back_equals_what_was_backed_up_bit_for_bit(kind, layout, dtype):
    device = device_pool(kind, dtype)
    host = host_pool(device, layout=layout)
    before = [tensor.clone() for tensor in tensors(device)]
    backed_up, loaded = pages(5, 2, 7), pages(1, 3, 4)
    host.backup_from_device_all_layer(device, pages(9, 0, 4), backed_up)
    for layer in range(LAYERS):
        host.load_to_device_per_layer(device, pages(9, 0, 4), loaded, layer)
    for tensor, old in zip(tensors(device), before, strict=True):
        assert torch.equal(tensor[torch.from_numpy(loaded)], old[torch.from_numpy(backed_up)])
        untouched = np.setdiff1d(np.arange(SIZE + PAGE), loaded)
        assert torch.equal(tensor[torch.from_numpy(untouched)], old[torch.from_numpy(untouched)])


def test_a_load_moves_one_layer(kind):
    device = device_pool(kind)
    host = host_pool(device)
    host.backup_from_device_all_layer(device, pages(0), pages(1))
    for tensor in tensors(device):
        tensor.zero_()
    host.load_to_device_per_layer(device, pages(0), pages(2), 1)
    per_layer = [device.get_kv_buffer(layer) for layer in range(LAYERS)]
    filled = [bool((held[0] if kind == "mha" else held).any()) for held in per_layer]
    assert filled == [False, True, False]


@pytest.mark.parametrize("layout", HOST_LAYOUTS)
def test_a_flat_page_brings_its_bytes_to_another_page(kind, layout):
    device = device_pool(kind)
    host = host_pool(device, layout=layout)
    host.backup_from_device_all_layer(device, pages(3, 4), pages(1, 2))
    flat = host.get_data_page(3 * PAGE)
    dummy = host.get_dummy_flat_data_page()
    assert (dummy.shape, dummy.dtype) == (flat.shape, flat.dtype)
    assert flat.nbytes == PAGE * host.size_per_token
    host.set_from_flat_data_page(8 * PAGE, flat)
    for layer in range(LAYERS):
        host.load_to_device_per_layer(device, pages(8), pages(6), layer)
    for tensor in tensors(device):
        assert torch.equal(tensor[6 * PAGE : 7 * PAGE], tensor[PAGE : 2 * PAGE])


def test_a_flat_page_is_a_copy(kind):
    host = host_pool(device_pool(kind))
    host.kv_buffer.zero_()
    host.get_data_page(0).fill_(1)
    assert not host.kv_buffer.any()


@pytest.mark.parametrize(
    ("kind", "layout", "shape"),
    [
        ("mha", "layer_first", (2, LAYERS, 68, 2, 5)),
        ("mha", "page_first", (2, 68, LAYERS, 2, 5)),
        ("mha", "page_first_direct", (2, 17, LAYERS, PAGE, 2, 5)),
        ("mla", "layer_first", (LAYERS, 68, 1, 9)),
        ("mla", "page_first", (68, LAYERS, 1, 9)),
        ("mla", "page_first_direct", (17, LAYERS, PAGE, 1, 9)),
    ],
)
def test_the_layouts_have_their_shapes(kind, layout, shape):
    host = host_pool(device_pool(kind), layout=layout)
    assert tuple(host.kv_buffer.shape) == shape
    assert host.get_hybrid_pool_buffer() == [host.kv_buffer]


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_the_runs_of_a_page_are_its_flat_bytes(kind, layout):
    device = device_pool(kind)
    host = host_pool(device, layout=layout)
    host.backup_from_device_all_layer(device, pages(2, 5), pages(1, 2))
    addresses, lengths = host.get_page_buffer_meta(pages(5, 2))
    assert len(addresses) == (4 if kind == "mha" else 2)
    assert sum(lengths) == 2 * PAGE * host.size_per_token
    base, bytes_held = host.kv_buffer.data_ptr(), host.kv_buffer.view(torch.uint8).flatten()
    runs = [bytes_held[a - base : a - base + n] for a, n in zip(addresses, lengths, strict=True)]
    half = len(runs) // 2
    assert torch.equal(torch.cat(runs[:half]), host.get_data_page(5 * PAGE).view(torch.uint8))
    assert torch.equal(torch.cat(runs[half:]), host.get_data_page(2 * PAGE).view(torch.uint8))


def test_pages_that_are_no_run_of_memory_have_no_addresses(kind):
    with pytest.raises(InvalidValueError, match="layer_first"):
        host_pool(device_pool(kind)).get_page_buffer_meta(pages(0))


def test_the_size_of_a_row_is_what_it_takes():
    mha, mla = host_pool(device_pool("mha", torch.bfloat16)), host_pool(device_pool("mla"))
    assert mha.size_per_token == 5 * 2 * LAYERS * 2 * 2
    assert mla.size_per_token == 9 * LAYERS * 4
    assert mha.kv_buffer.nbytes == mha.size * mha.size_per_token


@pytest.mark.parametrize(
    ("indices", "error"),
    [
        (pages(17), IndexError),
        (pages(-1), IndexError),
        (pages(1) + 1, InvalidValueError),
        (pages(1)[::-1].copy(), InvalidValueError),
        (pages(1)[:3], InvalidValueError),
        (np.array([0, 1, 2, 7]), InvalidValueError),
    ],
)
def test_indices_that_are_no_pages_of_the_pool_are_refused(indices, error):
    device = device_pool("mha")
    host = host_pool(device, layout="page_first")
    with pytest.raises(error, match="host pool kv"):
        host.backup_from_device_all_layer(device, indices, np.arange(len(indices)))
    with pytest.raises(error, match="host pool kv"):
        host.get_page_buffer_meta(indices)


@pytest.mark.parametrize(("index", "error"), [(68, IndexError), (-4, IndexError), (2, InvalidValueError)])
def test_a_page_that_does_not_exist_is_neither_read_nor_written(index, error):
    host = host_pool(device_pool("mla"))
    with pytest.raises(error, match=str(index)):
        host.get_data_page(index)
    with pytest.raises(error, match=str(index)):
        host.set_from_flat_data_page(index, host.get_dummy_flat_data_page())


def test_both_sides_of_a_copy_have_as_many_rows():
    device = device_pool("mha")
    with pytest.raises(InvalidValueError, match="one a device index, 4"):
        host_pool(device).backup_from_device_all_layer(device, pages(0, 1), pages(1))


def test_the_device_pool_of_another_kind_is_refused():
    with pytest.raises(InvalidValueError, match="MLATokenToKVPool"):
        host_pool(device_pool("mha")).backup_from_device_all_layer(device_pool("mla"), pages(0), pages(1))
    with pytest.raises(InvalidValueError, match="MHATokenToKVPool"):
        host_pool(device_pool("mla")).backup_from_device_all_layer(device_pool("mha"), pages(0), pages(1))


def test_an_unknown_layout_is_refused_with_the_known_ones():
    with pytest.raises(InvalidValueError, match="layer_first, page_first"):
        host_pool(device_pool("mha"), layout="kv_first")


def test_rows_are_whole_pages_from_zero():
    rows = BytelessHostPool(12, 4)
    assert rows.alloc(8).tolist() == list(range(8))
    assert rows.available_size() == 4
    assert rows.alloc(8) is None
    assert rows.free_pages().tolist() == [2]
    rows.free(np.arange(4))
    assert rows.available_size() == 8
    with pytest.raises(InvalidValueError, match="6"):
        rows.alloc(6)
    rows.clear()
    assert rows.available_size() == 12


def test_a_page_of_the_host_is_freed_once():
    rows = BytelessHostPool(12, 4)
    taken = rows.alloc(4)
    rows.free(taken)
    with pytest.raises(PoolError, match="page 0"):
        rows.free(taken)
    with pytest.raises(PoolError, match=r"0 \.\. 2"):
        rows.free(np.arange(12, 16))


def test_a_pool_without_bytes_has_rows_and_copies_nothing():
    pool = BytelessHostPool(8, 4)
    pool.backup_from_device_all_layer(None, pool.alloc(4), np.arange(4))
    pool.load_to_device_per_layer(None, np.arange(4), np.arange(4), 0)
    assert pool.available_size() == 4


def test_the_size_follows_from_ratio_or_gigabytes():
    assert host_pool_size(100, 8, 1000, ratio=1.5) == 152
    assert host_pool_size(100, 8, 1000, host_size_gb=0.0002) == 208
    assert host_pool_size(100, 8, 1000, host_size_gb=0.0002, ratio=9) == 208


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ratio": 0.5}, "56, expected more rows than the device pool's 100"),
        ({"host_size_gb": 0.00005}, "56, expected more rows"),
        ({"host_size_gb": -1}, "-1"),
        ({"page_size": 0}, "page_size: got 0"),
    ],
)
def test_a_host_that_cannot_hold_the_device_is_refused(options, words):
    with pytest.raises(InvalidValueError, match=words):
        host_pool_size(**({"device_size": 100, "page_size": 8, "size_per_token": 1000} | options))


def test_more_memory_than_is_free_less_the_reserve_is_refused_with_the_figures(monkeypatch):
    available = 12 * 10**9
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": available}))
    with pytest.raises(InvalidValueError, match=r"kv.*3\.50 GB.*at most 1\.26 GB.*10\.74 GB"):
        require_host_memory({"kv": 3_500_000_000}, HICACHE_HOST_MEMORY_RESERVE_BYTES)
    require_host_memory({"kv": 1_200_000_000}, HICACHE_HOST_MEMORY_RESERVE_BYTES)
    with pytest.raises(InvalidValueError, match=r"kv, mamba.*2\.00 GB"):
        require_host_memory({"kv": 10**9, "mamba": 10**9}, HICACHE_HOST_MEMORY_RESERVE_BYTES)


def test_a_pool_that_is_too_large_allocates_nothing(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    monkeypatch.setattr(torch, "empty", lambda *_args, **_options: pytest.fail("memory was allocated"))
    with pytest.raises(InvalidValueError, match="memory of host pool kv"):
        host_pool(device_pool("mha"))


def test_the_reserve_is_a_setting(monkeypatch):
    assert host_memory_reserve_bytes() == 10 * 1024**3
    monkeypatch.setenv("KVSIGHT_HOST_MEMORY_RESERVE_BYTES", "123")
    assert host_memory_reserve_bytes() == 123
    monkeypatch.setenv("KVSIGHT_HOST_MEMORY_RESERVE_BYTES", "10GB")
    with pytest.raises(InvalidValueError, match="10GB"):
        host_memory_reserve_bytes()
