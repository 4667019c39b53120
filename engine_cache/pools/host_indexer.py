"""The host pool of a sparse-attention index, which uses the rows of the KV host pool.

KV row        0 .. page-1   page .. 2*page-1   ...
index page    0             1                  ...      one page of index for each page of KV, and one unused page
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch

from engine_cache.errors import PoolError
from engine_cache.pools.device import NSATokenToKVPool, index_pages
from engine_cache.pools.host import HostKVPool
from engine_cache.pools.host_tensors import HostPoolOptions, Part, TensorHostPool, whole_pages
from engine_cache.types import IndexArray
from kv_events.errors import InvalidValueError


class NSAIndexerPoolHost(TensorHostPool):
    """Host pages of the index of an `NSATokenToKVPool`: `index_k_with_scale_buffer` is uint8 `(layers, pages, stride)`
    in the layout layer_first, else `(pages, layers, 1, stride)`.

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
        if device_pool.shape.page_size != anchor.page_size:
            raise InvalidValueError("page size of the index", device_pool.shape.page_size, f"KV's, {anchor.page_size}")
        self._num_pages_held = index_pages(anchor.size, anchor.page_size)
        self._stride = anchor.page_size * device_pool.index_row_bytes
        super().__init__(
            name,
            size=anchor.size,
            page_size=anchor.page_size,
            layer_num=device_pool.shape.layer_num,
            size_per_token=device_pool.index_row_bytes * device_pool.shape.layer_num,
            **options,
        )

    @property
    def required_bytes(self) -> int:
        return self._num_pages_held * self.page_size * self.size_per_token

    def alloc(self, need_size: int) -> IndexArray | None:
        raise PoolError(f"host pool {self.name} allocates no rows: it uses those of its anchor")

    def free(self, indices: IndexArray) -> None:
        raise PoolError(f"host pool {self.name} frees no rows: they belong to its anchor")

    def _make_parts(self) -> list[Part]:
        self.index_k_with_scale_buffer = self._new_paged_tensor(self._num_pages_held, (self._stride,), torch.uint8)
        return [self._paged_part(self.index_k_with_scale_buffer)]

    def _drop_buffers(self) -> None:
        self.index_k_with_scale_buffer = torch.zeros(0)

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        return [self.index_k_with_scale_buffer]

    def _device_tensors(self, device_pool: object, layer_id: int) -> Sequence[torch.Tensor]:
        if not isinstance(device_pool, NSATokenToKVPool):
            raise InvalidValueError("device pool", type(device_pool).__name__, "an NSATokenToKVPool")
        return (device_pool.get_index_k_with_scale_buffer(layer_id),)

    def _device_rows(self, device_indices: IndexArray) -> IndexArray:
        """Return page numbers, because an index is copied by whole pages on both sides."""
        return whole_pages(f"device pool {self.name}", device_indices, self.page_size)
