"""MambaRadixCache under requests, bare inserts, locks and evictions in random order, with hardly any room.

Three oracles. Contents: every row and every slot remembers the tokens it was computed from, so a state or a page under
a wrong prefix shows. A model: the prefixes with KV and those with a state. Eviction: done once more by hand on a copy
of the tree. After every operation the tree is recounted and the events are replayed.
"""

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from page_names import block_name, sequence_hash

from engine_cache import (
    EvictParams,
    InsertParams,
    MambaRadixCache,
    MambaSlotAllocator,
    MatchPrefixParams,
    PagedTokenToKVPoolAllocator,
    PoolExhaustedError,
    RadixKey,
    ReqToTokenPool,
    Request,
)
from engine_cache.node import iter_nodes
from kv_events.schema import AllBlocksCleared, BlockStored, StorageMedium

POOL_PAGES = 20
SLOTS = 7
CHUNK = 4
# few different pages, mostly the same one, so that prompts often share, leave and extend each other
PAGES = [[], [0], [0, 0], [0, 0, 0], [0, 0, 0, 0], [0, 1], [0, 0, 1], [0, 1, 0, 1], [1], [1, 0, 0]]
NAMESPACES = [None, None, None, None, None, "a"]
PROMPTS = st.tuples(st.sampled_from(PAGES), st.integers(0, 2), st.sampled_from(NAMESPACES))
PICK = st.integers(0, 7)


def picked(things, pick):
    return things[pick % len(things)]


@pytest.fixture(autouse=True, scope="module")
def _watched_pools():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSIGHT_DEBUG_POOLS", "1")
        yield


class Contents(dict):
    """Slot -> the tokens that its state was computed from."""

    def copy_from(self, src, dst):
        self[int(dst[0])] = self[int(src[0])]


class Hybrid:
    """A cache, its pools, and an engine that computes: the contents of what it writes are the tokens."""

    def __init__(self, page_size, is_bigram, extra_buffer, events=False, pages=POOL_PAGES, slots=SLOTS, lines=4):
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
        """Compute further tokens, tracking a state on the way if the cache wants that."""
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
        self.cache.check(np.concatenate(rows + nothing), np.concatenate(slots + nothing))


def evicted_by_hand(cache, num_tokens, num_states):
    """Ids of the nodes that are left and of those with a state, if both kinds are evicted oldest first."""
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


class MambaCacheMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 1, 2, 3]),
        is_bigram=st.booleans(),
        extra_buffer=st.booleans(),
        events=st.sampled_from([True, True, False]),
    )
    def start(self, page_size, is_bigram, extra_buffer, events):
        extra_buffer |= page_size > 1 or is_bigram
        self.page_size, self.is_bigram, self.events = page_size, is_bigram, events
        self.engine = Hybrid(page_size, is_bigram, extra_buffer, events)
        self.cache = self.engine.cache
        self.held, self.states = set(), set()  # (extra_key, raw tokens of a prefix of whole pages)
        self.locks = []  # nodes
        self.replayed = {}  # (extra_key, block hash) -> (sequence hash, parent block hash)

    # --- the model ---

    def tokens(self, prompt):
        """Tokens and namespace of a drawn prompt: pages of equal tokens, then a tail."""
        pages, tail, extra_key = prompt
        return [page for page in pages for _ in range(self.page_size)] + [1] * tail, extra_key

    def prefixes(self, tokens, extra_key):
        """Every prefix of whole pages, shortest first."""
        pages = max(0, len(tokens) - self.is_bigram) // self.page_size
        ends = (n * self.page_size + self.is_bigram for n in range(1, pages + 1))
        return [(extra_key, tuple(tokens[:end])) for end in ends]

    def num_held(self, prefixes):
        return next((i for i, prefix in enumerate(prefixes) if prefix not in self.held), len(prefixes))

    def num_usable(self, prefixes):
        held = self.num_held(prefixes)
        return next((i for i in range(held, 0, -1) if prefixes[i - 1] in self.states), 0)

    def walk(self):
        """Prefixes with KV and prefixes with a state in the tree; what they hold was computed from them."""
        raw_of, held, states = {self.cache.root_node: ()}, set(), set()
        for node in iter_nodes(self.cache.root_node):
            above, extra_key = raw_of[node.parent], node.key.extra_key
            raw_of[node] = raw = above[: len(above) - self.is_bigram] + tuple(node.key.token_ids)
            units = len(raw) - self.is_bigram
            held |= set(self.prefixes(raw, extra_key)[-(len(node.key) // self.page_size) :])
            for end, row in enumerate(node.value.tolist(), units - len(node.key) + 1):
                assert self.engine.row_of[row] == (extra_key, raw[:end])
            if node.mamba_value is not None:
                states.add((extra_key, raw))
                assert self.engine.state_of[int(node.mamba_value[0])] == (extra_key, raw[:units])
        return held, states

    def settle(self, new=(), gone=True):
        """Take over what is left after an operation that added `new`, with a state at its end, and may have evicted."""
        held, states = self.walk()
        assert held <= self.held | set(new)
        assert states <= self.states | set(new[-1:])
        assert set(new) <= held
        assert set(new[-1:]) <= states
        assert gone or (held, states) == (self.held | set(new), self.states | set(new[-1:]))
        self.held, self.states = held, states

    # --- bare operations ---

    @rule(prompt=PROMPTS, reuse=st.booleans(), chunked=st.booleans())
    def insert(self, prompt, reuse, chunked):
        tokens, extra_key = self.tokens(prompt)
        prefixes = self.prefixes(tokens, extra_key)
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
        params = InsertParams(key, value, chunked, mamba_value=slot, prev_prefix_len=len(own))
        result = self.cache.insert(params)
        exists = not prefixes or prefixes[-1] in self.states
        assert result == (self.num_held(prefixes) * self.page_size, length, exists)
        if exists:
            self.engine.slots.free(slot)
        self.settle(prefixes, gone=False)

    @rule(prompt=PROMPTS)
    def match(self, prompt):
        tokens, extra_key = self.tokens(prompt)
        prefixes = self.prefixes(tokens, extra_key)
        result = self.cache.match_prefix(MatchPrefixParams(RadixKey(tokens, extra_key)))
        usable = self.num_usable(prefixes) * self.page_size
        matched = self.num_held(prefixes) * self.page_size
        assert len(result.device_indices) == usable
        for end, row in enumerate(result.device_indices.tolist(), 1):
            assert self.engine.row_of[row] == (extra_key, tuple(tokens[:end]))
        assert result.last_device_node is result.last_host_node is result.best_match_node
        assert result.mamba_branching_seqlen == (matched // CHUNK * CHUNK or None if matched > usable else None)
        self.settle(gone=False)

    @precondition(lambda self: self.held and len(self.locks) < 3)
    @rule(pick=PICK)
    def lock(self, pick):
        """Any node, tombstones too."""
        node = picked(list(iter_nodes(self.cache.root_node)), pick)
        before = self.cache.protected_size()
        assert self.cache.inc_lock_ref(node).delta == before - self.cache.protected_size()
        self.locks.append(node)

    @precondition(lambda self: self.locks)
    @rule(pick=PICK)
    def unlock(self, pick):
        states, before = set(self.states), self.cache.protected_size()
        node = self.locks.pop(pick % len(self.locks))
        assert self.cache.dec_lock_ref(node).delta == before - self.cache.protected_size()
        self.settle()
        assert self.states == states

    @precondition(lambda self: len(self.held) > 5)
    @rule(num_tokens=st.integers(0, 5), num_states=st.integers(0, 2))
    def evict(self, num_tokens, num_states):
        nodes, states = evicted_by_hand(self.cache, num_tokens, num_states)
        held_before, states_before = len(self.held), len(self.states)
        result = self.cache.evict(EvictParams(num_tokens, mamba_num=num_states))
        left = list(iter_nodes(self.cache.root_node))
        assert {node.id for node in left} == nodes
        assert {node.id for node in left if node.mamba_value is not None} == states
        self.settle()
        assert result.num_tokens_evicted == (held_before - len(self.held)) * self.page_size
        assert result.mamba_num_evicted == states_before - len(self.states)

    @precondition(lambda self: len(self.held) > 14 and not self.engine.requests)
    @rule()
    def reset(self):
        self.cache.reset()
        self.engine.pool.clear()
        self.engine.slots.clear()
        self.held, self.states, self.locks = set(), set(), []

    # --- requests ---

    @rule(prompt=PROMPTS)
    def begin(self, prompt):
        self.engine.begin(*self.tokens(prompt))
        self.settle()

    @precondition(lambda self: self.engine.requests)
    @rule(pick=PICK, new=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def grow(self, pick, new):
        self.engine.grow(picked(self.engine.requests, pick), new)
        self.settle()

    def to_share(self, req):
        """Prefixes that end at the request's own state, if it has one beyond what is shared already."""
        length = req.mamba_last_track_seqlen or 0 if self.engine.extra_buffer else len(req.token_ids)
        prefixes = self.prefixes(req.token_ids[: length + self.is_bigram], req.extra_key)
        complete = len(prefixes) * self.page_size == length
        return prefixes if complete and length > req.cache_protected_len else []

    @precondition(lambda self: self.engine.requests)
    @rule(pick=PICK, chunked=st.booleans())
    def share(self, pick, chunked):
        req = picked(self.engine.requests, pick)
        wanted, free = self.to_share(req), self.engine.slots.available_size()
        room = free + self.cache.mamba_evictable_size() > 0
        self.cache.cache_unfinished_req(req, chunked=chunked)
        assert req.prefix_indices.tolist() == self.engine.lines.read(req.req_pool_idx, len(req.token_ids)).tolist()
        self.settle(wanted if room else [], gone=free == 0)
        if wanted and room:
            assert req.cache_protected_len == len(wanted) * self.page_size
        for end, row in enumerate(req.prefix_indices.tolist(), 1):
            assert self.engine.row_of[row] == (req.extra_key, tuple(req.token_ids[:end]))

    @precondition(lambda self: self.engine.requests)
    @rule(pick=PICK, is_insert=st.booleans())
    def finish(self, pick, is_insert):
        req = picked(self.engine.requests, pick)
        wanted = self.to_share(req) if is_insert else []
        self.engine.finish(req, is_insert)
        self.settle(wanted, gone=False)
        assert req.mamba_pool_idx is None
        assert req.last_node is None

    # --- what holds after each ---

    @invariant()
    def the_tree_recounts(self):
        self.engine.check()

    @invariant()
    def the_tree_equals_the_model(self):
        assert self.walk() == (self.held, self.states)

    @invariant()
    def locks_add_up(self):
        held = [*self.locks, *(req.last_node for req in self.engine.requests)]
        for node in iter_nodes(self.cache.root_node):
            assert node.mamba_lock_ref == sum(lock is node for lock in held)
            assert node.lock_ref == node.mamba_lock_ref + sum(child.lock_ref for child in node.children.values())

    @invariant()
    def the_events_replay_to_the_model(self):
        if not self.events:
            assert self.cache.kv_event_queue == []
            assert all(node.hash_value is None for node in iter_nodes(self.cache.root_node))
            return
        for event in self.cache.take_events():
            self.replay(event)
        assert self.replayed == dict(map(self.named, self.held))

    def named(self, prefix):
        """The last page of a prefix as `replayed` should have it."""
        extra_key, raw = prefix
        above = raw[: -self.page_size]
        parent = block_name(above, self.page_size, self.is_bigram) if len(above) > self.is_bigram else None
        sequence = sequence_hash(raw, self.page_size, self.is_bigram, extra_key)
        return (extra_key, block_name(raw, self.page_size, self.is_bigram)), (sequence, parent)

    def replay(self, event):
        if isinstance(event, AllBlocksCleared):
            self.replayed = {}
            return
        (block,) = event.block_hashes
        assert event.medium is StorageMedium.GPU
        if not isinstance(event, BlockStored):
            del self.replayed[event.extra_key, block]
            return
        parent = event.parent_block_hash
        assert (event.extra_key, block) not in self.replayed
        assert parent is None or (event.extra_key, parent) in self.replayed
        assert len(event.token_ids) == event.block_size == self.page_size
        self.replayed[event.extra_key, block] = (int.from_bytes(event.sequence_hashes, "little"), parent)


def operate(machine, draw):
    """One operation that is possible now, all kinds alike."""
    prompt = draw.choice(PAGES), draw.randrange(3), draw.choice(NAMESPACES)
    pick, flag = draw.randrange(8), draw.random() < 0.5
    possible = [
        lambda: machine.insert(prompt, flag, False),
        lambda: machine.match(prompt),
        lambda: machine.begin(prompt),
    ]
    if machine.held and len(machine.locks) < 3:
        possible.append(lambda: machine.lock(pick))
    if machine.locks:
        possible.append(lambda: machine.unlock(pick))
    if len(machine.held) > 5:
        possible.append(lambda: machine.evict(draw.randrange(6), draw.randrange(3)))
    if machine.engine.requests:
        possible.append(lambda: machine.grow(pick, draw.choices((0, 1), k=draw.randint(1, 4))))
        possible.append(lambda: machine.share(pick, flag))
        possible.append(lambda: machine.finish(pick, draw.random() < 0.7))
    draw.choice(possible)()


@pytest.mark.parametrize(
    ("page_size", "is_bigram", "extra_buffer"), [(1, False, False), (1, False, True), (2, False, True), (2, True, True)]
)
def test_the_promises_hold_through_2500_operations(page_size, is_bigram, extra_buffer):
    """The operations of the machine, drawn alike, which keeps the pools full and several requests in flight."""
    draw = random.Random(2 * page_size + is_bigram)
    machine = MambaCacheMachine()
    machine.start(page_size=page_size, is_bigram=is_bigram, extra_buffer=extra_buffer, events=True)
    for _ in range(2500):
        operate(machine, draw)
        machine.the_tree_recounts()
        machine.the_tree_equals_the_model()
        machine.locks_add_up()
        machine.the_events_replay_to_the_model()


TestMambaCache = MambaCacheMachine.TestCase
TestMambaCache.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
