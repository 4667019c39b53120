"""A UnifiedRadixCache of any kinds of state with pools whose rows hold one number each, and a simulated engine.

The number in a row or a state is computed from the tokens up to the end of its page, so both can be checked wherever
they are found.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from engine_cache import (
    ComponentType,
    EvictParams,
    HostPoolGroup,
    HybridCacheController,
    InitLoadBackParams,
    InsertParams,
    Lane,
    MambaComponent,
    MambaSlotAllocator,
    ManualCopyEngine,
    MatchPrefixParams,
    PagedTokenToKVPoolAllocator,
    PoolEntry,
    PoolExhaustedError,
    RadixKey,
    ReqToTokenPool,
    Request,
    SWAComponent,
    SWATokenToKVPoolAllocator,
    UnifiedRadixCache,
)
from engine_cache.storage.base import PoolName
from engine_cache.storage.object_names import PageLayout, StorageIdentity
from engine_cache.tree.node import TreeNode, iter_nodes
from kv_events.schema import StorageMedium
from tests.support.caches.checks import check_cache
from tests.support.caches.number_pools import NumberPools, content

NOTHING = np.empty(0, np.int64)


class Place(NamedTuple):
    """Identifies a node by its pages."""

    node: object
    extra_key: str | None
    prefixes: list[tuple[int, ...]]
    """Raw tokens of the prefix up to the end of each page."""


class UnifiedRig:
    """A cache with its pools and an engine.

    kinds: "swa" and "mamba" in the order of the components, or "indexer" alone for a model with sparse attention and
    real pools in a `layout`. tiers: 1 or 2. attention: "mha" for real pools of KV and of sliding windows."""

    def __init__(
        self,
        kinds=(),
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
        write_policy="write_through",
        load_back_threshold=1,
        engine=None,
        is_eagle=False,
        layout="page_first",
        attention=None,
        **cache,
    ):
        self.page_size, self.is_bigram, self.window, self.kinds = page_size, is_eagle, window, kinds
        rows = device_pages * page_size
        self.pool = PagedTokenToKVPoolAllocator(rows, page_size)
        self.slots = MambaSlotAllocator(slots)
        self.swa = SWATokenToKVPoolAllocator(rows, swa_pages * page_size, page_size) if "swa" in kinds else None
        self.pool = self.swa.full if self.swa else self.pool
        self.tokens = self.swa or self.pool
        self.pools: dict[PoolName, Any] = {
            PoolName.KV: NumberPools(rows + page_size, host_pages * page_size, page_size),
            PoolName.SWA: NumberPools((swa_pages + 1) * page_size, swa_host_pages * page_size, page_size),
            PoolName.MAMBA: NumberPools(slots + 1, host_slots, 1),
        }
        if attention is not None:
            from tests.support.caches.tier_rig import KVPools  # needs torch

            self.pools[PoolName.KV] = KVPools(device_pages, host_pages, page_size, attention, layout)
            self.pools[PoolName.SWA] = KVPools(swa_pages, swa_host_pages, page_size, attention, layout)
        if "indexer" in kinds:
            from tests.support.caches.nsa_pools import NsaPools

            self.pools[PoolName.KV] = NsaPools(device_pages, host_pages, page_size, layout)
        self.device_pools = {name: pools.device for name, pools in self.pools.items()}
        self.host_pools = {name: pools.host for name, pools in self.pools.items()}
        self.host = self.host_pools[PoolName.KV]
        make = {
            "swa": lambda: SWAComponent(self.swa, window),
            "mamba": lambda: MambaComponent(
                self.slots,
                mamba_pool=self.device_pools[PoolName.MAMBA],
                mamba_cache_chunk_size=2,
                enable_mamba_extra_buffer=True,
            ),
        }
        options: dict[str, Any] = {"enable_kv_cache_events": True, "req_to_token_pool": ReqToTokenPool(6, 64)} | cache
        options = {"emit_group_events": options["enable_kv_cache_events"]} | options
        components = [make[kind]() for kind in kinds if kind in make]
        self.cache = UnifiedRadixCache(
            page_size=page_size, allocator=self.tokens, components=components, is_eagle=is_eagle, **options
        )
        self.engine = engine or ManualCopyEngine()
        if tiers > 1:
            entries = [self._entry(PoolName.KV, self.pool)]
            entries += [self._entry(each.pool, each.device_allocator) for each in components]
            if "indexer" in kinds:
                entries.append(self._index_entry())
            self.controller = HybridCacheController(HostPoolGroup.of(*entries), self.engine)
            self.cache.init_hicache(self.controller, write_policy, load_back_threshold)
        self.requests = []  # requests that own a slot and nothing else
        self.served = None  # `unified_requests.Requests`, if requests run from beginning to end

    def _entry(self, pool, allocator):
        return PoolEntry(pool, self.host_pools[pool], self.device_pools[pool], allocator)

    def _index_entry(self):
        kv = self.pools[PoolName.KV]
        return PoolEntry(PoolName.INDEXER, kv.index, kv.device, self.pool, share_indices_with_anchor=True)

    @property
    def identity(self):
        """Return the storage identity of these pools. Each page is one run of bytes, as with compressed KV."""
        layout = PageLayout("int64", self.page_size, (self.host.layer_num,), self.host.layout)
        return StorageIdentity("m", layout, is_mla=True)

    # --- operations of an engine ---

    def prefixes(self, tokens):
        """Return the raw tokens of every prefix of whole pages, shortest first."""
        pages = max(0, len(tokens) - self.is_bigram) // self.page_size
        return [tuple(tokens[: n * self.page_size + self.is_bigram]) for n in range(1, pages + 1)]

    def insert(self, tokens, extra_key=None, *, evicted=0, **params):
        """Compute a prompt from scratch and insert it. Returns None if there is no room. evicted: leading pages whose
        SWA rows are freed before the insert."""
        prefixes = self.prefixes(tokens)
        length = len(prefixes) * self.page_size
        rows, slot = self.alloc(length) if length else None, self.alloc_slot() if "mamba" in self.kinds else NOTHING
        if rows is None or slot is None:
            self.tokens.free(NOTHING if rows is None else rows)
            self.slots.free(NOTHING if slot is None else slot)
            return None
        self.compute(rows, extra_key, prefixes)
        evicted = min(evicted, len(prefixes)) * self.page_size if self.swa else 0
        if evicted:
            self.swa.free_swa(rows[:evicted])
        if len(slot):
            self.pools[PoolName.MAMBA].write(slot, contents(extra_key, prefixes[-1:], "mamba"))
        key = RadixKey(tokens[: length + self.is_bigram], extra_key)
        result = self.cache.insert(InsertParams(key, rows, mamba_value=slot, swa_evicted_seqlen=evicted, **params))
        if result.mamba_exist and len(slot):
            self.slots.free(slot)
        return result

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
        return self.cache.match_prefix(MatchPrefixParams(RadixKey(tokens, extra_key), **params))

    def load_back(self, match, *, mem_quota=None, req=None):
        """Load a match back as a scheduler does: lock the device node, load, and lock the node to continue from.
        Returns (result, request, lock of that node). req: None creates a request."""
        lock = self.cache.inc_lock_ref(match.last_device_node)
        req = req or Request(f"r{len(self.requests)}", [], 0)
        req.last_node = match.last_device_node
        req.swa_host_hit_length, req.mamba_host_hit_length = match.swa_host_hit_length, match.mamba_host_hit_length
        params = InitLoadBackParams(match.best_match_node, match.host_hit_length, mem_quota, req)
        try:
            result = self.cache.init_load_back(params)
        except PoolExhaustedError:  # no slot for the state of the device node
            assert self.slots.available_size() == 0
            result = NOTHING, match.last_device_node
        held = self.cache.inc_lock_ref(result[1])
        self.cache.release(lock)
        req.last_node = None
        if req.mamba_pool_idx is not None and req not in self.requests:
            self.requests.append(req)
        return result, req, held

    def hold_on_host(self, node):
        """Protect what a transfer at the node needs on the host besides KV from eviction. Returns the release."""
        held = [(each, each.acquire_host(node)) for each in self.cache.auxiliaries]

        def release():
            for each, ticket in held:
                if ticket is not None:
                    each.release_host(node, ticket)

        return release

    def end_requests(self):
        """End the requests that own a slot, even if a load into the slot is in flight."""
        for req in self.requests:
            self.cache.cache_finished_req(req, is_insert=False)
        self.requests.clear()

    def settle_writes(self):
        """Finish backups only."""
        while self.engine.step(Lane.WRITE):
            pass
        self.cache.check_hicache_events()

    def settle(self):
        """Finish all transfers and apply their results."""
        if self.cache.cache_controller is None:
            return
        for _ in range(3):
            self.cache.ready_to_load_host_cache()
            self.engine.drain()
            self.cache.check_hicache_events()

    # --- content of the tiers ---

    def data(self, node, kind):
        return node.component_data[ComponentType[kind.upper()]]

    def node_of(self, tokens, extra_key=None):
        """Return the node that ends where this prefix ends."""
        raw = self.prefixes(tokens)[-1]
        return next(place.node for place in self.walk() if (place.extra_key, place.prefixes[-1]) == (extra_key, raw))

    def walk(self):
        raw_of: dict[TreeNode, tuple[int, ...]] = {self.cache.root_node: ()}
        for node in iter_nodes(self.cache.root_node):
            above = raw_of[node.parent]
            raw_of[node] = raw = above[: len(above) - self.is_bigram] + tuple(node.key.token_ids)
            yield Place(node, node.key.extra_key, self.prefixes(raw)[-(len(node.key) // self.page_size) :])

    def held(self, medium):
        """Return `(namespace, raw tokens)` of every acknowledged page on the tier."""
        return {
            (place.extra_key, raw)
            for place in self.walk()
            for raw in place.prefixes
            if (medium is StorageMedium.GPU and place.node.value is not None)
            or (medium is StorageMedium.CPU and place.node.host_value is not None and not is_pending(place.node))
        }

    def held_group(self, group, medium):
        """Return the same for one kind besides KV: the ends of its states, or all pages of its rows."""
        kind, field = group.partition(":")[0], {StorageMedium.GPU: "value", StorageMedium.CPU: "host_value"}.get(medium)
        found = set()
        for place in self.walk():
            data = self.data(place.node, kind)
            is_copied = medium is StorageMedium.CPU and (data.pending_id is not None or is_pending(place.node))
            if field is not None and getattr(data, field) is not None and not is_copied:
                prefixes = place.prefixes[-1:] if kind == "mamba" else place.prefixes
                found |= {(place.extra_key, raw) for raw in prefixes}
        return found

    def check(self):
        """Recount everything and check every number that is not being copied."""
        rows, slots = [], [req.mamba_pool_idx for req in self.requests]
        if self.served is not None:
            rows, slots = self.served.owned_rows(), slots + self.served.owned_slots()
        check_cache(self.cache, np.concatenate([NOTHING, *rows]), np.concatenate([NOTHING, *slots]))
        self.check_bytes()

    def check_bytes(self):
        loading = {step for node in self.cache_loads() for step in self.up(node)}
        for place in self.walk():
            if place.node not in loading:
                self._check_rows(place, "value")
            if not is_pending(place.node):
                self._check_rows(place, "host_value")

    def cache_loads(self):
        return [] if self.cache.cache_controller is None else list(self.cache.ongoing_load_back.values())

    def up(self, node):
        while node is not self.cache.root_node:
            yield node
            node = node.parent

    def _check_rows(self, place, field):
        for kind, pool in (("full", PoolName.KV), ("swa", PoolName.SWA), ("mamba", PoolName.MAMBA)):
            data = self.data(place.node, kind)
            rows = getattr(data, field)
            if rows is None or (field == "host_value" and getattr(data, "pending_id", None) is not None):
                continue
            pools, prefixes = self.pools[pool], place.prefixes[-1:] if kind == "mamba" else place.prefixes
            check = pools.check_device if field == "value" else pools.check_host
            check(rows, contents(place.extra_key, prefixes, pool.value))

    def events(self):
        """Return (kind, medium, tokens or None) of the events since the last call."""
        return [
            (type(event).__name__, getattr(event, "medium", None), getattr(event, "token_ids", None))
            for event in self.cache.take_events()
        ]


def contents(extra_key, prefixes, kind):
    """Return one number per page, or for the state at its end."""
    return np.array([content(extra_key, raw, kind) for raw in prefixes], np.int64)


def is_pending(node):
    return node.write_through_pending_id is not None
