"""Recurrent states of hybrid models, and the slots of requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine_cache.pools.allocators import MambaSlotAllocator, ReqToTokenPool
from engine_cache.types import IndexArray
from kv_events.errors import InvalidValueError, check_positive


@dataclass(frozen=True, slots=True)
class MambaCache:
    conv: list[torch.Tensor]
    """Tensors of shape `(layers, size + 1, *conv_shape)`."""
    temporal: torch.Tensor
    """Tensor of shape `(layers, size + 1, *temporal_shape)`."""

    def tensors(self) -> list[torch.Tensor]:
        """Return the temporal tensor, then the convolutions in order."""
        return [self.temporal, *self.conv]


class MambaPool:
    """Recurrent states of all Mamba layers, one slot for each state. Slot 0 is a dummy write target.

    size: slots that can be allocated. conv_shapes, temporal_shape: shapes of one layer's state of one sequence.
    """

    def __init__(
        self,
        size: int,
        layer_num: int,
        conv_shapes: Sequence[tuple[int, ...]],
        temporal_shape: tuple[int, ...],
        *,
        conv_dtype: torch.dtype = torch.bfloat16,
        temporal_dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        check_positive(size=size, layer_num=layer_num)
        self.size = size
        self.layer_num = layer_num
        self.device = device
        lead = (layer_num, size + 1)
        self.mamba_cache = MambaCache(
            [torch.zeros((*lead, *shape), dtype=conv_dtype, device=device) for shape in conv_shapes],
            torch.zeros((*lead, *temporal_shape), dtype=temporal_dtype, device=device),
        )

    def layer(self, layer_id: int) -> MambaCache:
        """Return views of one local layer, without the leading dimension."""
        cache = self.mamba_cache
        return MambaCache([conv[layer_id] for conv in cache.conv], cache.temporal[layer_id])

    def copy_from(self, src: IndexArray, dst: IndexArray) -> None:
        """Copy the states of the slots `src` to the slots `dst`, all layers. [n] each, no slot in both."""
        sources, targets = self._slots(src), self._slots(dst)
        for tensor in self.mamba_cache.tensors():
            tensor[:, targets] = tensor[:, sources]

    def clear_slots(self, slots: IndexArray) -> None:
        """Zero the states, as at the start of a sequence."""
        targets = self._slots(slots)
        for tensor in self.mamba_cache.tensors():
            tensor[:, targets] = 0

    def _slots(self, slots: IndexArray) -> torch.Tensor:
        return torch.from_numpy(slots).to(self.device)


class HybridReqToTokenPool(ReqToTokenPool):
    """Lines of row numbers, with the slot of the running state of each line's request.

    mamba_map: global layer id of each Mamba layer to its local one.
    """

    def __init__(
        self,
        size: int,
        max_context_len: int,
        *,
        mamba_pool: MambaPool,
        mamba_allocator: MambaSlotAllocator,
        mamba_map: Mapping[int, int],
    ) -> None:
        super().__init__(size, max_context_len)
        if sorted(mamba_map.values()) != list(range(mamba_pool.layer_num)):
            raise InvalidValueError("mamba_map", dict(mamba_map), f"the local layers 0 .. {mamba_pool.layer_num - 1}")
        if mamba_allocator.size != mamba_pool.size:
            raise InvalidValueError("mamba_allocator.size", mamba_allocator.size, f"the pool's, {mamba_pool.size}")
        self.mamba_pool = mamba_pool
        self.mamba_allocator = mamba_allocator
        self.mamba_map = dict(mamba_map)
        self._slot_of_line = np.zeros(size, dtype=np.int64)

    def alloc_with_state(self, slot: IndexArray | None = None) -> tuple[int, IndexArray] | None:
        """Allocate a line and a slot with a cleared state, or use the given [1] slot unchanged.

        Returns None, and allocates nothing, if no line or slot is free. Freeing the line does not free the slot.
        """
        if not self.available_size():
            return None
        if slot is None:
            slot = self.mamba_allocator.alloc(1)
            if slot is None:
                return None
            self.mamba_pool.clear_slots(slot)
        line = self.alloc()
        assert line is not None
        self._slot_of_line[line] = slot[0]
        return line, slot

    def mamba_slots(self, req_pool_indices: IndexArray) -> IndexArray:
        """Return the slots of the running states of these lines, in the form that the layers' kernels need."""
        slots: IndexArray = self._slot_of_line[req_pool_indices]
        return slots

    def mamba_layer(self, layer_id: int) -> MambaCache:
        """Return the states of one global layer. Raises InvalidValueError for a layer without states."""
        if layer_id not in self.mamba_map:
            raise InvalidValueError("layer_id", layer_id, f"one of {sorted(self.mamba_map)}")
        return self.mamba_pool.layer(self.mamba_map[layer_id])
