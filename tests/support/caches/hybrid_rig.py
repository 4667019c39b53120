"""`tier_rig.Rig` for a model with recurrent layers: a HiMambaRadixCache, states with real tensors, and whole requests.

Layers 0 and 2 are Mamba, layers 1 and 3 attention. Like the content of a row, the content of a state is computed from
the tokens up to the end of its page.
"""

from __future__ import annotations

import numpy as np
import torch

from engine_cache import (
    ComponentType,
    EvictParams,
    HiMambaRadixCache,
    HostPoolGroup,
    HybridCacheController,
    InitLoadBackParams,
    InsertParams,
    Lane,
    MambaSlotAllocator,
    ManualCopyEngine,
    MatchPrefixParams,
    PoolEntry,
    PoolExhaustedError,
    RadixKey,
    ReqToTokenPool,
    Request,
)
from engine_cache.pools.host import MambaPoolHost
from engine_cache.pools.mamba import MambaPool
from engine_cache.storage.base import PoolName
from kv_events.schema import StorageMedium
from tests.support.caches.checks import check_cache
from tests.support.caches.tier_rig import Rig, page_content

MAMBA_LAYERS = {0: 0, 2: 1}
FULL_LAYERS = {1: 0, 3: 1}
NOTHING = np.empty(0, np.int64)


class FaultyStates(MambaPoolHost):
    """A host pool whose copies fail on demand."""

    write_faults = 0

    def backup_from_device_all_layer(self, device_pool, host_indices, device_indices):
        if self.write_faults:
            self.write_faults -= 1
            raise RuntimeError("injected write fault of a state")
        super().backup_from_device_all_layer(device_pool, host_indices, device_indices)


class HybridRig(Rig):
    """Pools of `device_pages` and `host_pages` pages and `slots` and `host_slots` states, and a cache on them."""

    def __init__(self, *, slots=5, host_slots=7, layout="layer_first", **options):
        self.slots = MambaSlotAllocator(slots)
        self.states = MambaPool(
            slots, len(MAMBA_LAYERS), [(2,)], (1,), conv_dtype=torch.int32, temporal_dtype=torch.int64
        )
        ratio = (host_slots - 0.5) / slots
        self.host_states = FaultyStates(self.states, ratio=ratio, layout=layout, reserve_bytes=0)
        assert self.host_states.size == host_slots
        self.lines = ReqToTokenPool(2, 64)
        self.loaded = {}  # request -> (node, content of its slot after the node is loaded)
        super().__init__(layout=layout, **options)

    def make_controller(self):
        group = HostPoolGroup.of(
            PoolEntry(PoolName.KV, self.host, self.device, self.pool, FULL_LAYERS.get),
            PoolEntry(PoolName.MAMBA, self.host_states, self.states, self.slots, MAMBA_LAYERS.get),
        )
        return HybridCacheController(group, self.engine, transfer_layer_num=4)

    def make_cache(self, **options):
        return HiMambaRadixCache(
            mamba_allocator=self.slots,
            mamba_pool=self.states,
            req_to_token_pool=self.lines,
            enable_mamba_extra_buffer=True,
            mamba_cache_chunk_size=2,
            **options,
        )

    # --- operations of an engine ---

    def insert(self, tokens, extra_key=None, **params):
        """Compute a prompt and insert it with a state at its end. Returns None if the device has no room."""
        prefixes = self.prefixes(tokens)
        length = len(prefixes) * self.page_size
        if not length:
            return None
        rows, slot = self.alloc(length), self.alloc_slot()
        if rows is None or slot is None:
            self.pool.free(NOTHING if rows is None else rows)
            self.slots.free(NOTHING if slot is None else slot)
            return None
        self.compute(rows, extra_key, prefixes)
        self.write_state(slot, page_content(extra_key, prefixes[-1]))
        key = RadixKey(tokens[: length + self.is_bigram], extra_key)
        result = self.cache.insert(InsertParams(key, rows, mamba_value=slot, **params))
        if result.mamba_exist:
            self.slots.free(slot)
        return result

    def alloc(self, length):
        rows = self.pool.alloc(length)
        if rows is None:
            self.cache.evict(EvictParams(length))
            rows = self.pool.alloc(length)
        return rows

    def alloc_slot(self):
        slot = self.slots.alloc(1)
        if slot is None:
            self.cache.evict(EvictParams(0, mamba_num=1))
            slot = self.slots.alloc(1)
        return slot

    def serve(self, tokens, extra_key=None):
        """Run a request from its match to its end: load and use what is cached on any tier and compute the rest.
        Returns the number of leading tokens that were not computed, or None if there was no room."""
        line = self.lines.alloc()
        req = Request("r", [], line, extra_key)
        try:
            have = self._begin(req, tokens)
            if req.mamba_pool_idx is None:
                self.cache.cache_finished_req(req, is_insert=False)
                return None
            self._finish(req, tokens)
        finally:
            self.lines.free(line)
        return have

    def _begin(self, req, tokens):
        key = RadixKey(tokens, req.extra_key)
        try:
            match = self.cache.match_prefix(MatchPrefixParams(key, cow_mamba=True, req=req))
        except PoolExhaustedError:
            return 0
        node, rows = match.last_device_node, match.device_indices
        req.last_node = self.cache.inc_lock_ref(node).node
        if match.host_hit_length or match.mamba_host_hit_length:
            params = InitLoadBackParams(match.best_match_node, match.host_hit_length, req=req)
            try:
                fresh, node = self.cache.init_load_back(params)
            except PoolExhaustedError:
                return 0
            rows = np.concatenate((rows, fresh))
            if node is not match.best_match_node:
                rows = rows[: sum(len(step.key) for step in self.up(node))]
        self.cache.inc_lock_ref(node)
        self.cache.dec_lock_ref(match.last_device_node)
        req.last_node, req.cache_protected_len = node, len(rows)
        req.token_ids = tokens[: len(rows)]
        self.lines.write(req.req_pool_idx, 0, rows)
        self.run_loads()
        self._start_from(req, len(rows))
        return len(rows)

    def _start_from(self, req, length):
        """Give the request a slot, if it has none, with the state after `length` tokens."""
        if req.mamba_pool_idx is None:
            req.mamba_pool_idx = self.alloc_slot()
        elif length == 0:
            return
        if req.mamba_pool_idx is not None and req.mamba_cow_src_index is not None:
            self.states.copy_from(req.mamba_cow_src_index, req.mamba_pool_idx)
        raw = tuple(req.token_ids)
        if req.mamba_pool_idx is not None and length and not self.is_bigram:
            self.check_state(self.states.mamba_cache, req.mamba_pool_idx, page_content(req.extra_key, raw))

    def _finish(self, req, tokens):
        start = req.cache_protected_len
        pages = -(-(len(tokens) - start) // self.page_size)
        rows = self.alloc(pages * self.page_size)
        tracked = len(self.prefixes(tokens)) * self.page_size
        slot = None if rows is None else self.alloc_slot()
        if rows is not None:
            prefixes = self.prefixes(tokens)[start // self.page_size :]
            self.compute(rows[: len(prefixes) * self.page_size], req.extra_key, prefixes)
            self.lines.write(req.req_pool_idx, start, rows[: len(tokens) - start])
            req.token_ids = tokens
            if slot is not None and prefixes:
                self.write_state(slot, page_content(req.extra_key, prefixes[-1]))
                req.mamba_track_idx, req.mamba_last_track_seqlen = slot, tracked
            elif slot is not None:
                self.slots.free(slot)
        if len(req.token_ids) % 2:
            self.cache.cache_unfinished_req(req)
        self.cache.cache_finished_req(req)

    def load_back(self, tokens, extra_key=None, *, with_request=False, **params):
        """Load the host part of a match back, as a scheduler does. Returns None if there is none."""
        match = self.match(tokens, extra_key)
        if not (match.host_hit_length or match.mamba_host_hit_length):
            return None
        req = Request(f"r{len(self.loaded)}", [], 0, extra_key) if with_request else None
        load = InitLoadBackParams(match.best_match_node, match.host_hit_length, req=req, **params)
        rows, node = self.cache.init_load_back(load)
        if req is not None and req.mamba_pool_idx is not None:
            raw = next(prefixes[-1] for held, _, prefixes in self.walk() if held is node)
            self.loaded[req] = (node, page_content(extra_key, raw))
            if req.mamba_cow_src_index is not None:
                self.run_loads()  # one of them may be that of the state
                self.states.copy_from(req.mamba_cow_src_index, req.mamba_pool_idx)
        return rows, node

    def end_request(self):
        """End the request that was loaded first, even if a load into its slot is in flight."""
        req = next(iter(self.loaded))
        del self.loaded[req]
        self.cache.cache_finished_req(req, is_insert=False)

    def run_loads(self):
        self.cache.ready_to_load_host_cache()
        if isinstance(self.engine, ManualCopyEngine):
            while self.engine.step(Lane.LOAD):
                pass
        else:
            self.engine.drain()

    def up(self, node):
        path = []
        while node is not self.cache.root_node:
            path.append(node)
            node = node.parent
        return path

    # --- content of the tiers ---

    def state_ends(self):
        """Return (namespace, raw tokens) of every prefix with a state, for the device and for the host."""
        nodes = [(node, (extra_key, prefixes[-1])) for node, extra_key, prefixes in self.walk()]
        return (
            {end for node, end in nodes if node.mamba_value is not None},
            {end for node, end in nodes if node.mamba_host_value is not None},
        )

    def usable_states(self, medium):
        """Like `state_ends` for one medium; on the host, acknowledged states only."""
        on_device, on_host = self.state_ends()
        pending = {
            (extra_key, prefixes[-1])
            for node, extra_key, prefixes in self.walk()
            if node.auxiliary(ComponentType.MAMBA).pending_id is not None or node.write_through_pending_id is not None
        }
        return {StorageMedium.GPU: on_device, StorageMedium.CPU: on_host - pending}.get(medium, set())

    def write_state(self, slot, content):
        for tensor, values in self._tensors(self.states.mamba_cache, content):
            tensor[:, slot] = values

    def check_state(self, cache, slot, content):
        for tensor, values in self._tensors(cache, content):
            assert torch.equal(tensor[:, slot], values)

    def _tensors(self, cache, content):
        """Return tensors (layers, slots, ...) and the content of a state in each, (layers, 1, ...)."""
        layers = torch.arange(len(MAMBA_LAYERS)).view(-1, 1, 1)
        small = (content // 16 % 2**30 + layers).to(torch.int32)
        return zip(cache.tensors(), [content + layers, torch.cat((small, -small), dim=2)], strict=True)

    def check_bytes(self):
        super().check_bytes()
        loading = {step for node in self.cache.ongoing_load_back.values() for step in self.up(node)}
        copied = {backup.node for backup in self.cache.ongoing_write_through.values()}
        for node, extra_key, prefixes in self.walk():
            content = page_content(extra_key, prefixes[-1])
            if node.mamba_value is not None and node not in loading:
                self.check_state(self.states.mamba_cache, node.mamba_value, content)
            if node.mamba_host_value is not None and node not in copied:
                self.check_state(_HostStates(self.host_states), node.mamba_host_value, content)
        for req, (node, content) in self.loaded.items():
            if node not in self.cache.ongoing_load_back.values():
                self.check_state(self.states.mamba_cache, req.mamba_pool_idx, content)

    def _check_cache(self):
        check_cache(self.cache, NOTHING, np.concatenate([NOTHING, *(req.mamba_pool_idx for req in self.loaded)]))


class _HostStates:
    """The tensors of a host pool in the shape of the device tensors."""

    def __init__(self, pool):
        self._pool = pool

    def tensors(self):
        held = self._pool.get_hybrid_pool_buffer()
        return held if self._pool.layout == "layer_first" else [tensor.squeeze(2).transpose(0, 1) for tensor in held]
