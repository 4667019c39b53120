"""Real pools of a model with sparse attention, and the expected content of their rows and pages."""

from __future__ import annotations

import torch

from engine_cache.pools.device import NSATokenToKVPool
from engine_cache.pools.host import NSAIndexerPoolHost
from tests.support.caches.tier_rig import LAYERS, KVPools


class NsaPools(KVPools):
    """Compressed KV as in any MLA pool, and an index whose pages are computed from the same content."""

    def __init__(self, device_pages, host_pages, page_size, layout):
        super().__init__(device_pages, host_pages, page_size, "mla", layout)
        self.device = NSATokenToKVPool(self.device.shape, 1, 1)
        self.index = NSAIndexerPoolHost(self.device, self.host, layout=layout, reserve_bytes=0)

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
