"""The host pool of recurrent states: the slots of a `MambaPool`. A slot is a page of one row."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Unpack

import torch

from engine_cache.pools.host_rows import host_pool_size
from engine_cache.pools.host_tensors import HostPoolOptions, Part, TensorHostPool
from engine_cache.pools.mamba import MambaPool
from kv_events.errors import InvalidValueError


class MambaPoolHost(TensorHostPool):
    """Host slots of a `MambaPool`. Every tensor of the device pool has a counterpart. host_size_gb, ratio: see
    `host_pool_size`.

    Its shape is `(layers, size, ...)` in the layout layer_first, else `(size, layers, 1, ...)`.
    """

    def __init__(
        self,
        device_pool: MambaPool,
        name: str = "mamba",
        *,
        host_size_gb: float = 0.0,
        ratio: float = 2.0,
        **options: Unpack[HostPoolOptions],
    ) -> None:
        # a scalar state becomes a row of length one
        self._kinds = [(tuple(held.shape[2:]) or (1,), held.dtype) for held in device_pool.mamba_cache.tensors()]
        slot_bytes = sum(prod(shape) * dtype.itemsize for shape, dtype in self._kinds) * device_pool.layer_num
        super().__init__(
            name,
            size=host_pool_size(device_pool.size, 1, slot_bytes, host_size_gb=host_size_gb, ratio=ratio),
            page_size=1,
            layer_num=device_pool.layer_num,
            size_per_token=slot_bytes,
            **options,
        )

    def _make_parts(self) -> list[Part]:
        self.temporal_buffer, *self.conv_buffers = [
            self._new_paged_tensor(self.size, shape, dtype) for shape, dtype in self._kinds
        ]
        return [self._paged_part(held) for held in self.get_hybrid_pool_buffer()]

    def _drop_buffers(self) -> None:
        self.temporal_buffer, self.conv_buffers = torch.zeros(0), []

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        return [self.temporal_buffer, *self.conv_buffers]

    def _device_tensors(self, device_pool: object, layer_id: int) -> Sequence[torch.Tensor]:
        if not isinstance(device_pool, MambaPool):
            raise InvalidValueError("device pool", type(device_pool).__name__, "a MambaPool")
        return device_pool.layer(layer_id).tensors()
