"""A HiRadixCache over a model with sparse attention: compressed KV and an index, built as a hybrid stack."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from engine_cache import (
    EvictParams,
    HiRadixCache,
    InitLoadBackParams,
    InsertParams,
    ManualCopyEngine,
    MatchPrefixParams,
    PagedTokenToKVPoolAllocator,
    RadixKey,
    StoragePolicy,
)
from engine_cache.pools.device import NSATokenToKVPool, PoolShape
from engine_cache.stacks import HostTierConfig, build_nsa_hybrid_stack
from engine_cache.storage.base import PoolName
from tests.support.caches.tier_rig import MemoryStorage, Rig

LAYERS = 2


class FlakyStore(MemoryStorage):
    """A store that refuses writes in `refused` and reads in `unreadable`, both sets of (pool, position in a batch)."""

    def __init__(self):
        super().__init__()
        self.refused, self.unreadable = set(), set()

    def keys_of(self, name):
        return {key for pool, key in self.pages if pool is name}

    def _write(self, name, pool, keys, rows):
        done = super()._write(name, pool, keys, rows)
        for place in [place for place in range(len(keys)) if (name, place) in self.refused]:
            self.pages.pop((name, keys[place]))
            done[place] = False
        return done

    def _read(self, name, pool, keys, rows):
        done = super()._read(name, pool, keys, rows)
        return [there and (name, place) not in self.unreadable for place, there in enumerate(done)]


class NsaRig:
    """A cache with 8 device pages and 16 host pages."""

    settle: ClassVar[Any] = Rig.settle

    def __init__(self, page_size=4, layout="page_first", store=None, batch_pages=2, **stack):
        self.page_size = page_size
        self.pool = PagedTokenToKVPoolAllocator(8 * page_size, page_size)
        self.device = NSATokenToKVPool(PoolShape(8 * page_size, page_size, LAYERS, torch.bfloat16), 5, 2)
        if store is not None:
            policy = StoragePolicy(prefetch_threshold=1, batch_pages=batch_pages, emit_storage_events=True)
            stack |= {"open_store": lambda: store, "policy": policy}
        config = HostTierConfig(layout=layout, reserve_bytes=0)
        defaults: dict[str, Any] = {"config": config, "make_engine": ManualCopyEngine}
        self.stack = build_nsa_hybrid_stack(self._cache, self.device, self.pool, **defaults | stack)
        self.cache, self.controller = self.stack.cache, self.stack.cache_controller
        self.engine, self.group = self.controller.engine, self.stack.token_to_kv_pool_host
        self.index = self.group.get_pool(PoolName.INDEXER)

    def _cache(self, controller):
        return HiRadixCache(
            page_size=self.page_size,
            allocator=self.pool,
            controller=controller,
            load_back_threshold=1,
            enable_kv_cache_events=True,
        )

    def insert(self, tokens):
        """Compute a prompt of whole pages. Returns the content of each of its tokens."""
        rows = self.pool.alloc(len(tokens))
        generator = torch.Generator().manual_seed(len(tokens))
        for kv, index in zip(self.device.kv_buffer, self.device.index_k_with_scale_buffer, strict=True):
            kv[rows] = torch.randn((len(rows), 1, 7), generator=generator).to(kv.dtype)
            pages = rows[:: self.page_size] // self.page_size
            noise = torch.randint(0, 256, (len(pages), index.shape[1]), generator=generator)
            index[pages] = noise.to(torch.uint8)
        content = self.content(rows)
        result = self.cache.insert(InsertParams(RadixKey(tokens), rows))
        self.pool.free(rows[: result.prefix_len])
        return content

    def content(self, rows):
        """Return the bytes of KV and of the index by page, for all layers."""
        pages = rows[:: self.page_size] // self.page_size
        kv = [held[rows].view(torch.uint8).view(len(pages), -1) for held in self.device.kv_buffer]
        return torch.cat([*kv, *(held[pages] for held in self.device.index_k_with_scale_buffer)], dim=1)

    def zero_device(self):
        for held in (*self.device.kv_buffer, *self.device.index_k_with_scale_buffer):
            held.zero_()

    def match(self, tokens):
        return self.cache.match_prefix(MatchPrefixParams(RadixKey(tokens)))

    def demote(self):
        """Evict everything from the device and fill its memory with zeros."""
        self.settle()
        self.cache.evict(EvictParams(10**6))
        assert self.pool.available_size() == self.pool.size
        self.zero_device()

    def load_back(self, tokens):
        """Load what the host holds of the prompt. Returns its device rows."""
        match = self.match(tokens)
        rows, _ = self.cache.init_load_back(InitLoadBackParams(match.best_match_node, match.host_hit_length))
        self.settle()
        return np.concatenate((match.device_indices, rows))
