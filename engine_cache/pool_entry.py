"""What a controller is told of one kind of state: where it lies on device and host, and who owns the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from engine_cache.storage.base import PoolName
from engine_cache.types import IndexArray

RowAlloc = Callable[[int], IndexArray | None]
LayerMapper = Callable[[int], int | None]


class HostPool(Protocol):
    """What a controller needs of a host pool."""

    size: int
    page_size: int
    layer_num: int

    def alloc(self, need_size: int) -> IndexArray | None: ...
    def free(self, indices: IndexArray) -> None: ...
    def free_pages(self) -> IndexArray: ...
    def clear(self) -> None: ...
    def available_size(self) -> int: ...

    def backup_from_device_all_layer(
        self, device_pool: Any, host_indices: IndexArray, device_indices: IndexArray
    ) -> None:
        """Return when the bytes are on the host."""

    def load_to_device_per_layer(
        self, device_pool: Any, host_indices: IndexArray, device_indices: IndexArray, layer_id: int
    ) -> None:
        """Return when the bytes of the pool's own layer `layer_id` are on the device, or on its stream."""


class RowAllocator(Protocol):
    """What a controller needs of the owner of device rows."""

    size: int

    def alloc(self, need_size: int) -> IndexArray | None: ...
    def free(self, indices: IndexArray) -> None: ...


@dataclass(slots=True)
class PoolEntry:
    """One kind of state: its two pools, and how to make room in them."""

    name: PoolName
    host_pool: HostPool
    device_pool: Any
    """Handed to the host pool's copies; None where no bytes are kept."""
    device_allocator: RowAllocator
    layer_mapper: LayerMapper | None = None
    """Layer of the model -> layer of this pool, None for layers it has no part in. Without one the pool has all."""
    host_evict_fn: Callable[[int], object] | None = None
    """Frees that many host rows if it can; asked once before an operation is refused. KV's is the tree's business."""
    device_evict_fn: Callable[[int], object] | None = None

    def local_layer(self, layer: int) -> int | None:
        """The pool's own layer for a layer of the model."""
        return layer if self.layer_mapper is None else self.layer_mapper(layer)

    def alloc_host(self, num_rows: int) -> IndexArray | None:
        """Host rows; evicts once if need be."""
        return _alloc_or_evict(self.host_pool.alloc, self.host_evict_fn, num_rows)

    def alloc_device(self, num_rows: int) -> IndexArray | None:
        """Device rows; evicts once if need be."""
        return _alloc_or_evict(self.device_allocator.alloc, self.device_evict_fn, num_rows)


def _alloc_or_evict(alloc: RowAlloc, evict: Callable[[int], object] | None, num_rows: int) -> IndexArray | None:
    rows = alloc(num_rows)
    if rows is None and evict is not None:
        evict(num_rows)
        rows = alloc(num_rows)
    return rows
