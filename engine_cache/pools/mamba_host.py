"""The host pool of recurrent states: the slots of a `MambaPool` in CPU memory, pinned where there is CUDA.

A slot is a page of one row. Every tensor of the device pool has its own twin, in one of three layouts:

    layer_first                      (layers, size, ...)       fast copies to and from the device, layer by layer
    page_first, page_first_direct    (size, layers, 1, ...)    a state is one run of memory a tensor, as stores like it
"""

from __future__ import annotations

from math import prod

import numpy as np
import torch

from engine_cache.pools.host import HOST_LAYOUTS, require_host_memory
from engine_cache.pools.host_rows import HostRows, host_pool_size
from engine_cache.pools.mamba import MambaPool
from engine_cache.types import IndexArray
from kv_events.errors import InvalidValueError


class MambaPoolHost(HostRows):
    """Slots and bytes of the host tier of a `MambaPool`.

    host_size_gb, ratio: see `host_pool_size`. reserve_bytes: see `require_host_memory`; both are checked before a byte
    is allocated. A slot that the pool does not have raises IndexError in every method.
    """

    name = "mamba"

    def __init__(
        self,
        device_pool: MambaPool,
        *,
        layout: str = "layer_first",
        host_size_gb: float = 0.0,
        ratio: float = 2.0,
        reserve_bytes: int | None = None,
    ) -> None:
        if layout not in HOST_LAYOUTS:
            raise InvalidValueError("layout", layout, f"one of {', '.join(HOST_LAYOUTS)}")
        self.layout = layout
        self.layer_num = device_pool.layer_num
        mirrored = device_pool.mamba_cache.tensors()
        self.size_per_token = sum(prod(held.shape[2:]) * held.dtype.itemsize for held in mirrored) * self.layer_num
        size = host_pool_size(device_pool.size, 1, self.size_per_token, host_size_gb=host_size_gb, ratio=ratio)
        require_host_memory({self.name: size * self.size_per_token}, reserve_bytes)
        super().__init__(size, page_size=1)
        self._buffers = [
            torch.empty(
                (self.layer_num, size, *held.shape[2:])
                if layout == "layer_first"
                else (size, self.layer_num, 1, *held.shape[2:]),
                dtype=held.dtype,
                pin_memory=torch.cuda.is_available(),
            )
            for held in mirrored
        ]
        self._by_layer = [
            buffer if layout == "layer_first" else buffer[:, :, 0].transpose(0, 1) for buffer in self._buffers
        ]  # views, (layers, size, ...)
        self._device = device_pool.device

    def backup_from_device_all_layer(
        self, device_pool: object, host_indices: IndexArray, device_indices: IndexArray
    ) -> None:
        """Copy states of the device into host slots, all layers. Returns when the bytes are there."""
        slots, device_slots = self._matched(host_indices, device_indices)
        for kept, held in zip(self._by_layer, _mamba(device_pool).mamba_cache.tensors(), strict=True):
            kept.index_copy_(1, slots, held.index_select(1, device_slots).to("cpu"))

    def load_to_device_per_layer(
        self, device_pool: object, host_indices: IndexArray, device_indices: IndexArray, layer_id: int
    ) -> None:
        """Copy host slots into states of the device, one layer."""
        slots, device_slots = self._matched(host_indices, device_indices)
        for kept, wanted in zip(self._by_layer, _mamba(device_pool).layer(layer_id).tensors(), strict=True):
            wanted.index_copy_(0, device_slots, kept[layer_id].index_select(0, slots).to(wanted.device))

    def get_data_page(self, index: int) -> torch.Tensor:
        """The bytes of a state, those of the temporal tensor first, then each convolution's; a copy."""
        return torch.cat([run.contiguous().view(-1).view(torch.uint8) for run in self._runs(index)])

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """A tensor of the shape and dtype of `get_data_page`, to be read into."""
        return torch.zeros(self.size_per_token, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int, data: torch.Tensor) -> None:
        """Write what `get_data_page` gave into a slot."""
        runs = self._runs(index)
        for run, flat in zip(runs, data.split_with_sizes([run.nbytes for run in runs]), strict=True):
            # copied first, since a slice of bytes may begin where the wider type must not
            run.copy_(flat.clone().view(run.dtype).view(run.shape))

    def get_page_buffer_meta(self, indices: IndexArray) -> tuple[list[int], list[int]]:
        """Address and length in bytes of every run of memory of the slots, slot by slot, the temporal one first. Raises
        InvalidValueError for `layer_first`, where a state is no run."""
        if self.layout == "layer_first":
            raise InvalidValueError(f"layout of host pool {self.name}", self.layout, "page_first or page_first_direct")
        runs = [run for slot in self._checked(indices).tolist() for run in self._runs(slot)]
        return [run.data_ptr() for run in runs], [run.nbytes for run in runs]

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        """All tensors that a store must know to read and write states in place, the temporal one first."""
        return list(self._buffers)

    def _runs(self, slot: int) -> list[torch.Tensor]:
        """All layers of a state, `(layers, ...)` a tensor; views."""
        self._checked(np.array([slot]))
        return [kept[:, slot] for kept in self._by_layer]

    def _matched(self, host_indices: IndexArray, device_indices: IndexArray) -> tuple[torch.Tensor, torch.Tensor]:
        if len(host_indices) != len(device_indices):
            raise InvalidValueError(
                f"host indices of pool {self.name}", len(host_indices), f"one a device index, {len(device_indices)}"
            )
        slots = torch.from_numpy(self._checked(host_indices))
        return slots, torch.from_numpy(device_indices).to(self._device)

    def _checked(self, slots: IndexArray) -> IndexArray:
        for slot in slots[(slots < 0) | (slots >= self.size)][:1]:
            raise IndexError(f"host pool {self.name}: slot {slot}, the pool has slots 0 .. {self.size - 1}")
        return slots


def _mamba(device_pool: object) -> MambaPool:
    if not isinstance(device_pool, MambaPool):
        raise InvalidValueError("device pool", type(device_pool).__name__, "a MambaPool")
    return device_pool
