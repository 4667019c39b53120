"""Sizes of host pools, and a host pool without bytes. No torch."""

from __future__ import annotations

from engine_cache.pools.allocators import PagedTokenToKVPoolAllocator
from engine_cache.types import IndexArray
from kv_events.errors import InvalidValueError


class BytelessHostPool(PagedTokenToKVPoolAllocator):
    """A host pool for simulations, which allocates the rows `0 .. size - 1` but copies nothing."""

    layer_num = 1
    layout = "page_first"

    def __init__(self, size: int, page_size: int) -> None:
        super().__init__(size, page_size, first_page=0)

    def backup_from_device_all_layer(
        self, device_pool: object, host_indices: IndexArray, device_indices: IndexArray
    ) -> None:
        """Do nothing: there are no bytes to copy."""

    def load_to_device_per_layer(
        self, device_pool: object, host_indices: IndexArray, device_indices: IndexArray, layer_id: int
    ) -> None:
        """Do nothing: there are no bytes to copy."""


def host_pool_size(
    device_size: int, page_size: int, size_per_token: int, *, host_size_gb: float = 0.0, ratio: float = 2.0
) -> int:
    """Return the number of rows of a host pool: as many as fit into `host_size_gb` or, if that is 0, `ratio` times as
    many as on the device. The result is a multiple of the page size and one page more than requested.

    size_per_token: bytes per row. Raises InvalidValueError if the host pool is not larger than the device pool.
    """
    if page_size < 1:
        raise InvalidValueError("page_size", page_size, "a positive integer")
    if host_size_gb < 0:
        raise InvalidValueError("host_size_gb", host_size_gb, "0 or more")
    wanted = int(host_size_gb * 1e9 // size_per_token) if host_size_gb else int(device_size * ratio)
    size = (wanted // page_size + 1) * page_size
    require_larger_than_device(size, device_size)
    return size


def require_larger_than_device(host_size: int, device_size: int) -> None:
    """Check that the host pool is larger than the device pool. Raises InvalidValueError with both sizes."""
    if host_size <= device_size:
        raise InvalidValueError("size of the host pool", host_size, f"more rows than the device pool's {device_size}")
