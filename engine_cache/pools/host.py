"""Host pools with bytes: pages in CPU memory, which is pinned with CUDA.

On the host, whole pages are copied; on the device, rows by number. Each tensor holds all layers, in one of three
layouts:

    layer_first         (layers, size, ...)           fast copies to and from the device, layer by layer
    page_first          (size, layers, ...)           a page is contiguous, which storage backends need
    page_first_direct   (pages, layers, page, ...)    the same, and each layer of a page is contiguous, too

Pages that do not consist of rows, such as states, have the layout page_first_direct in both page-first layouts.
"""

import abc
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias, TypedDict, Unpack

import numpy as np
import psutil
import torch

from engine_cache.errors import PoolError
from engine_cache.pools.allocators import PagedTokenToKVPoolAllocator, host_pool_size
from engine_cache.pools.device import MHATokenToKVPool, MLATokenToKVPool, NSATokenToKVPool, index_pages
from engine_cache.pools.mamba import MambaPool
from engine_cache.settings import host_memory_reserve_bytes
from engine_cache.types import IndexArray
from kv_events.errors import InvalidValueError

_LAYER_AXIS = {"layer_first": 0, "page_first": 2, "page_first_direct": 1}  # among pages and rows of a page
HOST_LAYOUTS = tuple(_LAYER_AXIS)


class HostPoolOptions(TypedDict, total=False):
    """Options of a host pool, in addition to its device pool."""

    layout: str
    """One of `HOST_LAYOUTS`; layer_first if not given."""
    reserve_bytes: int | None
    """See `require_host_memory`, which is called before anything is allocated."""
    allocate: bool
    """False: create no tensors yet, so that the pools of a stack can be refused or allocated together."""
    host_size_gb: float
    """Memory of the pool. 0 (default): determined by `ratio`. See `host_pool_size`."""
    ratio: float
    """Host rows for each device row; default 2.0."""


class PageTensor(NamedTuple):
    """One tensor of a pool: what it holds of a page in each layer."""

    rows: int | None
    """Rows per page. None if a page does not consist of rows."""
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    num_parts: int = 1
    """2 for keys and values, which share a tensor."""


class Part(NamedTuple):
    """Two views of one tensor of a pool, or of its keys or values."""

    by_layer: torch.Tensor
    """(layers, pages, *shape of one layer of a page*)"""
    by_page: torch.Tensor
    """uint8 (pages, *shape of a page*), in memory order."""


class TensorHostPool(PagedTokenToKVPoolAllocator, abc.ABC):
    """Rows and bytes of the host tier of one device pool.

    name: as in `PoolName`. device_size: rows of the device pool, which determine `size`, if that is not given.
    num_pages: pages of the tensors, if more than the rows need. All methods expect host indices of whole pages. Other
    indices raise InvalidValueError or IndexError, which name the pool.
    """

    def __init__(
        self,
        name: str,
        device_pool: object,
        page_size: int,
        layer_num: int,
        tensors: Sequence[PageTensor],
        *,
        device_size: int = 0,
        size: int | None = None,
        num_pages: int | None = None,
        layout: str = "layer_first",
        reserve_bytes: int | None = None,
        allocate: bool = True,
        host_size_gb: float = 0.0,
        ratio: float = 2.0,
    ) -> None:
        if layout not in HOST_LAYOUTS:
            raise InvalidValueError("layout", layout, f"one of {', '.join(HOST_LAYOUTS)}")
        page_bytes = sum(
            each.num_parts * (each.rows or 1) * prod(each.row_shape) * each.dtype.itemsize for each in tensors
        )
        self.size_per_token = layer_num * page_bytes // page_size
        """Bytes per row, all layers."""
        if size is None:
            size = host_pool_size(device_size, page_size, self.size_per_token, host_size_gb=host_size_gb, ratio=ratio)
        super().__init__(size, page_size, first_page=0)
        self.name = name
        self.layout = layout
        self.layer_num = layer_num
        self._device_class = type(device_pool)
        self._num_pages = num_pages or size // page_size
        self._tensors = tensors
        self.release()
        if allocate:
            require_host_memory({name: self.required_bytes}, reserve_bytes)
            self.allocate()

    @property
    def required_bytes(self) -> int:
        """Bytes that `allocate` needs."""
        return self._num_pages * self.page_size * self.size_per_token

    def allocate(self) -> None:
        """Create the tensors of a pool that was constructed without them."""
        for tensor in self._tensors:
            axis = min(_LAYER_AXIS[self.layout], 1 if tensor.rows is None else 2)
            shape = [self._num_pages, tensor.rows or 1]
            shape.insert(axis, self.layer_num)
            pin = torch.cuda.is_available()
            held = torch.empty((tensor.num_parts, *shape, *tensor.row_shape), dtype=tensor.dtype, pin_memory=pin)
            for part in held:
                by_page = part.movedim(0, 1) if axis == 0 else part
                self._parts.append(Part(part.movedim(axis, 0), by_page.view(torch.uint8)))
            if axis != 1:  # pages and their rows are adjacent
                held = held.flatten(1 + (axis == 0), 2 + (axis == 0))
            self._buffers.append(held if tensor.num_parts > 1 else held[0])

    def release(self) -> None:
        """Free the memory. The pool cannot be used afterwards."""
        self._buffers: list[torch.Tensor] = []
        self._parts: list[Part] = []

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        """Return all tensors that a storage backend must know to read and write pages in place."""
        return self._buffers

    @abc.abstractmethod
    def _layer_tensors(self, device_pool: Any, layer_id: int) -> Sequence[torch.Tensor]:
        """Return the device tensors of a layer, one for each part."""

    # --- device and host --------------------------------------------------------------------------------------------

    def backup_from_device_all_layer(
        self, device_pool: object, host_indices: IndexArray, device_indices: IndexArray
    ) -> None:
        """Copy device rows into host pages, all layers. Returns when the bytes are on the host."""
        pages, rows = self._matched(device_pool, host_indices, device_indices)
        for layer in range(self.layer_num):
            held = [tensor.index_select(0, rows) for tensor in self._layer_tensors(device_pool, layer)]
            for part, copied in zip(self._parts, _to_host(held), strict=True):
                kept = part.by_layer[layer]
                kept.index_copy_(0, pages, copied.view(-1, *kept.shape[1:]))

    def load_to_device_per_layer(
        self, device_pool: object, host_indices: IndexArray, device_indices: IndexArray, layer_id: int
    ) -> None:
        """Copy one layer of host pages into device rows. With CUDA: on the current stream."""
        pages, rows = self._matched(device_pool, host_indices, device_indices)
        for part, target in zip(self._parts, self._layer_tensors(device_pool, layer_id), strict=True):
            kept = part.by_layer[layer_id]
            shape = (len(pages), *kept.shape[1:])
            held = torch.empty(shape, dtype=kept.dtype, pin_memory=target.is_cuda)
            torch.index_select(kept, 0, pages, out=held)
            target.index_copy_(0, rows, held.view(-1, *target.shape[1:]).to(target.device, non_blocking=True))

    def _matched(
        self, device_pool: object, host_indices: IndexArray, device_indices: IndexArray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(device_pool, self._device_class):
            raise InvalidValueError("device pool", type(device_pool).__name__, self._device_class.__name__)
        if len(host_indices) != len(device_indices):
            expected = f"one a device index, {len(device_indices)}"
            raise InvalidValueError(f"host indices of pool {self.name}", len(host_indices), expected)
        device_tensor = self._layer_tensors(device_pool, 0)[0]
        rows = self._device_rows(device_indices)
        for row in rows[(rows < 0) | (rows >= len(device_tensor))][:1]:  # the copy would break the CUDA context
            raise IndexError(f"device pool {self.name}: row {row}, its tensors have 0 .. {len(device_tensor) - 1}")
        return torch.from_numpy(self._pages(host_indices)), torch.from_numpy(rows).to(device_tensor.device)

    def _device_rows(self, device_indices: IndexArray) -> IndexArray:
        """Return the rows of the device tensors for row numbers of the device pool."""
        return device_indices

    # --- host pages -------------------------------------------------------------------------------------------------

    def get_data_page(self, index: int) -> torch.Tensor:
        """Return a copy of the page that begins at row `index`, part by part."""
        page = self._page_number(index)
        return torch.cat([part.by_page[page].reshape(-1) for part in self._parts])

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Return a tensor of the shape and dtype of `get_data_page`, as a target for reads."""
        return torch.zeros(self.page_size * self.size_per_token, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int, data: torch.Tensor) -> None:
        """Write data in the form of `get_data_page` into the page that begins at row `index`."""
        page = self._page_number(index)
        held = [part.by_page[page] for part in self._parts]
        for bytes_held, flat in zip(held, data.split_with_sizes([each.numel() for each in held]), strict=True):
            bytes_held.copy_(flat.view(bytes_held.shape))

    def get_page_buffer_meta(self, indices: IndexArray) -> tuple[list[int], list[int]]:
        """Return address and length in bytes of the memory of each page, page by page, with one run for each part.

        Raises InvalidValueError for `layer_first`, in which a page is not contiguous.
        """
        if self.layout == "layer_first":
            raise InvalidValueError(f"layout of host pool {self.name}", self.layout, "page_first or page_first_direct")
        pages = self._pages(indices)
        addresses = [part.by_page.data_ptr() + pages * part.by_page.stride(0) for part in self._parts]
        lengths = [part.by_page[0].numel() for part in self._parts]
        return np.stack(addresses, axis=1).reshape(-1).tolist(), lengths * len(pages)

    def _page_number(self, index: int) -> int:
        if not 0 <= index <= self.size - self.page_size:
            raise IndexError(f"host pool {self.name}: page at row {index}, the pool has rows 0 .. {self.size - 1}")
        if index % self.page_size:
            raise InvalidValueError(f"index of host pool {self.name}", index, f"a multiple of {self.page_size}")
        return index // self.page_size

    def _pages(self, indices: IndexArray) -> IndexArray:
        pages = whole_pages(f"host pool {self.name}", indices, self.page_size)
        for page in pages[(pages < 0) | (pages >= self.size // self.page_size)][:1]:
            self._page_number(int(page) * self.page_size)
        return pages


class HostKVPool(TensorHostPool):
    """Host pages of keys and values, or of compressed KV."""

    def __init__(
        self, device_pool: MHATokenToKVPool | MLATokenToKVPool, name: str = "kv", **options: Unpack[HostPoolOptions]
    ) -> None:
        shape, tensors = device_pool.shape, self._layer_tensors(device_pool, 0)
        kv = PageTensor(shape.page_size, tuple(tensors[0].shape[1:]), shape.dtype, len(tensors))
        super().__init__(name, device_pool, shape.page_size, shape.layer_num, [kv], device_size=shape.size, **options)

    @property
    def kv_buffer(self) -> torch.Tensor:
        """MHA: (2, *layout*, heads, size of a head). MLA: (*layout*, 1, kv_cache_dim)."""
        return self._buffers[0]

    def _layer_tensors(self, device_pool: MHATokenToKVPool | MLATokenToKVPool, layer_id: int) -> Sequence[torch.Tensor]:
        held = device_pool.get_kv_buffer(layer_id)
        return held if isinstance(held, tuple) else (held,)


MHATokenToKVPoolHost: TypeAlias = HostKVPool
MLATokenToKVPoolHost: TypeAlias = HostKVPool
"""The names of the host pools of an `MHATokenToKVPool` and an `MLATokenToKVPool`."""


class MambaPoolHost(TensorHostPool):
    """Host slots of a `MambaPool`. A slot is a page. Every tensor of the device pool has a counterpart."""

    def __init__(self, device_pool: MambaPool, name: str = "mamba", **options: Unpack[HostPoolOptions]) -> None:
        # a scalar state becomes a row of length one
        held = [(tuple(each.shape[2:]) or (1,), each.dtype) for each in device_pool.mamba_cache.tensors()]
        tensors = [PageTensor(None, shape, dtype) for shape, dtype in held]
        super().__init__(name, device_pool, 1, device_pool.layer_num, tensors, device_size=device_pool.size, **options)

    def _layer_tensors(self, device_pool: MambaPool, layer_id: int) -> Sequence[torch.Tensor]:
        return device_pool.layer(layer_id).tensors()


class NSAIndexerPoolHost(TensorHostPool):
    """Host pages of the index of an `NSATokenToKVPool`, one for each page of KV, and one unused page.

    anchor: the host pool of its KV, which determines size, page size and rows. This pool allocates no rows, so `alloc`
    and `free` raise PoolError: an index page has the same lifetime as the KV page with the same rows.
    """

    def __init__(
        self,
        device_pool: NSATokenToKVPool,
        anchor: HostKVPool,
        name: str = "indexer",
        **options: Unpack[HostPoolOptions],
    ) -> None:
        shape, page_size = device_pool.shape, anchor.page_size
        if shape.page_size != page_size:
            raise InvalidValueError("page size of the index", shape.page_size, f"KV's, {page_size}")
        index = PageTensor(None, (page_size * device_pool.index_row_bytes,), torch.uint8)
        num_pages = index_pages(anchor.size, page_size)
        super().__init__(
            name, device_pool, page_size, shape.layer_num, [index], size=anchor.size, num_pages=num_pages, **options
        )

    @property
    def index_k_with_scale_buffer(self) -> torch.Tensor:
        """uint8 (layers, pages, stride) in the layout layer_first, else (pages, layers, 1, stride)."""
        return self._buffers[0]

    def alloc(self, need_size: int) -> IndexArray | None:
        raise PoolError(f"host pool {self.name} allocates no rows: it uses those of its anchor")

    def free(self, indices: IndexArray) -> None:
        raise PoolError(f"host pool {self.name} frees no rows: they belong to its anchor")

    def _layer_tensors(self, device_pool: NSATokenToKVPool, layer_id: int) -> Sequence[torch.Tensor]:
        return (device_pool.get_index_k_with_scale_buffer(layer_id),)

    def _device_rows(self, device_indices: IndexArray) -> IndexArray:
        """Return page numbers, because an index is copied by whole pages on both sides."""
        return whole_pages(f"device pool {self.name}", device_indices, self.page_size)


def require_host_memory(requested: Mapping[str, int], reserve_bytes: int | None = None) -> None:
    """Refuse pools that would leave less free memory than the reserve.

    requested: bytes by pool name, for all pools of a stack. reserve_bytes: None for the setting. Raises
    InvalidValueError with all figures in GB.
    """
    reserve = host_memory_reserve_bytes() if reserve_bytes is None else reserve_bytes
    available = psutil.virtual_memory().available - reserve
    total = sum(requested.values())
    if total > available:
        names = ", ".join(requested)
        raise InvalidValueError(
            f"memory of host pool {names}",
            f"{total / 1e9:.2f} GB",
            f"at most {available / 1e9:.2f} GB, which is what is available less a reserve of {reserve / 1e9:.2f} GB; "
            "reduce the size of the host cache",
        )


def allocate_host_pools(pools: Sequence[TensorHostPool], reserve_bytes: int | None = None) -> None:
    """Allocate the pools of a stack if there is room for all of them. After an error nothing remains allocated."""
    require_host_memory({pool.name: pool.required_bytes for pool in pools}, reserve_bytes)
    try:
        for pool in pools:
            pool.allocate()
    except BaseException:
        for pool in pools:
            pool.release()
        raise


def whole_pages(pool: str, indices: IndexArray, page_size: int) -> IndexArray:
    """Return the page numbers of rows given page by page. Raises InvalidValueError naming the pool for others."""
    if len(indices) % page_size:
        raise InvalidValueError(f"number of indices of {pool}", len(indices), f"a multiple of {page_size}")
    by_page = indices.reshape(-1, page_size)
    first = by_page[:, 0]
    torn = (first % page_size != 0) | (by_page != first[:, None] + np.arange(page_size)).any(1)
    if torn.any():
        raise InvalidValueError(f"indices of {pool}", by_page[torn.argmax()].tolist(), f"a page of {page_size} rows")
    pages: IndexArray = first // page_size
    return pages


def _to_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors in CPU memory. With CUDA, copy concurrently through pinned memory and wait for the stream."""
    if not tensors[0].is_cuda:
        return tensors
    staged = [torch.empty(held.shape, dtype=held.dtype, pin_memory=True) for held in tensors]
    for kept, held in zip(staged, tensors, strict=True):
        kept.copy_(held, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return staged
