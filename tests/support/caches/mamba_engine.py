"""A MambaRadixCache with a simulated engine, without torch, and a reference for its eviction.

Each row and each slot records the tokens it was computed from, so that a state or page under a wrong prefix is found.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine_cache import (
    EvictParams,
    MambaRadixCache,
    MambaSlotAllocator,
    MatchPrefixParams,
    PagedTokenToKVPoolAllocator,
    PoolExhaustedError,
    RadixKey,
    ReqToTokenPool,
    Request,
)
from engine_cache.tree.node import iter_nodes
from tests.models.cache_checks import check_cache

CHUNK = 4


class Contents(dict[int, Any]):
    """Maps a slot to the tokens that its state was computed from."""

    def copy_from(self, src, dst):
        self[int(dst[0])] = self[int(src[0])]


class Hybrid:
    """A cache, its pools, and a simulated engine, which writes tokens as the content of rows and states."""

    def __init__(self, page_size, is_bigram, extra_buffer, events=False, pages=20, slots=7, lines=4):
        self.page_size, self.is_bigram, self.extra_buffer = page_size, is_bigram, extra_buffer
        self.pool = PagedTokenToKVPoolAllocator(pages * page_size, page_size)
        self.slots = MambaSlotAllocator(slots)
        self.lines = ReqToTokenPool(lines, 128)
        self.row_of, self.state_of = {}, Contents()
        self.requests = []
        self.cache = MambaRadixCache(
            page_size=page_size,
            mamba_allocator=self.slots,
            mamba_pool=self.state_of,
            allocator=self.pool,
            req_to_token_pool=self.lines,
            enable_mamba_extra_buffer=extra_buffer,
            mamba_cache_chunk_size=CHUNK,
            enable_kv_cache_events=events,
            emit_group_events=events,
            is_eagle=is_bigram,
        )

    def write_rows(self, rows, start, tokens, extra_key):
        for position, row in enumerate(rows.tolist(), start):
            self.row_of[row] = (extra_key, tuple(tokens[: position + 1]))

    def alloc_slot(self, extra_key, tokens):
        slot = self.slots.alloc(1)
        if slot is not None:
            self.state_of[int(slot[0])] = (extra_key, tuple(tokens))
        return slot

    def begin(self, tokens, extra_key):
        line = self.lines.alloc()
        if line is None:
            return
        req = Request("r", [], line, extra_key)
        try:
            match = self.cache.match_prefix(MatchPrefixParams(RadixKey(tokens, extra_key), cow_mamba=True, req=req))
        except PoolExhaustedError:
            assert self.slots.available_size() == 0
            self.lines.free(line)
            return
        self.cache.inc_lock_ref(match.last_device_node)
        req.last_node, req.cache_protected_len = match.last_device_node, len(match.device_indices)
        req.token_ids = tokens[: req.cache_protected_len]
        self.lines.write(line, 0, match.device_indices)
        if req.mamba_cow_src_index is None:
            req.mamba_pool_idx = self.alloc_slot(extra_key, ())
        else:
            self.state_of.copy_from(req.mamba_cow_src_index, req.mamba_pool_idx)
        self.requests.append(req)
        if req.mamba_pool_idx is None:
            self.finish(req, is_insert=False)
            return
        assert self.state_of[int(req.mamba_pool_idx[0])] == (extra_key, tuple(req.token_ids))
        self.grow(req, tokens[req.cache_protected_len :])

    def grow(self, req, new):
        """Compute more tokens and track a state if the cache asks for one."""
        page, have, tokens = self.page_size, len(req.token_ids), [*req.token_ids, *new]
        need = (-(-len(tokens) // page) - -(-have // page)) * page
        fresh = self.pool.alloc(need)
        if fresh is None:
            self.cache.evict(EvictParams(need))
            fresh = self.pool.alloc(need)
        if fresh is None:
            return
        last = self.lines.read(req.req_pool_idx, have)[-1:] if have % page else np.empty(0, np.int64)
        rest = last + np.arange(1, (-have % page) + 1) if len(last) else last
        rows = np.concatenate((rest, fresh))[: len(new)]
        self.write_rows(rows, have, tokens, req.extra_key)
        self.lines.write(req.req_pool_idx, have, rows)
        req.token_ids = tokens
        self.state_of[int(req.mamba_pool_idx[0])] = (req.extra_key, tuple(tokens))
        tracked = len(tokens) // page * page
        if self.extra_buffer and tracked > have:
            if req.mamba_track_idx is None:
                req.mamba_track_idx = self.alloc_slot(req.extra_key, ())
            if req.mamba_track_idx is not None:
                req.mamba_last_track_seqlen = tracked
                self.state_of[int(req.mamba_track_idx[0])] = (req.extra_key, tuple(tokens[:tracked]))

    def finish(self, req, is_insert):
        self.requests.remove(req)
        self.cache.cache_finished_req(req, is_insert=is_insert)
        self.lines.free(req.req_pool_idx)

    def check(self):
        slots = [
            slot for req in self.requests for slot in (req.mamba_pool_idx, req.mamba_track_idx) if slot is not None
        ]
        rows = [self.lines.read(r.req_pool_idx, len(r.token_ids))[r.cache_protected_len :] for r in self.requests]
        nothing = [np.empty(0, np.int64)]
        check_cache(self.cache, np.concatenate(rows + nothing), np.concatenate(slots + nothing))


def evicted_by_hand(cache, num_tokens, num_states):
    """Return the ids of the remaining nodes and of those with a state, if both kinds are evicted oldest first."""
    left = {node.id: node for node in iter_nodes(cache.root_node)}
    states = {node.id for node in left.values() if node.mamba_value is not None}
    depth = {cache.root_node.id: 0}
    for node in left.values():
        depth[node.id] = depth[node.parent.id] + 1
    age = lambda i: (left[i].last_access_time, depth[i])  # noqa: E731
    parents = lambda: {node.parent.id for node in left.values()}  # noqa: E731
    free_leaves = lambda: [i for i in left if i not in parents() and left[i].lock_ref == 0]  # noqa: E731

    def delete(leaf):
        states.discard(leaf)
        tokens = len(left.pop(leaf).key)
        while orphans := [i for i in free_leaves() if i not in states]:
            tokens += len(left.pop(orphans[0]).key)
        return tokens

    while num_tokens > 0 and free_leaves():
        num_tokens -= delete(min(free_leaves(), key=age))
    while num_states > 0 and (free := [i for i in states if left[i].mamba_lock_ref == 0]):
        oldest = min(free, key=age)
        num_states -= 1
        if oldest in parents():
            states.discard(oldest)
        else:
            delete(oldest)
    return set(left), states
