"""Device pools: the tensors that hold KV, one row per token. Rows 0 .. page_size - 1 are a dummy write target.

Rows are passed as numpy index arrays and converted to tensors here, in one step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine_cache.types import IndexArray
from kv_events.errors import InvalidValueError

INDEX_BLOCK = 128
"""Number of values of an index key that share a scale."""


@dataclass(frozen=True, slots=True)
class PoolShape:
    size: int
    """Rows that can be allocated; the tensors have `size + page_size`."""
    page_size: int
    layer_num: int
    dtype: torch.dtype
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("size", "page_size", "layer_num"):
            if getattr(self, name) < 1:
                raise InvalidValueError(name, getattr(self, name), "a positive integer")

    def buffers(self, *row_shape: int) -> list[torch.Tensor]:
        """Return one zeroed tensor of shape `(size + page_size, *row_shape)` for each layer."""
        rows = self.size + self.page_size
        return [torch.zeros((rows, *row_shape), dtype=self.dtype, device=self.device) for _ in range(self.layer_num)]

    def rows(self, indices: IndexArray) -> torch.Tensor:
        return torch.from_numpy(indices).to(self.device)


class MHATokenToKVPool:
    """Keys and values of multi-head attention: `(size + page_size, head_num, head_dim)` each, per layer."""

    def __init__(self, shape: PoolShape, head_num: int, head_dim: int) -> None:
        self.shape = shape
        self.k_buffer = shape.buffers(head_num, head_dim)
        self.v_buffer = shape.buffers(head_num, head_dim)

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's tensors, without a copy."""
        return self.k_buffer[layer_id], self.v_buffer[layer_id]

    def set_kv_buffer(self, layer_id: int, indices: IndexArray, k: torch.Tensor, v: torch.Tensor | None = None) -> None:
        """Write one row per token. k, v: `(len(indices), head_num, head_dim)`, both required."""
        if v is None:
            raise InvalidValueError("v", None, "a tensor beside k")
        rows = self.shape.rows(indices)
        self.k_buffer[layer_id][rows] = k.to(self.shape.dtype)
        self.v_buffer[layer_id][rows] = v.to(self.shape.dtype)


class MLATokenToKVPool:
    """Compressed KV of latent attention: `(size + page_size, 1, kv_lora_rank + qk_rope_head_dim)` per layer."""

    def __init__(self, shape: PoolShape, kv_lora_rank: int, qk_rope_head_dim: int) -> None:
        self.shape = shape
        self.kv_cache_dim = kv_lora_rank + qk_rope_head_dim
        self.kv_buffer = shape.buffers(1, self.kv_cache_dim)

    def get_kv_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the layer's tensor, without a copy."""
        return self.kv_buffer[layer_id]

    def set_kv_buffer(
        self, layer_id: int, indices: IndexArray, kv: torch.Tensor, v: torch.Tensor | None = None
    ) -> None:
        """Write one row per token. kv: `(len(indices), 1, kv_cache_dim)`. v: None, there are no values beside it."""
        if v is not None:
            raise InvalidValueError("v", type(v).__name__, "None")
        self.kv_buffer[layer_id][self.shape.rows(indices)] = kv.to(self.shape.dtype)


class NSATokenToKVPool(MLATokenToKVPool):
    """The MLA pool of a model with sparse attention, in which each layer also has an index of its tokens.

    `index_k_with_scale_buffer`: uint8 `((size + page_size + 1) // page_size, page_size * (index_head_dim + 4 *
    index_head_dim // 128))` for each layer. A page contains the keys of all its tokens, then their scales, one float32
    for 128 values of a key. index_head_dim: bytes of a key, a multiple of 128.
    """

    def __init__(
        self, shape: PoolShape, kv_lora_rank: int, qk_rope_head_dim: int, *, index_head_dim: int = INDEX_BLOCK
    ) -> None:
        if index_head_dim < 1 or index_head_dim % INDEX_BLOCK:
            raise InvalidValueError("index_head_dim", index_head_dim, f"a positive multiple of {INDEX_BLOCK}")
        super().__init__(shape, kv_lora_rank, qk_rope_head_dim)
        self.index_head_dim = index_head_dim
        self.index_row_bytes = index_head_dim + index_head_dim // INDEX_BLOCK * torch.float32.itemsize
        size = (index_pages(shape.size, shape.page_size), shape.page_size * self.index_row_bytes)
        self.index_k_with_scale_buffer = [
            torch.zeros(size, dtype=torch.uint8, device=shape.device) for _ in range(shape.layer_num)
        ]

    def get_index_k_with_scale_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the layer's tensor, without a copy."""
        return self.index_k_with_scale_buffer[layer_id]

    def set_index_k_with_scale(
        self, layer_id: int, indices: IndexArray, keys: torch.Tensor, scales: torch.Tensor
    ) -> None:
        """Write one key and its scales for each token.

        keys: one-byte dtype `(len(indices), index_head_dim)`. scales: float32 `(len(indices), index_head_dim // 128)`.
        """
        held, keys_end = self.index_k_with_scale_buffer[layer_id], self.shape.page_size * self.index_head_dim
        rows = self.shape.rows(indices)
        page, row = rows // self.shape.page_size, rows % self.shape.page_size
        in_page = (len(held), self.shape.page_size, -1)
        held[:, :keys_end].view(in_page)[page, row] = keys.view(torch.uint8)
        held[:, keys_end:].view(in_page)[page, row] = scales.view(torch.uint8)


def index_pages(size: int, page_size: int) -> int:
    """Return the number of pages of an index over `size` rows, at least one more than the rows need."""
    return (size + page_size + 1) // page_size
