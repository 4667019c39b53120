"""Device pools: the tensors that hold KV, one row per token. Rows 0 .. page_size - 1 are a dummy write target.

Rows are passed as numpy index arrays and converted to tensors here, in one step. In models whose layers differ, each
pool numbers its own layers and has its own rows:

    global layer    0        1        2        3
    kind            window   window   full     window
    local layer     0        1        0        2
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from engine_cache.types import IndexArray
from kv_events.errors import InvalidValueError, check_positive

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
        check_positive(size=self.size, page_size=self.page_size, layer_num=self.layer_num)

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


KVPool: TypeAlias = MHATokenToKVPool | MLATokenToKVPool


class _PoolsByLayer:
    """KV pools addressed by global layer id. Raises InvalidValueError for a layer without KV."""

    def __init__(self) -> None:
        self._pool_of_layer: dict[int, tuple[KVPool, int]] = {}

    def _add(self, field: str, layer_ids: Sequence[int], pool: KVPool) -> dict[int, int]:
        if len(layer_ids) != pool.shape.layer_num:
            raise InvalidValueError(field, list(layer_ids), f"one id for each of {pool.shape.layer_num} layers")
        self._pool_of_layer |= {layer: (pool, local) for local, layer in enumerate(layer_ids)}
        return {layer: local for local, layer in enumerate(layer_ids)}

    def get_kv_buffer(self, layer_id: int) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's tensors, without a copy, in the form of its pool."""
        pool, local = self._pool(layer_id)
        return pool.get_kv_buffer(local)

    def set_kv_buffer(self, layer_id: int, indices: IndexArray, k: torch.Tensor, v: torch.Tensor | None = None) -> None:
        """Write one row per token. v: None exactly for an MLA pool, where `k` is the compressed KV."""
        pool, local = self._pool(layer_id)
        pool.set_kv_buffer(local, indices, k, v)

    def _pool(self, layer_id: int) -> tuple[KVPool, int]:
        if layer_id not in self._pool_of_layer:
            raise InvalidValueError("layer_id", layer_id, f"one of {sorted(self._pool_of_layer)}")
        return self._pool_of_layer[layer_id]


class SWAKVPool(_PoolsByLayer):
    """The KV pools of a model in which some layers attend only to a sliding window.

    A token may keep its row in `full_kv_pool` after its row in `swa_kv_pool` was freed.

    full_layer_ids, swa_layer_ids: global ids of the layers, in the order of the layers of each pool. Raises
    InvalidValueError unless each of the model's layers, numbered from 0, belongs to exactly one pool.
    """

    def __init__(
        self, full_kv_pool: KVPool, swa_kv_pool: KVPool, full_layer_ids: Sequence[int], swa_layer_ids: Sequence[int]
    ) -> None:
        super().__init__()
        self.full_kv_pool = full_kv_pool
        self.swa_kv_pool = swa_kv_pool
        self.full_layers = self._add("full_layer_ids", full_layer_ids, full_kv_pool)
        """Global layer -> layer of `full_kv_pool`."""
        self.swa_layers = self._add("swa_layer_ids", swa_layer_ids, swa_kv_pool)
        """Global layer -> layer of `swa_kv_pool`."""
        layers = sorted([*full_layer_ids, *swa_layer_ids])
        if layers != list(range(len(layers))):
            raise InvalidValueError("layers of both pools", layers, f"each of 0 .. {len(layers) - 1} once")

    @property
    def layers_mapping(self) -> dict[int, tuple[int, bool]]:
        """Global layer -> (local layer, whether it has a window)."""
        return {layer: (local, layer in self.swa_layers) for layer, (_, local) in self._pool_of_layer.items()}


class HybridLinearKVPool(_PoolsByLayer):
    """The KV pool of the attention layers of a hybrid model.

    full_attention_layer_ids: global ids of these layers, in the order of the layers of `full_kv_pool`.
    """

    def __init__(self, full_kv_pool: KVPool, full_attention_layer_ids: Sequence[int]) -> None:
        super().__init__()
        self.full_kv_pool = full_kv_pool
        self.full_attention_layer_id_mapping = self._add(
            "full_attention_layer_ids", full_attention_layer_ids, full_kv_pool
        )
        self.use_mla = isinstance(full_kv_pool, MLATokenToKVPool)


def index_pages(size: int, page_size: int) -> int:
    """Return the number of pages of an index over `size` rows, at least one more than the rows need."""
    return (size + page_size + 1) // page_size
