"""Host pools of KV for the rows of an MHA or MLA device pool. `host_tensors.py` contains the shared part."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Unpack

import torch

from engine_cache.pools.device import MHATokenToKVPool, MLATokenToKVPool, PoolShape
from engine_cache.pools.host_rows import host_pool_size
from engine_cache.pools.host_tensors import HOST_LAYOUTS, HostPoolOptions, Part, SizedHostPoolOptions, TensorHostPool
from kv_events.errors import InvalidValueError

__all__ = ["HOST_LAYOUTS", "HostKVPool", "MHATokenToKVPoolHost", "MLATokenToKVPoolHost"]


class HostKVPool(TensorHostPool):
    """Rows of KV. row_shape: shape of one part of a row. num_parts: 2 for keys and values, 1 for compressed KV.
    host_size_gb, ratio: see `host_pool_size`."""

    def __init__(
        self,
        shape: PoolShape,
        row_shape: tuple[int, ...],
        num_parts: int,
        name: str,
        *,
        host_size_gb: float = 0.0,
        ratio: float = 2.0,
        **options: Unpack[HostPoolOptions],
    ) -> None:
        self.dtype = shape.dtype
        self.row_shape = row_shape
        self._num_parts = num_parts
        row_bytes = prod(row_shape) * num_parts * shape.layer_num * shape.dtype.itemsize
        super().__init__(
            name,
            size=host_pool_size(shape.size, shape.page_size, row_bytes, host_size_gb=host_size_gb, ratio=ratio),
            page_size=shape.page_size,
            layer_num=shape.layer_num,
            size_per_token=row_bytes,
            **options,
        )

    def _make_parts(self) -> list[Part]:
        lead = () if self._num_parts == 1 else (self._num_parts,)
        self.kv_buffer = self._new_tensor((*lead, *self._layout_dims(), *self.row_shape), self.dtype)
        return [self._part(held) for held in self.kv_buffer.view(self._num_parts, *self.kv_buffer.shape[len(lead) :])]

    def _drop_buffers(self) -> None:
        self.kv_buffer = torch.zeros(0)

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        return [self.kv_buffer]

    def _layout_dims(self) -> tuple[int, ...]:
        return {
            "layer_first": (self.layer_num, self.size),
            "page_first": (self.size, self.layer_num),
            "page_first_direct": (self.size // self.page_size, self.layer_num, self.page_size),
        }[self.layout]

    def _part(self, held: torch.Tensor) -> Part:
        pages = (self.size // self.page_size, self.page_size)
        if self.layout == "layer_first":
            paged = held.view(self.layer_num, *pages, *self.row_shape)
            return Part.of(paged, paged.movedim(0, 1))
        if self.layout == "page_first":
            paged = held.view(*pages, self.layer_num, *self.row_shape)
            return Part.of(paged.movedim(2, 0), paged)
        return Part.of(held.movedim(1, 0), held)


class MHATokenToKVPoolHost(HostKVPool):
    """Host pages of keys and values: `kv_buffer` is (2, *layout*, heads, size of a head)."""

    def __init__(
        self, device_pool: MHATokenToKVPool, name: str = "kv", **options: Unpack[SizedHostPoolOptions]
    ) -> None:
        super().__init__(device_pool.shape, tuple(device_pool.k_buffer[0].shape[1:]), 2, name, **options)

    def _device_tensors(self, device_pool: object, layer_id: int) -> Sequence[torch.Tensor]:
        if not isinstance(device_pool, MHATokenToKVPool):
            raise InvalidValueError("device pool", type(device_pool).__name__, "an MHATokenToKVPool")
        return device_pool.get_kv_buffer(layer_id)


class MLATokenToKVPoolHost(HostKVPool):
    """Host pages of compressed KV: `kv_buffer` is (*layout*, 1, kv_cache_dim)."""

    def __init__(
        self, device_pool: MLATokenToKVPool, name: str = "kv", **options: Unpack[SizedHostPoolOptions]
    ) -> None:
        super().__init__(device_pool.shape, (1, device_pool.kv_cache_dim), 1, name, **options)

    def _device_tensors(self, device_pool: object, layer_id: int) -> Sequence[torch.Tensor]:
        if not isinstance(device_pool, MLATokenToKVPool):
            raise InvalidValueError("device pool", type(device_pool).__name__, "an MLATokenToKVPool")
        return (device_pool.get_kv_buffer(layer_id),)
