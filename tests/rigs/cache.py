"""A prefix cache of any class with its pools, a simulated engine, and failures of copies and pools on demand.

The content of a row or a state is computed from the tokens up to the end of its page, so both can be checked wherever
they are found.
"""

from typing import Any

import numpy as np
import pytest

import engine_cache as ec
from engine_cache import EvictParams, InsertParams, Lane, PoolEntry, RadixKey, Request
from engine_cache.storage.base import PoolName
from engine_cache.storage.object_names import PageLayout, StorageIdentity
from kv_events.schema import StorageMedium
from tests.rigs.cache_content import POOLS, CacheContent
from tests.rigs.cache_pools import contents, make_pools

GPU, CPU, DISK, EXTERNAL = StorageMedium
NOTHING = np.empty(0, np.int64)
A, AB, ABC, ABCD = [1, 1], [1, 1, 2, 2], [1, 1, 2, 2, 3, 3], [1, 1, 2, 2, 3, 3, 4, 4]
EVERYTHING = EvictParams(10**6, 10**6, 10**6)
CLEARED = ("AllBlocksCleared", None, None)
FAILED = "failed on purpose"
CLASSES: dict[str, Any] = {
    "radix": ec.RadixCache,
    "hiradix": ec.HiRadixCache,
    "mamba": ec.MambaRadixCache,
    "himamba": ec.HiMambaRadixCache,
}


class CacheRig(CacheContent):
    """A cache with its pools and an engine.

    name: radix, hiradix, mamba, himamba or unified, then "+" and kinds of state in the order of the components: swa,
    mamba, or indexer alone, for a model with sparse attention. tiers: 1 or 2. pools: numbers, or real ones of tensors,
    mha or mla. options: further options of the cache."""

    def __init__(
        self,
        name="unified",
        *,
        tiers=2,
        page_size=2,
        device_pages=8,
        host_pages=12,
        swa_pages=7,
        swa_host_pages=10,
        window=3,
        slots=5,
        host_slots=7,
        engine=None,
        layout="page_first",
        pools="numbers",
        extra_buffer=True,
        **options,
    ):
        self.name = name
        self.cls, *kinds = name.split("+")
        self.kinds = ("mamba",) if "mamba" in self.cls else tuple(kinds)
        self.page_size, self.window, self.is_bigram = page_size, window, options.get("is_eagle", False)
        self.has_extra_buffer = extra_buffer
        rows = device_pages * page_size
        self.swa = ec.SWATokenToKVPoolAllocator(rows, swa_pages * page_size, page_size) if "swa" in kinds else None
        self.pool = self.swa.full if self.swa else ec.PagedTokenToKVPoolAllocator(rows, page_size)
        self.tokens = self.swa or self.pool
        self.slots, self.lines = ec.MambaSlotAllocator(slots), ec.ReqToTokenPool(6, 64)
        sizes = {PoolName.KV: (device_pages, host_pages), PoolName.SWA: (swa_pages, swa_host_pages)}
        form = "indexer" if "indexer" in kinds else pools
        self.pools = make_pools(page_size, sizes | {PoolName.MAMBA: (slots, host_slots)}, form, layout)
        self.device_pools = {each: pair.device for each, pair in self.pools.items()}
        self.host_pools = {each: pair.host for each, pair in self.pools.items()}
        self.host, self.host_states = self.host_pools[PoolName.KV], self.host_pools[PoolName.MAMBA]
        self.engine: Any = engine or ec.ManualCopyEngine()
        self.controller: Any = None
        if tiers > 1 and self.cls not in ("radix", "mamba"):
            self.controller = self._make_controller(has_layers=pools != "numbers" and "mamba" in self.kinds)
        self.cache = self._make_cache(**{"enable_kv_cache_events": True, "req_to_token_pool": self.lines} | options)
        self.requests = []  # requests that own a slot and nothing else
        self.loaded = {}  # request -> (node, content of its slot after the node is loaded)
        self.served = None  # `Requests`, if requests run from beginning to end

    def _make_controller(self, *, has_layers):
        layers: dict[PoolName, Any] = {}
        if has_layers:
            from tests.rigs.cache_tensors import FULL_LAYERS, MAMBA_LAYERS

            layers = {PoolName.KV: FULL_LAYERS.get, PoolName.MAMBA: MAMBA_LAYERS.get}
        allocators = {PoolName.KV: self.pool, PoolName.MAMBA: self.slots, PoolName.SWA: self.swa and self.swa.swa}
        names = [PoolName.KV, *(POOLS[kind] for kind in self.kinds if kind in POOLS)]
        entries = [
            PoolEntry(name, self.host_pools[name], self.device_pools[name], allocators[name], layers.get(name))
            for name in names
        ]
        if "indexer" in self.kinds:
            kv = self.pools[PoolName.KV]
            entries.append(PoolEntry(PoolName.INDEXER, kv.index, kv.device, self.pool, share_indices_with_anchor=True))
        group = ec.HostPoolGroup.of(*entries)
        return ec.HybridCacheController(group, self.engine, transfer_layer_num=4 if has_layers else None)

    def _make_cache(self, write_policy="write_through", load_back_threshold=1, **options) -> Any:
        options = {"emit_group_events": options["enable_kv_cache_events"], "page_size": self.page_size} | options
        states = {"mamba_pool": self.device_pools[PoolName.MAMBA], "mamba_cache_chunk_size": 2}
        states["enable_mamba_extra_buffer"] = self.has_extra_buffer
        host = {"write_policy": write_policy, "load_back_threshold": load_back_threshold}
        host = {} if self.controller is None else {"controller": self.controller} | host
        if self.cls == "unified":
            make: dict[str, Any] = {
                "swa": lambda: ec.SWAComponent(self.swa, self.window),
                "mamba": lambda: ec.MambaComponent(self.slots, **states),
            }
            components = [make[kind]() for kind in self.kinds if kind in make]
            cache = ec.UnifiedRadixCache(allocator=self.tokens, components=components, **options)
            if host:
                cache.init_hicache(**host)
            return cache
        if "mamba" in self.kinds:
            options = {"mamba_allocator": self.slots} | states | options
        return CLASSES[self.cls](allocator=self.pool, **host, **options)

    @property
    def identity(self):
        """Return the storage identity of these pools."""
        if hasattr(self.host, "kv_buffer"):
            shape, is_mla = tuple(self.host.kv_buffer.shape), self.pools[PoolName.KV].is_mla
        else:  # each page is one run of bytes, as with compressed KV
            shape, is_mla = (self.host.layer_num,), True
        return StorageIdentity("m", PageLayout("int64", self.page_size, shape, self.host.layout), is_mla=is_mla)

    def insert(self, tokens, extra_key=None, *, evicted=0, **params):
        """Compute a prompt from scratch and insert it. Returns None if there is no room. evicted: leading pages whose
        SWA rows are freed before the insert."""
        prefixes = self.prefixes(tokens)
        length = len(prefixes) * self.page_size
        slot = self.alloc_slot() if "mamba" in self.kinds and length else NOTHING
        rows = self.alloc(length)
        if rows is None or slot is None or ("mamba" in self.kinds and not length):
            self.tokens.free(NOTHING if rows is None else rows)
            self.slots.free(NOTHING if slot is None else slot)
            return None
        self.compute(rows, extra_key, prefixes)
        evicted = min(evicted, len(prefixes)) * self.page_size if self.swa else 0
        if evicted:
            self.swa.free_swa(rows[:evicted])
        if len(slot):
            self.pools[PoolName.MAMBA].write(slot, contents(extra_key, prefixes[-1:], "mamba"))
        if not self.kinds:  # caches of KV alone cut keys themselves
            key, value = RadixKey(tokens, extra_key), np.concatenate((rows, np.zeros(len(tokens) - length, np.int64)))
        else:
            key, value = RadixKey(tokens[: length + self.is_bigram * bool(length)], extra_key), rows
        result = self.cache.insert(InsertParams(key, value, mamba_value=slot, swa_evicted_seqlen=evicted, **params))
        if result.mamba_exist and len(slot):
            self.slots.free(slot)
        if self.cls in ("radix", "hiradix"):
            self.pool.free(rows[: result.prefix_len])
        return result

    def turns(self, *prompts, **params):
        """Insert prompts one after the other, and finish the backup of each. Takes the events."""
        for tokens in prompts:
            self.insert(tokens, **params)
            self.settle()
        self.cache.take_events()
        return [self.node_of(tokens) for tokens in prompts]

    def demoted(self, *prompts, **params):
        """The same, then evict everything from the device."""
        self.turns(*prompts, **params)
        self.cache.evict(EVERYTHING)
        self.cache.take_events()

    def alloc(self, length):
        rows = self.tokens.alloc(length)
        if rows is None:
            lack = length - self.swa.swa.available_size() if self.swa else 0
            self.cache.evict(EvictParams(length - self.pool.available_size(), swa_num_tokens=lack))
            rows = self.tokens.alloc(length)
        return rows

    def alloc_slot(self):
        slot = self.slots.alloc(1)
        if slot is None:
            self.cache.evict(EvictParams(0, mamba_num=1))
            slot = self.slots.alloc(1)
        return slot

    def compute(self, rows, extra_key, prefixes):
        """Write the last page of each prefix."""
        self.pools[PoolName.KV].write(rows, contents(extra_key, prefixes, "kv"))
        if self.swa:
            self.pools[PoolName.SWA].write(self.swa.translate(rows), contents(extra_key, prefixes, "swa"))

    def match(self, tokens, extra_key=None, **params):
        return self.cache.match_prefix(ec.MatchPrefixParams(RadixKey(tokens, extra_key), **params))

    def load_back(self, match, *, mem_quota=None, req=None):
        """Load a match back as a scheduler does: lock the device node, load, and lock the node to continue from.
        Returns (result, request, lock of that node). req: None creates one for a unified cache, which requires it."""
        lock = self.cache.inc_lock_ref(match.last_device_node)
        if req is None and self.cls == "unified":
            req = Request(f"r{len(self.requests)}", [], 0)
        if req is not None:
            req.last_node = match.last_device_node
            req.swa_host_hit_length, req.mamba_host_hit_length = match.swa_host_hit_length, match.mamba_host_hit_length
        params = ec.InitLoadBackParams(match.best_match_node, match.host_hit_length, mem_quota, req)
        try:
            result = self.cache.init_load_back(params)
        except ec.PoolExhaustedError:  # no slot for the state of the device node
            assert self.slots.available_size() == 0
            result = NOTHING, match.last_device_node
        held = self.cache.inc_lock_ref(result[1])
        self.cache.release(lock)
        if req is not None:
            self._own_slot(req, result[1])
        return result, req, held

    def _own_slot(self, req, node):
        req.last_node = None
        if req.mamba_pool_idx is not None and req not in self.requests:
            self.requests.append(req)
            if req.mamba_cow_src_index is None and node is not self.cache.root_node:  # the load writes to the slot
                place = next(place for place in self.walk() if place.node is node)
                self.loaded[req] = node, contents(place.extra_key, place.prefixes[-1:], "mamba")

    def load(self, tokens, extra_key=None, **params):
        """Load the match of a prompt back, without a lock afterwards. Returns the rows and the node to go on from."""
        result, _, lock = self.load_back(self.match(tokens, extra_key), **params)
        self.cache.release(lock)
        return result

    def hold_on_host(self, node):
        """Protect what a transfer at the node needs on the host besides KV from eviction. Returns the release."""
        held: list[Any] = [(each, each.acquire(node, on_host=True)) for each in self.cache.auxiliaries]
        return lambda: [each.release(ticket) for each, ticket in held if ticket is not None]

    def end_requests(self, number=None):
        """End the requests that own a slot, even if a load into the slot is in flight. number: of the oldest ones."""
        for req in self.requests[:number]:
            self.cache.cache_finished_req(req, is_insert=False)
            self.loaded.pop(req, None)
        del self.requests[:number]

    def reset(self):
        """Reset the cache and its pools."""
        self.cache.reset()
        self.tokens.clear()
        self.slots.clear()
        self.requests.clear()
        self.loaded.clear()

    def run(self, *lanes):
        while any(self.engine.step(lane) for lane in lanes):
            pass

    def settle(self):
        """Finish all transfers and apply their results."""
        if self.controller is None:
            return
        for _ in range(3):
            self.cache.ready_to_load_host_cache()
            self.engine.drain()
            self.cache.check_hicache_events()

    def attach(self, store, threshold=1, **policy):
        """Attach a store. Takes the events."""
        assert self.cache.attach_storage_backend(store, ec.StoragePolicy(threshold, **policy)) == (True, "attached")
        self.cache.take_events()
        return self

    def prefetch(self, tokens, req_id="r", **params):
        """Start to prefetch what the host lacks of a prompt. Returns the operation, or None if none has begun."""
        anchor = self.match(tokens).last_host_node
        start = sum(len(node.key) for node in self.up(anchor))
        self.cache.prefetch_from_storage(req_id, anchor, tokens[start:], **params)
        return self.cache.ongoing_prefetch.get(req_id)

    def fetched(self):
        """Finish the prefetch of request r. Returns the units that it added to the tree."""
        self.run(Lane.PREFETCH)
        self.cache.check_hicache_events()
        assert self.cache.check_prefetch_progress("r")
        self.cache.check_hicache_events()
        return self.cache.pop_prefetch_loaded_tokens("r")

    def events(self):
        """Return (kind, medium, tokens or None) of the events since the last call."""
        return [
            (type(event).__name__, getattr(event, "medium", None), getattr(event, "token_ids", None))
            for event in self.cache.take_events()
        ]


def rigs(*names, **options):
    """Parametrize the fixture `rig` with rigs of these names, or (name, options of its own)."""
    each = [(name, {}) if isinstance(name, str) else name for name in names]
    params = [pytest.param((name, options | own), id=f"{name}{own or ''}") for name, own in each]
    return pytest.mark.parametrize("rig", params, indirect=True)


def stored(medium, *pages):
    return [("BlockStored", medium, list(page)) for page in pages]


def removed(medium, count=1):
    return count * [("BlockRemoved", medium, None)]


def refuse(*args, **kwargs):
    raise RuntimeError(FAILED)
