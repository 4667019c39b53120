"""Pools on device and host whose rows hold one number each, and what the number should be."""

from __future__ import annotations

import hashlib

import numpy as np

from engine_cache.pools.host_rows import HostRows


def content(extra_key, raw, kind):
    """What the last page of a prefix, or the state behind it, contains."""
    digest = hashlib.blake2b(repr((extra_key, tuple(raw), kind)).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little") * 16


class DeviceRows:
    """Rows of a device pool."""

    def __init__(self, num_rows):
        self.rows = np.zeros(num_rows, np.int64)


class HostPool(HostRows):
    """Rows of a host pool; copies fail as often as told to."""

    layer_num = 1
    layout = "page_first"
    write_faults = load_faults = 0

    def __init__(self, size, page_size):
        super().__init__(size, page_size)
        self.rows = np.zeros(size, np.int64)

    def backup_from_device_all_layer(self, device_pool, host_indices, device_indices):
        if self.write_faults:
            self.write_faults -= 1
            raise RuntimeError("injected write fault")
        self.rows[host_indices] = device_pool.rows[device_indices]

    def load_to_device_per_layer(self, device_pool, host_indices, device_indices, layer_id):
        if self.load_faults:
            self.load_faults -= 1
            raise RuntimeError("injected load fault")
        device_pool.rows[device_indices] = self.rows[host_indices]

    def get_data_page(self, index):
        return self.rows[index : index + self.page_size].copy()

    def set_from_flat_data_page(self, index, data):
        self.rows[index : index + self.page_size] = data
