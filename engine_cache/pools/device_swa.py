"""The KV pool of a model in which some layers attend only to a sliding window, addressed by global layer id.

global layer    0        1        2        3
kind            window   window   full     window
local layer     0        1        0        2        each pool numbers its own layers and has its own rows
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine_cache.pools.device import MHATokenToKVPool, MLATokenToKVPool
from engine_cache.types import IndexArray
from kv_events.errors import InvalidValueError


class SWAKVPool:
    """Two pools of rows. A token may keep its row in `full_kv_pool` after its row in `swa_kv_pool` was freed.

    full_layer_ids, swa_layer_ids: global ids of the layers, in the order of the layers of each pool. `layers_mapping`:
    global layer -> (local layer, whether it has a window). Raises InvalidValueError unless each of the model's layers,
    numbered from 0, belongs to exactly one pool.
    """

    def __init__(
        self,
        full_kv_pool: MHATokenToKVPool | MLATokenToKVPool,
        swa_kv_pool: MHATokenToKVPool | MLATokenToKVPool,
        full_layer_ids: Sequence[int],
        swa_layer_ids: Sequence[int],
    ) -> None:
        self.full_kv_pool = full_kv_pool
        self.swa_kv_pool = swa_kv_pool
        self.full_layers = _own_layers("full_layer_ids", full_layer_ids, full_kv_pool)
        """Global layer -> layer of `full_kv_pool`."""
        self.swa_layers = _own_layers("swa_layer_ids", swa_layer_ids, swa_kv_pool)
        """Global layer -> layer of `swa_kv_pool`."""
        layers = [*full_layer_ids, *swa_layer_ids]
        if sorted(layers) != list(range(len(layers))):
            raise InvalidValueError("layers of both pools", sorted(layers), f"each of 0 .. {len(layers) - 1} once")
        self.layers_mapping = {layer: (local, False) for layer, local in self.full_layers.items()}
        self.layers_mapping |= {layer: (local, True) for layer, local in self.swa_layers.items()}

    def get_kv_buffer(self, layer_id: int) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's tensors, without a copy, in the form of its pool."""
        pool, local = self._pool_of(layer_id)
        return pool.get_kv_buffer(local)

    def set_kv_buffer(self, layer_id: int, indices: IndexArray, k: torch.Tensor, v: torch.Tensor | None = None) -> None:
        """Write one row for each token into the pool of the layer.

        v: None exactly for an MLA pool, where `k` is the compressed KV.
        """
        pool, local = self._pool_of(layer_id)
        pool.set_kv_buffer(local, indices, k, v)

    def _pool_of(self, layer_id: int) -> tuple[MHATokenToKVPool | MLATokenToKVPool, int]:
        if layer_id not in self.layers_mapping:
            raise InvalidValueError("layer_id", layer_id, f"0 .. {len(self.layers_mapping) - 1}")
        local, is_swa = self.layers_mapping[layer_id]
        return (self.swa_kv_pool if is_swa else self.full_kv_pool), local


def _own_layers(field: str, layer_ids: Sequence[int], pool: MHATokenToKVPool | MLATokenToKVPool) -> dict[int, int]:
    if len(layer_ids) != pool.shape.layer_num:
        raise InvalidValueError(field, list(layer_ids), f"one id for each of {pool.shape.layer_num} layers")
    return {layer: local for local, layer in enumerate(layer_ids)}
