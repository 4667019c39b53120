"""Pools on device and host whose rows hold one number each, and the expected numbers. No torch."""

import hashlib
from functools import cache
from typing import Any

import numpy as np

from engine_cache.pools.allocators import BytelessHostPool
from engine_cache.storage.base import PoolName


def content(extra_key, raw, kind):
    """Return the content of the last page of a prefix, or of the state at its end."""
    digest = hashlib.blake2b(repr((extra_key, tuple(raw), kind)).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little") * 16


def contents(extra_key, prefixes, kind):
    return np.array([content(extra_key, raw, kind) for raw in prefixes], np.int64)


class Faults:
    """Makes copies of a host pool fail, and refuses rows, on demand."""

    write_faults = load_faults = refusals = 0

    def alloc(self, need_size):
        if self.refusals:
            self.refusals -= 1
            return None
        return super().alloc(need_size)  # type: ignore[misc]

    def backup_from_device_all_layer(self, *args):
        if self.write_faults:
            self.write_faults -= 1
            raise RuntimeError("injected write fault")
        super().backup_from_device_all_layer(*args)  # type: ignore[misc]

    def load_to_device_per_layer(self, *args):
        if self.load_faults:
            self.load_faults -= 1
            raise RuntimeError("injected load fault")
        super().load_to_device_per_layer(*args)  # type: ignore[misc]


@cache
def faulty(pool: type) -> Any:
    """Return a class of host pools whose copies fail on demand."""
    return type(f"Faulty{pool.__name__}", (Faults, pool), {})


class NumberPools:
    """One kind of state: its two pools and the expected content of their rows."""

    def __init__(self, device_rows, host_rows, page_size):
        self.page_size = page_size
        self.device, self.host = DeviceRows(device_rows), faulty(NumberRows)(host_rows, page_size)

    def write(self, rows, contents):
        """Write pages to rows of the device. contents: one number per page."""
        self.device.rows[rows] = self._rows_of(contents)

    def check_device(self, rows, contents):
        assert self.device.rows[rows].tolist() == self._rows_of(contents).tolist()

    def check_host(self, rows, contents):
        assert self.host.rows[rows].tolist() == self._rows_of(contents).tolist()

    def _rows_of(self, contents):
        return (contents.reshape(-1, 1) + np.arange(self.page_size)).reshape(-1)


class DeviceRows:
    """Rows of a device pool."""

    def __init__(self, num_rows):
        self.rows = np.zeros(num_rows, np.int64)

    def copy_from(self, src, dst):
        """Copy a row, as a pool of states does for a request."""
        self.rows[dst] = self.rows[src]


class NumberRows(BytelessHostPool):
    """Rows of a host pool."""

    def __init__(self, size, page_size):
        super().__init__(size, page_size)
        self.rows = np.zeros(size, np.int64)

    def backup_from_device_all_layer(self, device_pool, host_indices, device_indices):
        self.rows[host_indices] = device_pool.rows[device_indices]

    def load_to_device_per_layer(self, device_pool, host_indices, device_indices, layer_id):
        device_pool.rows[device_indices] = self.rows[host_indices]

    # --- interface for stores ---

    def get_data_page(self, index):
        return _tensor(self.rows[index : index + self.page_size].copy())

    def get_dummy_flat_data_page(self):
        return _tensor(np.zeros(self.page_size, np.int64))

    def set_from_flat_data_page(self, index, data):
        self.rows[index : index + self.page_size] = data

    def get_hybrid_pool_buffer(self):
        return [_tensor(self.rows)]

    def get_page_buffer_meta(self, indices):
        first = self.rows.ctypes.data + self.rows.itemsize * indices[:: self.page_size]
        return first.tolist(), [self.rows.itemsize * self.page_size] * len(first)


def make_pools(page_size, sizes, form, layout) -> dict[PoolName, Any]:
    """Return the pools of each kind of state. sizes: pages, or slots, on device and host. form: numbers, mha, mla, or
    indexer for those of sparse attention."""
    made: dict[PoolName, Any] = {}
    for name, (device, host) in sizes.items():
        page = 1 if name is PoolName.MAMBA else page_size
        made[name] = NumberPools((device + 1) * page, host * page, page)
    if form == "numbers":
        return made
    from tests.rigs.cache_tensors import KVPools, NsaPools, StatePools  # needs torch

    if form == "indexer":
        return made | {PoolName.KV: NsaPools(sizes[PoolName.KV], page_size, layout)}
    real = {name: KVPools(sizes[name], page_size, form, layout) for name in (PoolName.KV, PoolName.SWA)}
    return {**real, PoolName.MAMBA: StatePools(sizes[PoolName.MAMBA], layout)}


def _tensor(rows):
    import torch  # imported only when bytes are moved: trees do not need it

    return torch.from_numpy(rows)
