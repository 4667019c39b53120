"""MambaRadixCache under random requests, inserts, locks and evictions, with little room.

Three oracles. Contents: every row and every slot records the tokens that it was computed from. A model: the prefixes
with KV and those with a state. Eviction: repeated on a copy of the tree. After every operation the tree is recounted
and the events are replayed.
"""

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import settings

from engine_cache import EvictParams, InsertParams, MatchPrefixParams, RadixKey
from engine_cache.tree.node import TreeNode, iter_nodes
from kv_events.schema import StorageMedium
from tests.support.caches.cache_machine import CacheMachine, operation, soak
from tests.support.caches.mamba_engine import CHUNK, Hybrid, evicted_by_hand
from tests.support.effort import num_examples


def has_request(machine):
    return bool(machine.engine.requests)


class MambaCacheMachine(CacheMachine):
    OPTIONS: ClassVar = {
        "page_size": (1, 1, 2, 3),
        "is_bigram": (False, True),
        "extra_buffer": (False, True),
        "events": (True, True, False),
    }

    def begin(self, page_size, is_bigram, extra_buffer, events=True):  # type: ignore[override]
        extra_buffer |= page_size > 1 or is_bigram
        self.engine = Hybrid(page_size, is_bigram, extra_buffer, events)
        self.cache = self.engine.cache
        self.pages, self.states = set(), set()  # (namespace, raw tokens of a prefix of whole pages)
        self.watch(page_size, is_bigram=is_bigram, events=events)

    # --- the model ---

    def held(self, medium):
        return self.pages

    def held_group(self, group, medium):
        return self.states if medium is StorageMedium.GPU else set()

    def num_held(self, prefixes):
        return next((i for i, prefix in enumerate(prefixes) if prefix not in self.pages), len(prefixes))

    def num_usable(self, prefixes):
        held = self.num_held(prefixes)
        return next((i for i in range(held, 0, -1) if prefixes[i - 1] in self.states), 0)

    def walk(self):
        """Return the prefixes with KV and those with a state. Checks that their contents were computed from them."""
        raw_of: dict[TreeNode, tuple[int, ...]] = {self.cache.root_node: ()}
        held, states = set(), set()
        for node in iter_nodes(self.cache.root_node):
            above, extra_key = raw_of[node.parent], node.key.extra_key
            raw_of[node] = raw = above[: len(above) - self.is_bigram] + tuple(node.key.token_ids)
            units = len(raw) - self.is_bigram
            held |= set(self.names.prefixes(raw, extra_key)[-(len(node.key) // self.page_size) :])
            for end, row in enumerate(node.value.tolist(), units - len(node.key) + 1):
                assert self.engine.row_of[row] == (extra_key, raw[:end])
            if node.mamba_value is not None:
                states.add((extra_key, raw))
                assert self.engine.state_of[int(node.mamba_value[0])] == (extra_key, raw[:units])
        return held, states

    def settle(self, new=(), gone=True):
        """Update the model after an operation that added `new`, with a state at its end, and may have evicted."""
        held, states = self.walk()
        assert held <= self.pages | set(new)
        assert states <= self.states | set(new[-1:])
        assert set(new) <= held
        assert set(new[-1:]) <= states
        assert gone or (held, states) == (self.pages | set(new), self.states | set(new[-1:]))
        self.pages, self.states = held, states

    # --- bare operations ---

    @operation()
    def insert(self, draw):
        (tokens, extra_key), reuse = self.prompt(draw), draw.random() < 0.5
        prefixes = self.names.prefixes(tokens, extra_key)
        length = len(prefixes) * self.page_size
        key = RadixKey(tokens[: length + self.is_bigram] if length else [], extra_key)
        own = self.cache.match_prefix(MatchPrefixParams(key)).device_indices if reuse else np.empty(0, np.int64)
        rows, slot = self.engine.pool.alloc(length - len(own)), self.engine.alloc_slot(extra_key, tokens[:length])
        if rows is None or slot is None:
            self.engine.pool.free(np.empty(0, np.int64) if rows is None else rows)
            self.engine.slots.free(np.empty(0, np.int64) if slot is None else slot)
            return
        self.engine.write_rows(rows, len(own), tokens, extra_key)
        value = np.concatenate((own, rows))
        params = InsertParams(key, value, draw.random() < 0.5, mamba_value=slot, prev_prefix_len=len(own))
        result = self.cache.insert(params)
        exists = not prefixes or prefixes[-1] in self.states
        assert result == (self.num_held(prefixes) * self.page_size, length, exists)
        if exists:
            self.engine.slots.free(slot)
        self.settle(prefixes, gone=False)

    @operation()
    def match(self, draw):
        tokens, extra_key = self.prompt(draw)
        prefixes = self.names.prefixes(tokens, extra_key)
        result = self.cache.match_prefix(MatchPrefixParams(RadixKey(tokens, extra_key)))
        usable = self.num_usable(prefixes) * self.page_size
        matched = self.num_held(prefixes) * self.page_size
        assert len(result.device_indices) == usable
        for end, row in enumerate(result.device_indices.tolist(), 1):
            assert self.engine.row_of[row] == (extra_key, tuple(tokens[:end]))
        assert result.last_device_node is result.last_host_node is result.best_match_node
        assert result.mamba_branching_seqlen == (matched // CHUNK * CHUNK or None if matched > usable else None)
        self.settle(gone=False)

    @operation(when=lambda machine: machine.pages and len(machine.locks) < 3)
    def lock(self, draw):
        """Return any node, including tombstones."""
        node = draw.choice(list(iter_nodes(self.cache.root_node)))
        before = self.cache.protected_size()
        assert self.cache.inc_lock_ref(node).delta == before - self.cache.protected_size()
        self.locks.append(node)

    @operation(when=lambda machine: machine.locks)
    def unlock(self, draw):
        states, before = set(self.states), self.cache.protected_size()
        node = self.locks.pop(draw.randrange(len(self.locks)))
        assert self.cache.dec_lock_ref(node).delta == before - self.cache.protected_size()
        self.settle()
        assert self.states == states

    @operation(when=lambda machine: len(machine.pages) > 5)
    def evict(self, draw):
        num_tokens, num_states = draw.randrange(6), draw.randrange(3)
        nodes, states = evicted_by_hand(self.cache, num_tokens, num_states)
        held_before, states_before = len(self.pages), len(self.states)
        result = self.cache.evict(EvictParams(num_tokens, mamba_num=num_states))
        left = list(iter_nodes(self.cache.root_node))
        assert {node.id for node in left} == nodes
        assert {node.id for node in left if node.mamba_value is not None} == states
        self.settle()
        assert result.num_tokens_evicted == (held_before - len(self.pages)) * self.page_size
        assert result.mamba_num_evicted == states_before - len(self.states)

    @operation(when=lambda machine: len(machine.pages) > 14 and not machine.engine.requests)
    def reset(self, draw):
        self.cache.reset()
        self.engine.pool.clear()
        self.engine.slots.clear()
        self.pages, self.states, self.locks = set(), set(), []

    # --- requests ---

    @operation()
    def begin_a_request(self, draw):
        self.engine.begin(*self.prompt(draw))
        self.settle()

    @operation(when=has_request)
    def grow(self, draw):
        new = [draw.randrange(2) for _ in range(draw.randrange(1, 5))]
        self.engine.grow(draw.choice(self.engine.requests), new)
        self.settle()

    def to_share(self, req):
        """Return the prefixes up to the request's own state, if that is beyond the shared part."""
        length = req.mamba_last_track_seqlen or 0 if self.engine.extra_buffer else len(req.token_ids)
        prefixes = self.names.prefixes(req.token_ids[: length + self.is_bigram], req.extra_key)
        complete = len(prefixes) * self.page_size == length
        return prefixes if complete and length > req.cache_protected_len else []

    @operation(when=has_request)
    def share(self, draw):
        req = draw.choice(self.engine.requests)
        wanted, free = self.to_share(req), self.engine.slots.available_size()
        room = free + self.cache.states.evictable_size > 0
        self.cache.cache_unfinished_req(req, chunked=draw.random() < 0.5)
        assert req.prefix_indices.tolist() == self.engine.lines.read(req.req_pool_idx, len(req.token_ids)).tolist()
        self.settle(wanted if room else [], gone=free == 0)
        if wanted and room:
            assert req.cache_protected_len == len(wanted) * self.page_size
        for end, row in enumerate(req.prefix_indices.tolist(), 1):
            assert self.engine.row_of[row] == (req.extra_key, tuple(req.token_ids[:end]))

    @operation(when=has_request)
    def finish(self, draw):
        req, is_insert = draw.choice(self.engine.requests), draw.random() < 0.7
        wanted = self.to_share(req) if is_insert else []
        self.engine.finish(req, is_insert)
        self.settle(wanted, gone=False)
        assert req.mamba_pool_idx is None
        assert req.last_node is None

    # --- invariants --------------

    def check(self):
        self.engine.check()
        assert self.walk() == (self.pages, self.states)
        held = [*self.locks, *(req.last_node for req in self.engine.requests)]
        for node in iter_nodes(self.cache.root_node):
            assert node.mamba_lock_ref == sum(lock is node for lock in held)
            assert node.lock_ref == node.mamba_lock_ref + sum(child.lock_ref for child in node.children.values())
            assert self.events or node.hash_value is None


TestMambaCache = MambaCacheMachine.TestCase
TestMambaCache.settings = settings(max_examples=num_examples(150), stateful_step_count=40)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("page_size", "is_bigram", "extra_buffer"), [(1, False, False), (1, False, True), (2, False, True), (2, True, True)]
)
def test_the_promises_hold_through_2500_operations(page_size, is_bigram, extra_buffer):
    """The pools stay full and several requests are in flight."""
    machine = MambaCacheMachine()
    machine.begin(page_size, is_bigram, extra_buffer)
    soak(machine, 2500, seed=2 * page_size + is_bigram, recount_every=1)
