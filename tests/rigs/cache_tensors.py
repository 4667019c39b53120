"""Real pools of tensors for a `CacheRig`, with the expected content of rows, states and pages of an index."""

from typing import Any

import torch

from engine_cache.pools.device import MHATokenToKVPool, MLATokenToKVPool, NSATokenToKVPool, PoolShape
from engine_cache.pools.host import MambaPoolHost, MHATokenToKVPoolHost, MLATokenToKVPoolHost, NSAIndexerPoolHost
from engine_cache.pools.mamba import MambaPool
from tests.rigs.cache_pools import faulty

LAYERS = 2
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
FULL_LAYERS, MAMBA_LAYERS = {1: 0, 3: 1}, {0: 0, 2: 1}
"""Layers of a model with recurrent layers -> those of its two pools."""


class KVPools:
    """A device pool and a host pool of int64 rows, `attention` "mha" or "mla", and the expected content of rows."""

    def __init__(self, num_pages, page_size, attention, layout):
        """num_pages: on device and host."""
        device_pages, host_pages = num_pages
        shape = PoolShape(device_pages * page_size, page_size, LAYERS, torch.int64)
        ratio = (host_pages - 0.5) / device_pages
        self.page_size, self.is_mla, self.layout = page_size, attention == "mla", layout
        self.device: Any = (MLATokenToKVPool if self.is_mla else MHATokenToKVPool)(shape, 1, 1)
        make = MLATokenToKVPoolHost if self.is_mla else MHATokenToKVPoolHost
        self.host = faulty(make)(self.device, ratio=ratio, layout=layout, reserve_bytes=0)
        assert self.host.size == host_pages * page_size

    def write(self, rows, content):
        """Write pages to rows of the device. content: one number per page."""
        content = torch.as_tensor(content)
        for layer in range(LAYERS):
            keys, values = self._rows_of(content, layer)
            if self.is_mla:
                self.device.set_kv_buffer(layer, rows, torch.stack((keys, values), dim=-1).unsqueeze(1))
            else:
                self.device.set_kv_buffer(layer, rows, keys.view(-1, 1, 1), values.view(-1, 1, 1))

    def check_device(self, rows, content):
        for layer in range(LAYERS):
            held = self.device.get_kv_buffer(layer)
            self._check(held.unbind(-1) if self.is_mla else held, rows, content, layer)

    def check_host(self, rows, content):
        axis = {"layer_first": 0, "page_first": 1, "page_first_direct": 1}[self.layout]
        for layer in range(LAYERS):
            held = self.host.kv_buffer.select(axis + (not self.is_mla), layer)
            parts = held.unbind(-1) if self.is_mla else held
            self._check([part.reshape(-1) for part in parts], rows, content, layer)

    def _rows_of(self, content, layer):
        """Return keys and values, one of each per row."""
        keys = (content[:, None] + torch.arange(self.page_size)).reshape(-1)
        return keys + layer, ~keys - layer

    def _check(self, held, rows, content, layer):
        for part, wanted in zip(held, self._rows_of(torch.as_tensor(content), layer), strict=True):
            assert torch.equal(part.flatten()[torch.from_numpy(rows)], wanted)


class NsaPools(KVPools):
    """Compressed KV as in any MLA pool, and an index whose pages are computed from the same content."""

    def __init__(self, num_pages, page_size, layout):
        super().__init__(num_pages, page_size, "mla", layout)
        self.device = NSATokenToKVPool(self.device.shape, 1, 1)
        self.index = faulty(NSAIndexerPoolHost)(self.device, self.host, layout=layout, reserve_bytes=0)

    def write(self, rows, content):
        content = torch.as_tensor(content)
        super().write(rows, content)
        for layer, held in enumerate(self.device.index_k_with_scale_buffer):
            held[self._pages(rows)] = self._index(content, layer)

    def check_device(self, rows, content):
        content = torch.as_tensor(content)
        super().check_device(rows, content)
        for layer, held in enumerate(self.device.index_k_with_scale_buffer):
            assert torch.equal(held[self._pages(rows)], self._index(content, layer))

    def check_host(self, rows, content):
        content = torch.as_tensor(content)
        super().check_host(rows, content)
        for i, page in enumerate(self._pages(rows).tolist()):
            expected = torch.cat([self._index(content[i : i + 1], layer)[0] for layer in range(LAYERS)])
            assert torch.equal(self.index.get_data_page(page * self.page_size), expected)

    def _pages(self, rows):
        return torch.from_numpy(rows[:: self.page_size] // self.page_size)

    def _index(self, content, layer):
        """Return one page of the index for each number."""
        width = self.page_size * self.device.index_row_bytes
        return ((content[:, None] // 16 + torch.arange(width) + 7 * layer) % 251).to(torch.uint8)


class StatePools:
    """Recurrent states of two layers on device and host."""

    def __init__(self, num_slots, layout):
        slots, host_slots = num_slots
        dtypes: dict[str, Any] = {"conv_dtype": torch.int32, "temporal_dtype": torch.int64}
        self.device = MambaPool(slots, len(MAMBA_LAYERS), [(2,)], (1,), **dtypes)
        ratio = (host_slots - 0.5) / slots
        self.host = faulty(MambaPoolHost)(self.device, ratio=ratio, layout=layout, reserve_bytes=0)
        assert self.host.size == host_slots

    def write(self, slots, contents):
        for slot, content in zip(slots, contents, strict=True):
            for tensor, values in self._tensors(self.device.mamba_cache.tensors(), int(content)):
                tensor[:, [slot]] = values

    def check_device(self, slots, contents):
        self._check(self.device.mamba_cache.tensors(), slots, contents)

    def check_host(self, slots, contents):
        held = self.host.get_hybrid_pool_buffer()
        if self.host.layout != "layer_first":
            held = [tensor.squeeze(2).transpose(0, 1) for tensor in held]
        self._check(held, slots, contents)

    def _check(self, held, slots, contents):
        for slot, content in zip(slots, contents, strict=True):
            for tensor, values in self._tensors(held, int(content)):
                assert torch.equal(tensor[:, [slot]], values)

    def _tensors(self, held, content):
        """Return tensors (layers, slots, ...) and the content of a state in each, (layers, 1, ...)."""
        layers = torch.arange(len(MAMBA_LAYERS)).view(-1, 1, 1)
        small = (content // 16 % 2**30 + layers).to(torch.int32)
        return zip(held, [content + layers, torch.cat((small, -small), dim=2)], strict=True)
