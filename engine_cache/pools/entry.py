"""Pool entries and pool groups: the device and host pools of a model's kinds of state. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from engine_cache.storage.base import PoolName
from engine_cache.types import IndexArray
from kv_events.errors import InvalidValueError

LayerMapper = Callable[[int], int | None]


class RowAllocator(Protocol):
    """What a controller requires of an allocator of rows."""

    size: int

    def alloc(self, need_size: int) -> IndexArray | None: ...
    def free(self, indices: IndexArray) -> None: ...


class HostPool(RowAllocator, Protocol):
    """What a controller requires of a host pool."""

    page_size: int
    layer_num: int
    layout: str

    def free_pages(self) -> IndexArray: ...
    def clear(self) -> None: ...
    def available_size(self) -> int: ...

    def backup_from_device_all_layer(
        self, device_pool: Any, host_indices: IndexArray, device_indices: IndexArray
    ) -> None:
        """Copy rows of all layers to the host and return when the bytes are there."""

    def load_to_device_per_layer(
        self, device_pool: Any, host_indices: IndexArray, device_indices: IndexArray, layer_id: int
    ) -> None:
        """Copy the pool's layer `layer_id` to the device. Return when the bytes are there or queued on the stream."""


@dataclass(slots=True)
class PoolEntry:
    """One kind of state: its device and host pool, and how to make room in them."""

    name: PoolName
    host_pool: HostPool
    device_pool: Any
    """Passed to the copy methods of the host pool. None if no bytes are kept."""
    device_allocator: RowAllocator
    """Owner of the device rows: the anchor's allocator if the rows are shared."""
    layer_mapper: LayerMapper | None = None
    """Layer of the model -> layer of this pool, or None for layers without state of this kind. Defaults to identity."""
    host_evict_fn: Callable[[int], object] | None = None
    """Called once to free that many host rows before an operation is refused. Not set for KV: the tree evicts it."""
    device_evict_fn: Callable[[int], object] | None = None
    is_primary_index_anchor: bool = False
    """Whether the rows of this pool identify the pages of its group. True for KV."""
    share_indices_with_anchor: bool = False
    """Whether the pool uses the anchor's rows, which are allocated and freed with the anchor's pages."""

    def local_layer(self, layer: int) -> int | None:
        return layer if self.layer_mapper is None else self.layer_mapper(layer)

    def alloc_host(self, num_rows: int) -> IndexArray | None:
        """Allocate host rows, after an eviction if necessary. None if there is no room."""
        return _alloc_or_evict(self.host_pool, self.host_evict_fn, num_rows)

    def alloc_device(self, num_rows: int) -> IndexArray | None:
        """Allocate device rows, after an eviction if necessary. None if there is no room."""
        return _alloc_or_evict(self.device_allocator, self.device_evict_fn, num_rows)


class HostPoolGroup:
    """The pools of one model. `size`, `page_size`, `layout`, `alloc`, `free` and `available_size` are the anchor's.

    Raises InvalidValueError unless there is exactly one anchor and each name occurs once, and for a pool that shares
    the anchor's rows but has other pages.
    """

    def __init__(self, entries: Iterable[PoolEntry]) -> None:
        listed = list(entries)
        names = [entry.name.value for entry in listed]
        if not listed or len(set(names)) != len(names):
            raise InvalidValueError("pools of a group", names, "at least one pool, each name once")
        anchors = [entry for entry in listed if entry.is_primary_index_anchor]
        if len(anchors) != 1:
            raise InvalidValueError("anchors of a group", [entry.name.value for entry in anchors], f"one of {names}")
        (self.anchor,) = anchors
        self.entries = {entry.name: entry for entry in listed}
        self.sharing = [entry for entry in listed if entry.share_indices_with_anchor]
        """The pools on the anchor's rows. Their pages are copied and stored together with the anchor's."""
        for entry in self.sharing:
            self._check_sharing(entry)
        pool = self.anchor.host_pool
        self.size, self.page_size, self.layout = pool.size, pool.page_size, pool.layout
        self.alloc, self.free, self.available_size = pool.alloc, pool.free, pool.available_size

    @classmethod
    def of(cls, anchor: PoolEntry, *sidecars: PoolEntry) -> HostPoolGroup:
        """Create a group with this anchor, and mark its entry as the anchor."""
        anchor.is_primary_index_anchor = True
        return cls((anchor, *sidecars))

    def clear(self) -> None:
        for entry in self.entries.values():
            entry.host_pool.clear()

    def entry(self, name: PoolName) -> PoolEntry:
        """Return the entry of that name. Raises InvalidValueError, which lists the known names."""
        entry = self.entries.get(name)
        if entry is None:
            known = ", ".join(each.value for each in self.entries)
            raise InvalidValueError("pool", getattr(name, "value", name), f"one of {known}")
        return entry

    def get_pool(self, name: PoolName) -> HostPool:
        """Return the host pool of that name. Raises as `entry` does."""
        return self.entry(name).host_pool

    def check_layers(self, transfer_layer_num: int) -> None:
        """Raise InvalidValueError unless every layer of the model has a pool, and every layer of a pool once."""
        covered: set[int] = set()
        for entry in self.entries.values():
            local = {layer: entry.local_layer(layer) for layer in range(transfer_layer_num)}
            mapped = {layer: own for layer, own in local.items() if own is not None}
            if sorted(mapped.values()) != list(range(entry.host_pool.layer_num)):
                expected = f"each of 0 .. {entry.host_pool.layer_num - 1} once"
                raise InvalidValueError(f"layers of pool {entry.name.value}", sorted(mapped.values()), expected)
            covered.update(mapped)
        gaps = sorted(set(range(transfer_layer_num)) - covered)
        if gaps:
            raise InvalidValueError("layers that no pool moves", gaps, "none")

    def _check_sharing(self, entry: PoolEntry) -> None:
        name = entry.name.value
        if entry is self.anchor:
            raise InvalidValueError(f"pool {name}", "shares the anchor's rows", "rows of its own for the anchor")
        pages, own = (
            (pool.size // pool.page_size, pool.page_size) for pool in (entry.host_pool, self.anchor.host_pool)
        )
        if pages != own:
            expected = f"the anchor's {own}, whose rows it shares"
            raise InvalidValueError(f"pages and rows a page of pool {name}", pages, expected)


def _alloc_or_evict(pool: RowAllocator, evict: Callable[[int], object] | None, num_rows: int) -> IndexArray | None:
    rows = pool.alloc(num_rows)
    if rows is None and evict is not None:
        evict(num_rows)
        rows = pool.alloc(num_rows)
    return rows
