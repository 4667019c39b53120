"""A cache with a host tier and real tensors, a simulated engine, and failures of copies, pools and stores on demand.

The content of a row is computed from the tokens up to the end of its page, so a page can be checked wherever it is
found.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from engine_cache import (
    EvictParams,
    HiCacheController,
    HiRadixCache,
    InsertParams,
    ManualCopyEngine,
    MatchPrefixParams,
    PagedTokenToKVPoolAllocator,
    PoolEntry,
    RadixKey,
)
from engine_cache.pools.device import MHATokenToKVPool, MLATokenToKVPool, PoolShape
from engine_cache.pools.host import MHATokenToKVPoolHost, MLATokenToKVPoolHost
from engine_cache.storage.base import HiCacheStorage, PoolName
from engine_cache.storage.object_names import PageLayout, StorageIdentity
from engine_cache.tree.node import TreeNode, iter_nodes
from kv_events.schema import StorageMedium
from tests.support.caches.checks import check_cache

LAYERS = 2
LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def page_content(extra_key, raw):
    """Return the content of the last page of a prefix, as one number."""
    digest = hashlib.blake2b(repr((extra_key, tuple(raw))).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little") * 16


class _Faults:
    """Makes copies fail and refuses rows on demand."""

    write_faults = 0
    load_faults = 0
    refusals = 0

    def alloc(self, need_size):
        if self.refusals:
            self.refusals -= 1
            return None
        return super().alloc(need_size)  # type: ignore[misc]

    def backup_from_device_all_layer(self, device_pool, host_indices, device_indices):
        if self.write_faults:
            self.write_faults -= 1
            raise RuntimeError("injected write fault")
        super().backup_from_device_all_layer(device_pool, host_indices, device_indices)  # type: ignore[misc]

    def load_to_device_per_layer(self, device_pool, host_indices, device_indices, layer_id):
        if self.load_faults:
            self.load_faults -= 1
            raise RuntimeError("injected load fault")
        super().load_to_device_per_layer(device_pool, host_indices, device_indices, layer_id)  # type: ignore[misc]


class FaultyHostPool(_Faults, MHATokenToKVPoolHost):
    pass


class FaultyMLAHostPool(_Faults, MLATokenToKVPoolHost):
    pass


class KVPools:
    """A device pool and a host pool of int64 rows, `attention` "mha" or "mla", and the expected content of rows."""

    def __init__(self, device_pages, host_pages, page_size, attention, layout):
        shape = PoolShape(device_pages * page_size, page_size, LAYERS, torch.int64)
        ratio = (host_pages - 0.5) / device_pages
        self.page_size, self.is_mla, self.layout = page_size, attention == "mla", layout
        self.device: Any
        self.host: Any
        if self.is_mla:
            self.device = MLATokenToKVPool(shape, 1, 1)
            self.host = FaultyMLAHostPool(self.device, ratio=ratio, layout=layout, reserve_bytes=0)
        else:
            self.device = MHATokenToKVPool(shape, 1, 1)
            self.host = FaultyHostPool(self.device, ratio=ratio, layout=layout, reserve_bytes=0)
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


class MemoryStorage(HiCacheStorage):
    """A store in a dict. `broken`: every read and write raises. `full`: pools that accept no more pages."""

    medium = StorageMedium.DISK

    def __init__(self):
        super().__init__()
        self.pages = {}
        self.removed = {}
        self.broken, self.full = False, ()
        self.batches = []  # (what, pool, number of keys)

    def is_held(self, key):
        return (PoolName.KV, key) in self.pages

    def lose(self, key, name=PoolName.KV):
        del self.pages[name, key]
        self.removed[key] = None

    def take_removed(self):
        removed, self.removed = self.removed, {}
        return [key for key in removed if not self.is_held(key)]

    def clear(self):
        self.pages.clear()
        self.removed.clear()

    def _size(self):
        return len(self.pages), 0

    def _present(self, name, keys):
        self._check("exists", name, keys)
        return [(name, key) in self.pages for key in keys]

    def _read(self, name, pool, keys, rows):
        self._check("get", name, keys)
        done = []
        for key, row in zip(keys, rows, strict=True):
            page = self.pages.get((name, key))
            if page is not None:
                pool.set_from_flat_data_page(row, page)
            done.append(page is not None)
        return done

    def _write(self, name, pool, keys, rows):
        self._check("set", name, keys)
        for key, row in zip(keys, rows, strict=True):
            if name not in self.full:
                self.pages.setdefault((name, key), pool.get_data_page(row))
        return [(name, key) in self.pages for key in keys]

    def _check(self, what, name, keys):
        self.batches.append((what, name, len(keys)))
        if self.broken:
            raise OSError("injected storage fault")


class Rig:
    """Pools of `device_pages` and `host_pages` pages, and a HiRadixCache on them."""

    def __init__(
        self,
        *,
        page_size=2,
        device_pages=8,
        host_pages=12,
        attention="mha",
        layout="layer_first",
        engine=None,
        is_eagle=False,
        **cache,
    ):
        self.page_size, self.is_bigram = page_size, is_eagle
        self.pool = PagedTokenToKVPoolAllocator(device_pages * page_size, page_size)
        self.kv = KVPools(device_pages, host_pages, page_size, attention, layout)
        self.device, self.host = self.kv.device, self.kv.host
        self.engine = engine or ManualCopyEngine()
        self.controller = self.make_controller()
        cache = {"load_back_threshold": 1, "enable_kv_cache_events": True, "is_eagle": is_eagle} | cache
        self.cache = self.make_cache(page_size=page_size, allocator=self.pool, controller=self.controller, **cache)

    def make_controller(self):
        return HiCacheController(PoolEntry(PoolName.KV, self.host, self.device, self.pool), self.engine)

    def make_cache(self, **options):
        return HiRadixCache(**options)

    @property
    def identity(self):
        """Return the storage identity of these pools."""
        layout = PageLayout("int64", self.page_size, tuple(self.host.kv_buffer.shape), self.host.layout)
        return StorageIdentity("m", layout, is_mla=self.kv.is_mla)

    # --- operations of an engine ---

    def prefixes(self, tokens):
        """Return the raw tokens of every prefix of whole pages, shortest first."""
        pages = max(0, len(tokens) - self.is_bigram) // self.page_size
        return [tuple(tokens[: n * self.page_size + self.is_bigram]) for n in range(1, pages + 1)]

    def insert(self, tokens, extra_key=None, **params):
        """Compute a prompt and insert it. Returns None if the device has no room."""
        prefixes = self.prefixes(tokens)
        length = len(prefixes) * self.page_size
        rows = self.pool.alloc(length)
        if rows is None:
            self.cache.evict(EvictParams(length))
            rows = self.pool.alloc(length)
        if rows is None:
            return None
        self.compute(rows, extra_key, prefixes)
        value = np.concatenate((rows, np.zeros(len(tokens) - length, np.int64)))
        result = self.cache.insert(InsertParams(RadixKey(tokens, extra_key), value, **params))
        self.pool.free(rows[: result.prefix_len])
        return result

    def compute(self, rows, extra_key, prefixes):
        """Write the last page of each prefix to rows of the device."""
        self.kv.write(rows, _contents(extra_key, prefixes))

    def match(self, tokens, extra_key=None):
        return self.cache.match_prefix(MatchPrefixParams(RadixKey(tokens, extra_key)))

    def settle(self):
        """Finish all transfers and apply their results."""
        self.cache.ready_to_load_host_cache()
        self.engine.drain()
        self.cache.check_hicache_events()
        self.engine.drain()
        self.cache.check_hicache_events()

    # --- content of the tiers ---

    def walk(self):
        """Yield (node, namespace, raw tokens of the prefix at each page's end) for every node."""
        raw_of: dict[TreeNode, tuple[int, ...]] = {self.cache.root_node: ()}
        for node in iter_nodes(self.cache.root_node):
            above = raw_of[node.parent]
            raw_of[node] = raw = above[: len(above) - self.is_bigram] + tuple(node.key.token_ids)
            yield node, node.key.extra_key, self.prefixes(raw)[-(len(node.key) // self.page_size) :]

    def held(self, medium):
        """Return (namespace, raw tokens) of every acknowledged page on the tier."""
        return {
            (extra_key, raw)
            for node, extra_key, prefixes in self.walk()
            for raw in prefixes
            if (medium is StorageMedium.GPU and node.value is not None)
            or (medium is StorageMedium.CPU and node.host_value is not None and node.write_through_pending_id is None)
        }

    def check(self):
        """Recount tree, tiers and pools, and check every byte."""
        self._check_cache()
        self.check_bytes()

    def check_bytes(self):
        """Check every byte that is not being copied."""
        loading = {id(step) for node in self.cache.ongoing_load_back.values() for step in _up(node)}
        for node, extra_key, prefixes in self.walk():
            content = _contents(extra_key, prefixes)
            if node.value is not None and id(node) not in loading:
                self.kv.check_device(node.value, content)
            if node.host_value is not None and node.write_through_pending_id is None:
                self.kv.check_host(node.host_value, content)

    def _check_cache(self):
        check_cache(self.cache, np.empty(0, np.int64))

    def events(self):
        """Return (kind, medium, tokens or None) of the events since the last call."""
        return [
            (type(event).__name__, getattr(event, "medium", None), getattr(event, "token_ids", None))
            for event in self.cache.take_events()
        ]


def _contents(extra_key, prefixes):
    return torch.tensor([page_content(extra_key, raw) for raw in prefixes], dtype=torch.int64)


def _up(node):
    while node is not None:
        yield node
        node = node.parent
