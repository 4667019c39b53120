"""What a controller is told of the kinds of state of a model: where they lie on device and host, who owns the rows, and
whose rows name the pages. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from engine_cache.storage.base import PoolName, PoolTransfer
from engine_cache.types import IndexArray
from kv_events.errors import InvalidValueError

RowAlloc = Callable[[int], IndexArray | None]
LayerMapper = Callable[[int], int | None]


class HostPool(Protocol):
    """What a controller needs of a host pool."""

    size: int
    page_size: int
    layer_num: int
    layout: str

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
    """Owner of the device rows; that of the anchor where they are shared."""
    layer_mapper: LayerMapper | None = None
    """Layer of the model -> layer of this pool, None for layers it has no part in. Without one the pool has all."""
    host_evict_fn: Callable[[int], object] | None = None
    """Frees that many host rows if it can; asked once before an operation is refused. KV's is the tree's business."""
    device_evict_fn: Callable[[int], object] | None = None
    is_primary_index_anchor: bool = False
    """Whether the rows of this pool name the pages of its group; KV's do."""
    share_indices_with_anchor: bool = False
    """The pool has no rows of its own: its pages lie at those of the anchor, and come and go with them."""

    def local_layer(self, layer: int) -> int | None:
        """The pool's own layer for a layer of the model."""
        return layer if self.layer_mapper is None else self.layer_mapper(layer)

    def alloc_host(self, num_rows: int) -> IndexArray | None:
        """Host rows; evicts once if need be."""
        return _alloc_or_evict(self.host_pool.alloc, self.host_evict_fn, num_rows)

    def alloc_device(self, num_rows: int) -> IndexArray | None:
        """Device rows; evicts once if need be."""
        return _alloc_or_evict(self.device_allocator.alloc, self.device_evict_fn, num_rows)


class HostPoolGroup:
    """The pools of one model, and the one among them whose rows name the pages: the anchor. Rows are the anchor's in
    every method but `clear`.

    Raises InvalidValueError unless there is exactly one anchor and each name once, and for a pool that shares the
    anchor's rows and has other pages.
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
        for entry in self.sharing_entries():
            self._check_sharing(entry)

    @classmethod
    def of(cls, anchor: PoolEntry, *sidecars: PoolEntry) -> HostPoolGroup:
        """A group with this anchor, which is marked as such."""
        anchor.is_primary_index_anchor = True
        return cls((anchor, *sidecars))

    @property
    def size(self) -> int:
        """Host rows."""
        return self.anchor.host_pool.size

    @property
    def page_size(self) -> int:
        """Rows a page."""
        return self.anchor.host_pool.page_size

    @property
    def layout(self) -> str:
        """How the tensors of the host lie."""
        return self.anchor.host_pool.layout

    def alloc(self, need_size: int) -> IndexArray | None:
        """Host rows, or None when fewer are free."""
        return self.anchor.host_pool.alloc(need_size)

    def free(self, indices: IndexArray) -> None:
        """Take host rows back."""
        self.anchor.host_pool.free(indices)

    def available_size(self) -> int:
        """Host rows that are free."""
        return self.anchor.host_pool.available_size()

    def clear(self) -> None:
        """Every row of every pool is free again."""
        for entry in self.entries.values():
            entry.host_pool.clear()

    def entry(self, name: PoolName) -> PoolEntry:
        """The pools of that name. Raises InvalidValueError, which lists the known ones."""
        entry = self.entries.get(name)
        if entry is None:
            known = ", ".join(each.value for each in self.entries)
            raise InvalidValueError("pool", getattr(name, "value", name), f"one of {known}")
        return entry

    def get_pool(self, name: PoolName) -> HostPool:
        """The host pool of that name; raises as `entry` does."""
        return self.entry(name).host_pool

    def sharing_entries(self) -> list[PoolEntry]:
        """The pools that live on the anchor's rows."""
        return [entry for entry in self.entries.values() if entry.share_indices_with_anchor]

    def source_of(self, transfer: PoolTransfer) -> PoolName | None:
        """The pool whose rows a transfer shares; None: it has rows of its own."""
        shares = self.entry(transfer.name).share_indices_with_anchor
        return transfer.indices_from_pool or (self.anchor.name if shares else None)

    def check_layers(self, transfer_layer_num: int) -> None:
        """Every layer of the model is moved by some pool, and every layer of a pool by some layer of the model; raises
        InvalidValueError otherwise."""
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
        if entry is self.anchor:
            raise InvalidValueError(
                f"pool {entry.name.value}", "shares the anchor's rows", "rows of its own: it is one"
            )
        pages, own = (_pages(pool) for pool in (entry.host_pool, self.anchor.host_pool))
        if pages != own:
            expected = f"the anchor's {own}, whose rows it shares"
            raise InvalidValueError(f"pages and rows a page of pool {entry.name.value}", pages, expected)


def _pages(pool: HostPool) -> tuple[int, int]:
    return pool.size // pool.page_size, pool.page_size


def _alloc_or_evict(alloc: RowAlloc, evict: Callable[[int], object] | None, num_rows: int) -> IndexArray | None:
    rows = alloc(num_rows)
    if rows is None and evict is not None:
        evict(num_rows)
        rows = alloc(num_rows)
    return rows
