"""The common part of host pools with bytes: pages in CPU memory, which is pinned with CUDA.

On the host, whole pages are copied; on the device, rows by number. Each tensor holds all layers, in one of three
layouts:

    layer_first         (layers, size, ...)           fast copies to and from the device, layer by layer
    page_first          (size, layers, ...)           a page is contiguous, which storage backends need
    page_first_direct   (pages, layers, page, ...)    the same, and each layer of a page is contiguous, too
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import NamedTuple, TypedDict

import numpy as np
import torch

from engine_cache.pools.host_memory import require_host_memory
from engine_cache.pools.host_rows import HostRows
from engine_cache.types import IndexArray
from kv_events.errors import InvalidValueError

HOST_LAYOUTS = ("layer_first", "page_first", "page_first_direct")


class HostPoolOptions(TypedDict, total=False):
    """Options of a host pool, in addition to its device pool."""

    layout: str
    """One of `HOST_LAYOUTS`; layer_first if not given."""
    reserve_bytes: int | None
    """See `require_host_memory`, which is called before anything is allocated."""
    allocate: bool
    """False: create no tensors yet, so that the pools of a stack can be refused or allocated together."""


class SizedHostPoolOptions(HostPoolOptions, total=False):
    """Options of a host pool with its own rows; see `host_pool_size`."""

    host_size_gb: float
    """Memory of the pool. 0 (default): determined by `ratio`."""
    ratio: float
    """Host rows for each device row; default 2.0."""


class Part(NamedTuple):
    """Two views of one tensor of a pool, or of its keys or values."""

    by_layer: torch.Tensor
    """(layers, pages, *shape of one layer of a page*)"""
    by_page: torch.Tensor
    """uint8 (pages, *shape of a page*), in memory order."""

    @classmethod
    def of(cls, by_layer: torch.Tensor, by_page: torch.Tensor) -> Part:
        """by_page: view in the dtype of the pool."""
        return cls(by_layer, by_page.view(torch.uint8))


class TensorHostPool(HostRows, abc.ABC):
    """Rows and bytes of the host tier of one device pool.

    name: as in `PoolName`. size: rows. size_per_token: bytes per row, all layers. All methods expect host indices of
    whole pages. Other indices raise InvalidValueError or IndexError, which name the pool.
    """

    def __init__(
        self,
        name: str,
        *,
        size: int,
        page_size: int,
        layer_num: int,
        size_per_token: int,
        layout: str = "layer_first",
        reserve_bytes: int | None = None,
        allocate: bool = True,
    ) -> None:
        if layout not in HOST_LAYOUTS:
            raise InvalidValueError("layout", layout, f"one of {', '.join(HOST_LAYOUTS)}")
        super().__init__(size, page_size)
        self.name = name
        self.layout = layout
        self.layer_num = layer_num
        self.size_per_token = size_per_token
        self._parts: list[Part] = []
        self._drop_buffers()
        if allocate:
            require_host_memory({name: self.required_bytes}, reserve_bytes)
            self.allocate()

    @property
    def required_bytes(self) -> int:
        """Bytes that `allocate` needs."""
        return self.size * self.size_per_token

    def allocate(self) -> None:
        """Create the tensors of a pool that was constructed without them."""
        self._parts = self._make_parts()

    def release(self) -> None:
        """Free the memory. The pool cannot be used afterwards."""
        self._parts = []
        self._drop_buffers()

    @abc.abstractmethod
    def _make_parts(self) -> list[Part]:
        """Allocate the tensors, with `_new_tensor`."""

    @abc.abstractmethod
    def _drop_buffers(self) -> None:
        """Reset the attributes to those of a pool without tensors."""

    @abc.abstractmethod
    def _device_tensors(self, device_pool: object, layer_id: int) -> Sequence[torch.Tensor]:
        """Return the device tensors of a layer, one for each part. Raises InvalidValueError for other pools."""

    @abc.abstractmethod
    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        """Return all tensors that a storage backend must know to read and write pages in place."""

    # --- device and host --------------------------------------------------------------------------------------------

    def backup_from_device_all_layer(
        self, device_pool: object, host_indices: IndexArray, device_indices: IndexArray
    ) -> None:
        """Copy device rows into host pages, all layers. Returns when the bytes are on the host."""
        pages, rows = self._matched(device_pool, host_indices, device_indices)
        for layer in range(self.layer_num):
            held = [tensor.index_select(0, rows) for tensor in self._device_tensors(device_pool, layer)]
            for part, copied in zip(self._parts, _to_host(held), strict=True):
                kept = part.by_layer[layer]
                kept.index_copy_(0, pages, copied.view(-1, *kept.shape[1:]))

    def load_to_device_per_layer(
        self, device_pool: object, host_indices: IndexArray, device_indices: IndexArray, layer_id: int
    ) -> None:
        """Copy one layer of host pages into device rows. With CUDA: on the current stream."""
        pages, rows = self._matched(device_pool, host_indices, device_indices)
        for part, wanted in zip(self._parts, self._device_tensors(device_pool, layer_id), strict=True):
            kept = part.by_layer[layer_id]
            shape = (len(pages), *kept.shape[1:])
            held = torch.empty(shape, dtype=kept.dtype, pin_memory=wanted.is_cuda)
            torch.index_select(kept, 0, pages, out=held)
            wanted.index_copy_(0, rows, held.view(-1, *wanted.shape[1:]).to(wanted.device, non_blocking=True))

    def _matched(
        self, device_pool: object, host_indices: IndexArray, device_indices: IndexArray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the host pages and the corresponding rows of the device tensors, on the device."""
        if len(host_indices) != len(device_indices):
            raise InvalidValueError(
                f"host indices of pool {self.name}", len(host_indices), f"one a device index, {len(device_indices)}"
            )
        device_tensor = self._device_tensors(device_pool, 0)[0]
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
        """Return the page that begins at a row."""
        if not 0 <= index <= self.size - self.page_size:
            raise IndexError(f"host pool {self.name}: page at row {index}, the pool has rows 0 .. {self.size - 1}")
        if index % self.page_size:
            raise InvalidValueError(f"index of host pool {self.name}", index, f"a multiple of {self.page_size}")
        return index // self.page_size

    def _pages(self, indices: IndexArray) -> IndexArray:
        """Return the page numbers of rows that form whole pages of this pool."""
        pages = whole_pages(f"host pool {self.name}", indices, self.page_size)
        for page in pages[(pages < 0) | (pages >= self.size // self.page_size)][:1]:
            self._page_number(int(page) * self.page_size)
        return pages

    def _new_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())

    def _new_paged_tensor(self, num_pages: int, content: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor for a pool whose pages do not consist of rows.

        Its shape is `(layers, pages, *content)`, or `(pages, layers, 1, *content)` in the page-first layouts.
        """
        lead = (self.layer_num, num_pages) if self.layout == "layer_first" else (num_pages, self.layer_num, 1)
        return self._new_tensor((*lead, *content), dtype)

    def _paged_part(self, tensor: torch.Tensor) -> Part:
        """Return the part for such a tensor."""
        if self.layout == "layer_first":
            return Part.of(tensor, tensor.movedim(0, 1))
        return Part.of(tensor[:, :, 0].movedim(1, 0), tensor)


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
