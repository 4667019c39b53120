"""Host pools: the pages of the device in CPU memory, pinned where there is CUDA.

A host page is copied whole, a device row by its number. One tensor holds all layers, in one of three layouts:

    layer_first         (layers, size, ...)           fast copies to and from the device, layer by layer
    page_first          (size, layers, ...)           a page is one run of memory, as stores like it
    page_first_direct   (pages, layers, page, ...)    the same, and each layer of a page is one run, too
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import psutil
import torch

from engine_cache.pools.device import MHATokenToKVPool, MLATokenToKVPool, PoolShape
from engine_cache.pools.host_rows import HostRows, host_pool_size
from engine_cache.settings import host_memory_reserve_bytes
from engine_cache.types import IndexArray
from kv_events.errors import InvalidValueError

HOST_LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def require_host_memory(requested: Mapping[str, int], reserve_bytes: int | None = None) -> None:
    """Refuse pools that would leave less than the reserve. requested: bytes by pool name, all pools of one stack at
    once. reserve_bytes: None for the setting. Raises InvalidValueError with every figure in GB."""
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


class HostKVPool(HostRows, abc.ABC):
    """Rows and bytes of a host tier that mirrors one device pool.

    host_size_gb, ratio: see `host_pool_size`. reserve_bytes: see `require_host_memory`; both are checked before a byte
    is allocated. Host indices are whole pages in every method; others raise InvalidValueError or IndexError.
    """

    name = "kv"

    def __init__(
        self,
        shape: PoolShape,
        row_shape: tuple[int, ...],
        num_parts: int,
        *,
        layout: str,
        host_size_gb: float,
        ratio: float,
        reserve_bytes: int | None,
    ) -> None:
        if layout not in HOST_LAYOUTS:
            raise InvalidValueError("layout", layout, f"one of {', '.join(HOST_LAYOUTS)}")
        self.layout = layout
        self.layer_num = shape.layer_num
        self.dtype = shape.dtype
        self.row_shape = row_shape
        self.size_per_token = prod(row_shape) * num_parts * shape.layer_num * shape.dtype.itemsize
        size = host_pool_size(shape.size, shape.page_size, self.size_per_token, host_size_gb=host_size_gb, ratio=ratio)
        require_host_memory({self.name: size * self.size_per_token}, reserve_bytes)
        super().__init__(size, shape.page_size)
        self._device_shape = shape
        self.kv_buffer = torch.empty(
            (*self._part_dims(num_parts), *self._layout_dims(), *row_shape),
            dtype=shape.dtype,
            pin_memory=torch.cuda.is_available(),
        )
        self._parts = self.kv_buffer.reshape(num_parts, *self._layout_dims(), *row_shape).unbind()

    @abc.abstractmethod
    def _device_rows(self, device_pool: object, layer_id: int) -> Sequence[torch.Tensor]:
        """The device tensors of a layer, one a part. Raises InvalidValueError for a pool of another kind."""

    def backup_from_device_all_layer(
        self, device_pool: object, host_indices: IndexArray, device_indices: IndexArray
    ) -> None:
        """Copy rows of the device into host pages, all layers. Returns when the bytes are there."""
        pages, rows = self._matched(host_indices, device_indices)
        for layer in range(self.layer_num):
            for part, held in zip(self._parts, self._device_rows(device_pool, layer), strict=True):
                copied = held.index_select(0, rows).to("cpu")
                self._layer(part, layer).index_copy_(0, pages, copied.view(-1, self.page_size, *self.row_shape))

    def load_to_device_per_layer(
        self, device_pool: object, host_indices: IndexArray, device_indices: IndexArray, layer_id: int
    ) -> None:
        """Copy host pages into rows of the device, one layer."""
        pages, rows = self._matched(host_indices, device_indices)
        for part, wanted in zip(self._parts, self._device_rows(device_pool, layer_id), strict=True):
            held = self._layer(part, layer_id).index_select(0, pages)
            wanted.index_copy_(0, rows, held.view(-1, *self.row_shape).to(wanted.device))

    def get_data_page(self, index: int) -> torch.Tensor:
        """The page that begins at row `index`, flat; a copy."""
        page = self._page_number(index)
        return torch.cat([self._page(part, page).reshape(-1) for part in self._parts])

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """A tensor of the shape and dtype of `get_data_page`, to be read into."""
        return torch.zeros(self.page_size * self.size_per_token // self.dtype.itemsize, dtype=self.dtype)

    def set_from_flat_data_page(self, index: int, data: torch.Tensor) -> None:
        """Write what `get_data_page` gave into the page that begins at row `index`."""
        page = self._page_number(index)
        for part, flat in zip(self._parts, data.chunk(len(self._parts)), strict=True):
            held = self._page(part, page)
            held.copy_(flat.view(held.shape))

    def get_page_buffer_meta(self, indices: IndexArray) -> tuple[list[int], list[int]]:
        """Address and length in bytes of every run of memory of the pages, page by page, keys before values. Raises
        InvalidValueError for `layer_first`, where a page is no run."""
        if self.layout == "layer_first":
            raise InvalidValueError(f"layout of host pool {self.name}", self.layout, "page_first or page_first_direct")
        runs = [self._page(part, page) for page in self._pages(indices).tolist() for part in self._parts]
        return [run.data_ptr() for run in runs], [run.numel() * run.element_size() for run in runs]

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        """All tensors that a store must know to read and write pages in place."""
        return [self.kv_buffer]

    def _part_dims(self, num_parts: int) -> tuple[int, ...]:
        return (num_parts,) if num_parts > 1 else ()

    def _layout_dims(self) -> tuple[int, ...]:
        if self.layout == "layer_first":
            return (self.layer_num, self.size)
        if self.layout == "page_first":
            return (self.size, self.layer_num)
        return (self.size // self.page_size, self.layer_num, self.page_size)

    def _layer(self, part: torch.Tensor, layer: int) -> torch.Tensor:
        """A layer as `(pages, page_size, *row_shape)`; a view."""
        if self.layout == "page_first_direct":
            return part[:, layer]
        rows = part[layer] if self.layout == "layer_first" else part[:, layer]
        return rows.view(-1, self.page_size, *self.row_shape)

    def _page(self, part: torch.Tensor, page: int) -> torch.Tensor:
        """All layers of a page, in the order of the layout; a view."""
        if self.layout == "page_first_direct":
            return part[page]
        rows = slice(page * self.page_size, (page + 1) * self.page_size)
        return part[:, rows] if self.layout == "layer_first" else part[rows]

    def _page_number(self, index: int) -> int:
        """Page that begins at a row."""
        if not 0 <= index <= self.size - self.page_size:
            raise IndexError(f"host pool {self.name}: page at row {index}, the pool has rows 0 .. {self.size - 1}")
        if index % self.page_size:
            raise InvalidValueError(f"index of host pool {self.name}", index, f"a multiple of {self.page_size}")
        return index // self.page_size

    def _pages(self, indices: IndexArray) -> IndexArray:
        """Page numbers of rows that are whole pages."""
        if len(indices) % self.page_size:
            raise InvalidValueError(
                f"number of indices of host pool {self.name}", len(indices), f"a multiple of {self.page_size}"
            )
        by_page = indices.reshape(-1, self.page_size)
        for index in by_page[(by_page[:, 0] < 0) | (by_page[:, 0] > self.size - self.page_size), 0][:1]:
            self._page_number(int(index))
        torn = (by_page[:, 0] % self.page_size != 0) | (by_page != by_page[:, :1] + np.arange(self.page_size)).any(1)
        if torn.any():
            raise InvalidValueError(
                f"indices of host pool {self.name}", by_page[torn.argmax()].tolist(), f"a page of {self.page_size} rows"
            )
        pages: IndexArray = by_page[:, 0] // self.page_size
        return pages

    def _matched(self, host_indices: IndexArray, device_indices: IndexArray) -> tuple[torch.Tensor, torch.Tensor]:
        if len(host_indices) != len(device_indices):
            raise InvalidValueError(
                f"host indices of pool {self.name}", len(host_indices), f"one a device index, {len(device_indices)}"
            )
        return torch.from_numpy(self._pages(host_indices)), self._device_shape.rows(device_indices)


class MHATokenToKVPoolHost(HostKVPool):
    """Host pages of keys and values: `kv_buffer` is (2, *layout*, heads, size of a head)."""

    def __init__(
        self,
        device_pool: MHATokenToKVPool,
        *,
        layout: str = "layer_first",
        host_size_gb: float = 0.0,
        ratio: float = 2.0,
        reserve_bytes: int | None = None,
    ) -> None:
        row_shape = tuple(device_pool.k_buffer[0].shape[1:])
        super().__init__(
            device_pool.shape,
            row_shape,
            2,
            layout=layout,
            host_size_gb=host_size_gb,
            ratio=ratio,
            reserve_bytes=reserve_bytes,
        )

    def _device_rows(self, device_pool: object, layer_id: int) -> Sequence[torch.Tensor]:
        if not isinstance(device_pool, MHATokenToKVPool):
            raise InvalidValueError("device pool", type(device_pool).__name__, "an MHATokenToKVPool")
        return device_pool.get_kv_buffer(layer_id)


class MLATokenToKVPoolHost(HostKVPool):
    """Host pages of compressed KV: `kv_buffer` is (*layout*, 1, kv_cache_dim)."""

    def __init__(
        self,
        device_pool: MLATokenToKVPool,
        *,
        layout: str = "layer_first",
        host_size_gb: float = 0.0,
        ratio: float = 2.0,
        reserve_bytes: int | None = None,
    ) -> None:
        super().__init__(
            device_pool.shape,
            (1, device_pool.kv_cache_dim),
            1,
            layout=layout,
            host_size_gb=host_size_gb,
            ratio=ratio,
            reserve_bytes=reserve_bytes,
        )

    def _device_rows(self, device_pool: object, layer_id: int) -> Sequence[torch.Tensor]:
        if not isinstance(device_pool, MLATokenToKVPool):
            raise InvalidValueError("device pool", type(device_pool).__name__, "an MLATokenToKVPool")
        return (device_pool.get_kv_buffer(layer_id),)
