"""Ten thousand operations on a cache with one tier and little room: requests, inserts, locks and evictions.

Every row and every slot records the tokens that it was computed from, so that a page or a state under a wrong prefix is
detected. Caches with several tiers have their own soaks.
"""

from typing import Any

import numpy as np
import pytest

from engine_cache import (
    EvictParams,
    InsertParams,
    MambaRadixCache,
    MambaSlotAllocator,
    MatchPrefixParams,
    PagedTokenToKVPoolAllocator,
    PoolExhaustedError,
    RadixCache,
    RadixKey,
    ReqToTokenPool,
    Request,
)
from engine_cache.tree.node import TreeNode, iter_nodes
from tests.support.caches.cache_machine import CacheMachine, operation, soak
from tests.support.caches.checks import check_cache

OPERATIONS = 10_000
POOL_PAGES, SLOTS = 20, 7
NOTHING = np.empty(0, np.int64)


class Contents(dict[int, Any]):
    """Row or slot -> namespace and the tokens that it was computed from."""

    def copy_from(self, src, dst):
        self[int(dst[0])] = self[int(src[0])]


class RadixSoak(CacheMachine):
    def begin(self, page_size=2, is_eagle=False, **options):
        self.pool = PagedTokenToKVPoolAllocator(POOL_PAGES * page_size, page_size)
        self.lines = ReqToTokenPool(1, 64)
        self.rows, self.num_served, self.num_evicted = Contents(), 0, 0
        self.cache = self.make_cache(
            page_size=page_size,
            allocator=self.pool,
            req_to_token_pool=self.lines,
            enable_kv_cache_events=True,
            is_eagle=is_eagle,
            **options,
        )
        self.watch(page_size, is_bigram=is_eagle, events=True)

    def make_cache(self, **options):
        return RadixCache(**options)

    def walk(self):
        """Yield every node with the prefixes at the ends of its pages."""
        raw_of: dict[TreeNode, tuple[int, ...]] = {self.cache.root_node: ()}
        for node in iter_nodes(self.cache.root_node):
            above, extra_key = raw_of[node.parent], node.key.extra_key
            raw_of[node] = raw = above[: len(above) - self.is_bigram] + tuple(node.key.token_ids)
            yield node, self.names.prefixes(raw, extra_key)[-(len(node.key) // self.page_size) :]

    def held(self, medium):
        return {prefix for _, prefixes in self.walk() for prefix in prefixes}

    def check(self):
        check_cache(self.cache, NOTHING)
        for node, prefixes in self.walk():
            self.check_rows(node.value, prefixes)

    def check_rows(self, rows, prefixes):
        assert len(rows) == len(prefixes) * self.page_size
        for row, prefix in zip(rows.tolist(), np.repeat(np.arange(len(prefixes)), self.page_size), strict=True):
            assert self.rows[row] == prefixes[prefix]

    # --- room ---

    def alloc(self, num_rows):
        rows = self.pool.alloc(num_rows)
        if rows is None:
            self.evicted(EvictParams(num_rows - self.pool.available_size()))
            rows = self.pool.alloc(num_rows)
        return rows

    def evicted(self, params):
        free = self.pool.available_size()
        result = self.cache.evict(params)
        assert self.pool.available_size() - free == result.num_tokens_evicted
        self.num_evicted += result.num_tokens_evicted
        return result

    def compute(self, prefixes):
        """Return rows for the last page of each prefix, or None without room."""
        rows = self.alloc(len(prefixes) * self.page_size)
        if rows is not None:
            self.rows.update(
                zip(rows.tolist(), [each for each in prefixes for _ in range(self.page_size)], strict=True)
            )
        return rows

    def match(self, tokens, extra_key, **params):
        """Match a key and check that the matched rows were computed from its tokens."""
        match = self.cache.match_prefix(MatchPrefixParams(RadixKey(tokens, extra_key), **params))
        prefixes = self.names.prefixes(tokens, extra_key)
        self.check_rows(match.device_indices, prefixes[: len(match.device_indices) // self.page_size])
        return match

    # --- operations ---

    @operation(weight=4)
    def insert(self, draw):
        tokens, extra_key = self.prompt(draw)
        rows = self.compute(self.names.prefixes(tokens, extra_key))
        if rows is not None:
            tail = np.zeros(max(0, len(tokens) - len(rows)), np.int64)
            params = InsertParams(RadixKey(tokens, extra_key), np.concatenate((rows, tail)))
            self.pool.free(rows[: self.cache.insert(params).prefix_len])

    @operation(weight=2)
    def look(self, draw):
        tokens, extra_key = self.prompt(draw)
        match = self.match(tokens, extra_key)
        held = self.held(None)
        assert len(match.device_indices) == self.page_size * len(held & set(self.names.prefixes(tokens, extra_key)))

    @operation(weight=2)
    def lock_or_unlock(self, draw):
        if len(self.locks) > draw.randrange(3):
            self.cache.dec_lock_ref(self.locks.pop(draw.randrange(len(self.locks))))
        else:
            node = self.match(*self.prompt(draw)).last_device_node
            self.cache.inc_lock_ref(node)
            self.locks.append(node)

    @operation()
    def evict(self, draw):
        self.evicted(EvictParams(draw.randrange(9)))

    @operation(weight=4)
    def serve(self, draw):
        """Run a request from its match to its end. It may fail for lack of room."""
        tokens, extra_key = self.prompt(draw)
        req = Request("r", [], self.lines.alloc(), extra_key)
        if self.started(req, tokens) and self.grown(req, tokens, draw):
            self.num_served += 1
        self.cache.cache_finished_req(req, is_insert=draw.random() < 0.9)
        self.lines.free(req.req_pool_idx)

    def started(self, req, tokens):
        match = self.match(tokens, req.extra_key)
        self.take(req, match)
        req.token_ids = tokens[: len(match.device_indices)]
        return True

    def take(self, req, match):
        self.cache.inc_lock_ref(match.last_device_node)
        req.last_node, req.cache_protected_len = match.last_device_node, len(match.device_indices)
        self.lines.write(req.req_pool_idx, 0, match.device_indices)

    def grown(self, req, tokens, draw):
        """Compute the rest of a prompt and insert all or part of it."""
        done = req.cache_protected_len
        prefixes = self.names.prefixes(tokens, req.extra_key)
        rows, tail = self.compute(prefixes[done // self.page_size :]), self.pool.alloc(0)
        if rows is not None:
            tail = self.alloc(-(-(len(tokens) - done - len(rows)) // self.page_size) * self.page_size)
        if rows is None or tail is None:
            self.pool.free(NOTHING if rows is None else rows)
            return False
        self.lines.write(req.req_pool_idx, done, np.concatenate((rows, tail))[: len(tokens) - done])
        req.token_ids = tokens
        self.computed(req, prefixes)
        if draw.random() < 0.5:
            self.cache.cache_unfinished_req(req, chunked=draw.random() < 0.5)
        return True

    def computed(self, req, prefixes):
        """As the base class, including the state after the last page of the request."""

    def teardown(self):
        for node in self.locks:
            self.cache.dec_lock_ref(node)
        self.evicted(EvictParams(POOL_PAGES * self.page_size))
        assert self.pool.available_size() == self.pool.size
        self.check_events()
        assert self.held(None) == set()


class MambaSoak(RadixSoak):
    def make_cache(self, **options):
        self.slots, self.states = MambaSlotAllocator(SLOTS), Contents()
        return MambaRadixCache(
            mamba_allocator=self.slots,
            mamba_pool=self.states,
            enable_mamba_extra_buffer=True,
            mamba_cache_chunk_size=2,
            **options,
        )

    def check(self):
        super().check()
        check_cache(self.cache, NOTHING, NOTHING)
        for node, prefixes in self.walk():
            if node.mamba_value is not None:
                assert self.states[int(node.mamba_value[0])] == prefixes[-1]

    def slot_of(self, prefix):
        """Return a slot with the state after a prefix, or None without room."""
        slot = self.slots.alloc(1)
        if slot is None:
            self.evicted(EvictParams(0, mamba_num=1))
            slot = self.slots.alloc(1)
        if slot is not None:
            self.states[int(slot[0])] = prefix
        return slot

    @operation(weight=4)
    def insert(self, draw):
        tokens, extra_key = self.prompt(draw)
        prefixes = self.names.prefixes(tokens, extra_key)
        rows = self.compute(prefixes)
        slot = self.slot_of(prefixes[-1]) if prefixes and rows is not None else None
        if slot is None:
            self.pool.free(NOTHING if rows is None else rows)
            return
        key = RadixKey(prefixes[-1][1], extra_key)
        if self.cache.insert(InsertParams(key, rows, mamba_value=slot)).mamba_exist:
            self.slots.free(slot)

    @operation(weight=2)
    def look(self, draw):
        tokens, extra_key = self.prompt(draw)
        match = self.match(tokens, extra_key)
        held, states = self.held(None), {prefixes[-1] for node, prefixes in self.walk() if node.mamba_value is not None}
        ends = [i for i, prefix in enumerate(self.names.prefixes(tokens, extra_key), 1) if prefix in held & states]
        assert len(match.device_indices) == self.page_size * max(ends, default=0)

    @operation()
    def evict(self, draw):
        self.evicted(EvictParams(draw.randrange(9), mamba_num=draw.randrange(3)))

    def evicted(self, params):
        free = self.slots.available_size()
        result = super().evicted(params)
        assert self.slots.available_size() - free == result.mamba_num_evicted
        return result

    def started(self, req, tokens):
        try:
            match = self.match(tokens, req.extra_key, cow_mamba=True, req=req)
        except PoolExhaustedError:
            return False
        self.take(req, match)
        req.token_ids = tokens[: len(match.device_indices)]
        if req.mamba_cow_src_index is not None:
            self.states.copy_from(req.mamba_cow_src_index, req.mamba_pool_idx)
            done = len(match.device_indices) // self.page_size
            assert self.states[int(req.mamba_pool_idx[0])] == self.names.prefixes(tokens, req.extra_key)[done - 1]
        return True

    def computed(self, req, prefixes):
        slot = self.slot_of(prefixes[-1]) if prefixes else None
        if slot is not None:
            req.mamba_track_idx, req.mamba_last_track_seqlen = slot, len(prefixes) * self.page_size


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["lru", "mru", "slru"])
def test_ten_thousand_operations_on_a_radix_cache_leave_everything_in_order(policy):
    machine = RadixSoak()
    machine.begin(eviction_policy=policy, is_eagle=policy == "slru")
    soak(machine, OPERATIONS, seed=policy)
    assert machine.num_served > 1000
    assert machine.num_evicted > 1000


@pytest.mark.soak
@pytest.mark.parametrize(("page_size", "is_eagle"), [(1, False), (2, False), (2, True)])
def test_ten_thousand_operations_on_a_mamba_cache_leave_everything_in_order(page_size, is_eagle):
    machine = MambaSoak()
    machine.begin(page_size, is_eagle)
    soak(machine, OPERATIONS, seed=page_size + is_eagle)
    assert machine.num_served > 1000
    assert machine.num_evicted > 1000
