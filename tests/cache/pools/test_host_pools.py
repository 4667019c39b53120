"""What every host pool of tensors keeps: bytes there and back, flat pages, addresses, and refusals. Their memory."""

from typing import Any

import numpy as np
import psutil
import pytest
import torch

from engine_cache import PoolError
from engine_cache.pools.allocators import host_pool_size
from engine_cache.pools.device import MHATokenToKVPool, MLATokenToKVPool, NSATokenToKVPool, PoolShape
from engine_cache.pools.host import (
    HOST_LAYOUTS,
    MambaPoolHost,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    NSAIndexerPoolHost,
    allocate_host_pools,
    require_host_memory,
)
from engine_cache.pools.mamba import MambaPool
from engine_cache.settings import HICACHE_HOST_MEMORY_RESERVE_BYTES, host_memory_reserve_bytes
from kv_events.errors import InvalidValueError

PAGE, SIZE, LAYERS = 4, 32, 3
KINDS = ["mha", "mla", "indexer", "mamba"]
CONV_SHAPES, TEMPORAL_SHAPE = [(3, 1), (), (7,)], (2, 5)
STATE_SHAPES = (TEMPORAL_SHAPE, (3, 1), (1,), (7,))  # as the host has them


def device_pool(kind, page_size=PAGE):
    shape = PoolShape(SIZE // page_size * page_size, page_size, LAYERS, torch.float16)
    device: Any
    match kind:
        case "mha":
            device = MHATokenToKVPool(shape, 2, 5)
        case "mla":
            device = MLATokenToKVPool(shape, 6, 3)
        case "indexer":
            device = NSATokenToKVPool(shape, 4, 3, index_head_dim=256)
        case "mamba":
            device = MambaPool(SIZE // PAGE, LAYERS, CONV_SHAPES, TEMPORAL_SHAPE, temporal_dtype=torch.float64)
    for seed, tensor in enumerate(tensors(device)):
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
        tensor.copy_((noise * 100).to(tensor.dtype))
    return device


def host_pool(device, **options):
    options = {"reserve_bytes": 0} | options
    if isinstance(device, NSATokenToKVPool):
        return NSAIndexerPoolHost(device, MLATokenToKVPoolHost(device, reserve_bytes=0), **options)
    if isinstance(device, MambaPool):
        return MambaPoolHost(device, **options)
    kind = MHATokenToKVPoolHost if isinstance(device, MHATokenToKVPool) else MLATokenToKVPoolHost
    return kind(device, **options)


def tensors(device):
    """Return tensors whose first dimension is rows, pages or slots, layer by layer of each."""
    if isinstance(device, NSATokenToKVPool):
        return device.index_k_with_scale_buffer
    if isinstance(device, MambaPool):
        return [tensor[layer] for tensor in device.mamba_cache.tensors() for layer in range(LAYERS)]
    return [*device.k_buffer, *device.v_buffer] if isinstance(device, MHATokenToKVPool) else device.kv_buffer


def pages(host, *numbers):
    """Return the rows of pages, or the slots."""
    return (np.array(numbers)[:, None] * host.page_size + np.arange(host.page_size)).reshape(-1)


def held(device, *numbers):
    """Return the content of pages, or slots, tensor by tensor."""
    rows = [number * PAGE + row for number in numbers for row in range(PAGE)]
    index = rows if isinstance(device, MHATokenToKVPool | MLATokenToKVPool) and not is_index(device) else numbers
    return [tensor[list(index)].clone() for tensor in tensors(device)]


def is_index(device):
    return isinstance(device, NSATokenToKVPool)


def equal(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def load(device, host, there, here, layers=range(LAYERS)):
    for layer in layers:
        host.load_to_device_per_layer(device, pages(host, *there), pages(host, *here), layer)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def device(kind):
    return device_pool(kind)


@pytest.fixture(params=HOST_LAYOUTS)
def host(request, device):
    return host_pool(device, layout=request.param)


# --- bytes ---


def test_what_is_loaded_back_equals_what_was_backed_up_and_nothing_else_moves(device, host):
    before = held(device, 5, 2, 7)
    untouched = held(device, 0, 2, 5, 6, 7)
    host.backup_from_device_all_layer(device, pages(host, 8, 0, 4), pages(host, 5, 2, 7))
    load(device, host, (4, 8, 0), (1, 3, 4))
    assert equal(held(device, 3, 4, 1), before)
    assert equal(held(device, 0, 2, 5, 6, 7), untouched)
    load(device, host, (8, 8), (1, 4))
    assert equal(held(device, 1), held(device, 4))


def test_a_load_moves_one_layer(device, host):
    host.backup_from_device_all_layer(device, pages(host, 0), pages(host, 1))
    for tensor in tensors(device):
        tensor.zero_()
    load(device, host, (0,), (2,), [1])
    per_layer = [[bool(tensor.any()) for tensor in tensors(device)][layer::LAYERS] for layer in range(LAYERS)]
    assert [any(each) for each in per_layer] == [False, True, False]


def test_a_flat_page_is_a_copy_of_all_layers_that_can_be_written_to_another_page(device, host, kind):
    host.backup_from_device_all_layer(device, pages(host, 3, 4), pages(host, 1, 2))
    flat, dummy = host.get_data_page(3 * host.page_size), host.get_dummy_flat_data_page()
    assert (dummy.shape, dummy.dtype) == (flat.shape, flat.dtype)
    assert flat.nbytes == host.page_size * host.size_per_token
    if kind in ("indexer", "mamba"):  # each tensor in order
        assert flat.numpy().tobytes() == b"".join(
            part.view(-1).view(torch.uint8).numpy().tobytes() for part in held(device, 1)
        )
    host.set_from_flat_data_page(8 * host.page_size, flat)
    flat.zero_()
    load(device, host, (8,), (6,))
    assert equal(held(device, 6), held(device, 1))
    assert torch.equal(host.get_data_page(8 * host.page_size), host.get_data_page(3 * host.page_size))


SHAPES = {
    "mha": [(2, LAYERS, 68, 2, 5)], "mla": [(LAYERS, 68, 1, 9)],
    "indexer": [(LAYERS, 18, PAGE * 264)],
    "mamba": [(LAYERS, 17, *shape) for shape in STATE_SHAPES],
}  # fmt: skip
PAGE_FIRST = {
    "mha": [(2, 68, LAYERS, 2, 5)], "mla": [(68, LAYERS, 1, 9)],
    "indexer": [(18, LAYERS, 1, PAGE * 264)],
    "mamba": [(17, LAYERS, 1, *shape) for shape in STATE_SHAPES],
}  # fmt: skip
DIRECT = PAGE_FIRST | {"mha": [(2, 17, LAYERS, PAGE, 2, 5)], "mla": [(17, LAYERS, PAGE, 1, 9)]}


def test_the_layouts_have_their_shapes(host, kind):
    expected = {"layer_first": SHAPES, "page_first": PAGE_FIRST, "page_first_direct": DIRECT}[host.layout][kind]
    buffers = host.get_hybrid_pool_buffer()
    assert [tuple(buffer.shape) for buffer in buffers] == expected
    assert sum(buffer.nbytes for buffer in buffers) == host.required_bytes


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_the_runs_of_a_page_are_its_flat_bytes(device, kind, layout):
    host = host_pool(device, layout=layout)
    host.backup_from_device_all_layer(device, pages(host, 2, 5), pages(host, 1, 2))
    addresses, lengths = host.get_page_buffer_meta(pages(host, 5, 2))
    runs_per_page = {"mha": 2, "mamba": 4}.get(kind, 1)
    assert len(addresses) == 2 * runs_per_page
    found = []
    for at, number in zip(addresses, lengths, strict=True):
        buffers = host.get_hybrid_pool_buffer()
        (buffer,) = [each for each in buffers if 0 <= at - each.data_ptr() < each.nbytes]
        start = at - buffer.data_ptr()
        found.append(buffer.view(-1).view(torch.uint8)[start : start + number])
    half = len(found) // 2
    for parts, page in ((found[:half], 5), (found[half:], 2)):
        assert torch.equal(torch.cat(parts), host.get_data_page(page * host.page_size).view(torch.uint8))


def test_the_size_of_a_row_is_what_it_takes():
    sizes = [host_pool(device_pool(kind)).size_per_token for kind in KINDS]
    assert sizes == [5 * 2 * LAYERS * 2 * 2, 9 * LAYERS * 2, 264 * LAYERS, LAYERS * (11 * 2 + 10 * 8)]


# --- refusals ---


@pytest.mark.parametrize("wrong", [[5, 6, 7, 8], [7, 6, 5, 4], [4, 5, 6], [0, 1, 2, 7]])
@pytest.mark.parametrize("kind", KINDS[:3])
def test_rows_that_are_no_pages_are_refused_on_both_sides(device, wrong):
    host, rows = host_pool(device, layout="page_first"), np.array(wrong)
    with pytest.raises(InvalidValueError, match=f"(host|device) pool {host.name}"):
        host.backup_from_device_all_layer(device, rows, np.arange(len(rows)))
    with pytest.raises(InvalidValueError, match=f"host pool {host.name}"):
        host.get_page_buffer_meta(rows)
    if is_index(device) and len(rows) == PAGE:
        with pytest.raises(InvalidValueError, match=f"device pool {host.name}"):
            host.backup_from_device_all_layer(device, pages(host, 1), rows)


def test_a_page_that_does_not_exist_is_an_error_that_names_the_pool_before_anything_is_copied(device, kind):
    host = host_pool(device, layout="page_first")
    for number in (-1, 17):
        row, last = number * host.page_size, 17 * host.page_size - 1
        for use in (
            lambda: host.get_data_page(row),  # noqa: B023
            lambda: host.set_from_flat_data_page(row, host.get_dummy_flat_data_page()),  # noqa: B023
            lambda: host.backup_from_device_all_layer(device, pages(host, number), pages(host, 1)),  # noqa: B023
            lambda: load(device, host, (number,), (1,)),  # noqa: B023
            lambda: host.get_page_buffer_meta(pages(host, number)),  # noqa: B023
        ):
            words = f"host pool {host.name}: page at row {row}, the pool has rows 0 .. {last}"
            with pytest.raises(IndexError, match=words):
                use()
    if kind != "mamba":
        with pytest.raises(InvalidValueError, match="2"):
            host.get_data_page(2)
    far, before = pages(host, 1000), held(device, *range(8))
    for use in (host.backup_from_device_all_layer, lambda *rows: host.load_to_device_per_layer(*rows, 0)):
        with pytest.raises(IndexError, match=f"device pool {host.name}: row"):
            use(device, pages(host, 0), far)
    assert equal(held(device, *range(8)), before)


@pytest.mark.parametrize(("kind", "other"), [("mha", "mla"), ("mla", "mha"), ("indexer", "mha"), ("mamba", "mha")])
def test_layouts_rows_and_device_pools_that_do_not_fit_are_refused(device, other):
    host, foreign = host_pool(device), device_pool(other)
    for use, words in (
        (lambda: host_pool(device, layout="kv_first"), r"layout.*kv_first.*layer_first, page_first"),
        (
            lambda: host.get_page_buffer_meta(pages(host, 0)),
            rf"host pool {host.name}.*layer_first",
        ),  # no runs of memory
        (
            lambda: host.backup_from_device_all_layer(device, pages(host, 0, 1), pages(host, 1)),
            rf"one a device index, {host.page_size}|{host.name}.*2.*1",
        ),
        (lambda: host.backup_from_device_all_layer(foreign, pages(host, 0), pages(host, 1)), type(foreign).__name__),
    ):
        with pytest.raises(InvalidValueError, match=words):
            use()


# --- the index of sparse attention ---


@pytest.mark.parametrize("page_size", [1, 3, 8])
def test_the_host_index_has_the_size_and_pages_of_the_kv_it_belongs_to(page_size):
    device = device_pool("indexer", page_size=page_size)
    host, anchor = host_pool(device), MLATokenToKVPoolHost(device, reserve_bytes=0)
    assert (host.size, host.page_size) == (anchor.size, anchor.page_size)
    assert tuple(host.index_k_with_scale_buffer.shape) == (
        LAYERS,
        (anchor.size + page_size + 1) // page_size,
        page_size * 264,
    )
    before = held(device, 1)
    host.backup_from_device_all_layer(device, pages(host, 2), pages(host, 1))
    load(device, host, (2,), (3,))
    assert equal(held(device, 3), before)
    with pytest.raises(InvalidValueError, match=f"KV's, {page_size}"):
        NSAIndexerPoolHost(device_pool("indexer", page_size=page_size + 1), anchor, reserve_bytes=0)


def test_the_index_has_no_rows_to_give_or_take():
    host = host_pool(device_pool("indexer"))
    for use in (lambda: host.alloc(PAGE), lambda: host.free(pages(host, 0))):
        with pytest.raises(PoolError, match="indexer"):
            use()
    assert host.available_size() == host.size


# --- memory ---


def free_memory(monkeypatch, available):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": available}))


def test_the_size_follows_from_ratio_or_gigabytes():
    assert host_pool_size(100, 8, 1000, ratio=1.5) == 152
    assert host_pool_size(100, 8, 1000, host_size_gb=0.0002) == 208
    assert host_pool_size(100, 8, 1000, host_size_gb=0.0002, ratio=9) == 208
    states = device_pool("mamba")
    assert host_pool(states, ratio=1.0).size == 9
    assert host_pool(states, host_size_gb=9.5 * host_pool(states).size_per_token / 1e9).size == 10
    with pytest.raises(InvalidValueError, match="8"):
        host_pool(states, ratio=0.5)


@pytest.mark.parametrize(
    ("page_size", "options", "words"),
    [
        (8, {"ratio": 0.5}, "56, expected more rows than the device pool's 100"),
        (8, {"host_size_gb": 0.00005}, "56, expected more rows"),
        (8, {"host_size_gb": -1}, "-1"),
        (0, {}, "page_size: got 0"),
    ],
)
def test_a_host_that_cannot_hold_the_device_is_refused(page_size, options, words):
    with pytest.raises(InvalidValueError, match=words):
        host_pool_size(100, page_size, 1000, **options)


def test_more_memory_than_is_free_less_the_reserve_is_refused_with_the_figures(monkeypatch):
    free_memory(monkeypatch, 12 * 10**9)
    with pytest.raises(InvalidValueError, match=r"kv.*3\.50 GB.*at most 1\.26 GB.*10\.74 GB"):
        require_host_memory({"kv": 3_500_000_000}, HICACHE_HOST_MEMORY_RESERVE_BYTES)
    require_host_memory({"kv": 1_200_000_000}, HICACHE_HOST_MEMORY_RESERVE_BYTES)
    with pytest.raises(InvalidValueError, match=r"kv, mamba.*2\.00 GB"):
        require_host_memory({"kv": 10**9, "mamba": 10**9}, HICACHE_HOST_MEMORY_RESERVE_BYTES)


@pytest.mark.parametrize("kind", ["mha", "mla", "mamba"])
def test_a_pool_that_is_too_large_allocates_nothing(device, monkeypatch):
    free_memory(monkeypatch, 1000)
    monkeypatch.setattr(torch, "empty", lambda *_args, **_options: pytest.fail("memory was allocated"))
    with pytest.raises(InvalidValueError, match=r"memory of host pool (kv|mamba)"):
        host_pool(device)


def test_the_reserve_is_a_setting(monkeypatch):
    assert host_memory_reserve_bytes() == 10 * 1024**3
    monkeypatch.setenv("KVSIGHT_HOST_MEMORY_RESERVE_BYTES", "123")
    assert host_memory_reserve_bytes() == 123
    monkeypatch.setenv("KVSIGHT_HOST_MEMORY_RESERVE_BYTES", "10GB")
    with pytest.raises(InvalidValueError, match="10GB"):
        host_memory_reserve_bytes()


def planned():
    window = MLATokenToKVPoolHost(device_pool("mla"), "swa", allocate=False)
    return [host_pool(device_pool("mha"), allocate=False), window, host_pool(device_pool("mamba"), allocate=False)]


@pytest.mark.parametrize(("free", "fails"), [(99, False), (100, False), (100, True)])
def test_several_pools_are_made_if_they_fit_together_or_not_at_all(monkeypatch, free, fails):
    pools = planned()
    total = sum(pool.required_bytes for pool in pools)
    assert max(pool.required_bytes for pool in pools) < total - 1
    free_memory(monkeypatch, total + free)
    if fails:
        monkeypatch.setattr(pools[2], "allocate", lambda: (_ for _ in ()).throw(MemoryError("injected")))
    if free < 100 or fails:
        error, words = (MemoryError, "injected") if fails else (InvalidValueError, "host pool kv, swa, mamba")
        with pytest.raises(error, match=words):
            allocate_host_pools(pools, 100)
    else:
        allocate_host_pools(pools, 100)
    made = sum(tensor.nbytes for pool in pools for tensor in pool.get_hybrid_pool_buffer())
    assert made == (0 if free < 100 or fails else total)
