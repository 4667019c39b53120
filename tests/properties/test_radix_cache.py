"""RadixCache against a brute-force model: a dict from every cached prefix to the rows of its last page.

After every operation the invariants of the tree are recounted, and the events are replayed into a set that must equal
the model's pages under names computed by hashlib and xxhash.
"""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from page_names import block_name, sequence_hash

from engine_cache import (
    EVICTION_POLICIES,
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    PagedTokenToKVPoolAllocator,
    RadixCache,
    RadixKey,
)
from engine_cache.node import iter_nodes
from kv_events.schema import AllBlocksCleared, BlockStored, StorageMedium

POOL_PAGES = 20
# few different pages, so that prompts often share, leave and extend each other
PROMPTS = st.tuples(
    st.lists(st.integers(0, 1), max_size=6), st.integers(0, 3), st.sampled_from([None, None, None, "a"])
)


@pytest.fixture(autouse=True, scope="module")
def _watched_pools():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSIGHT_DEBUG_POOLS", "1")
        yield


class RadixCacheMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 3]),
        is_bigram=st.booleans(),
        policy=st.sampled_from(sorted(EVICTION_POLICIES)),
        events=st.booleans(),
    )
    def start(self, page_size, is_bigram, policy, events):
        self.page_size, self.is_bigram, self.events = page_size, is_bigram, events
        self.pool = PagedTokenToKVPoolAllocator(POOL_PAGES * page_size, page_size)
        self.cache = RadixCache(
            page_size=page_size,
            allocator=self.pool,
            eviction_policy=policy,
            enable_kv_cache_events=events,
            is_eagle=is_bigram,
        )
        self.held = {}  # (extra_key, raw tokens of a prefix of whole pages) -> rows of its last page
        self.locks = []  # (node, its prefixes)
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

    def locked(self):
        return {prefix for _, prefixes in self.locks for prefix in prefixes}

    def named(self, prefix):
        """The last page of a prefix as `replayed` should have it."""
        extra_key, raw = prefix
        above = raw[: -self.page_size]
        parent = self.block_name(above) if len(above) > self.is_bigram else None
        sequence = sequence_hash(raw, self.page_size, self.is_bigram, extra_key)
        return (extra_key, self.block_name(raw)), (sequence, parent)

    def block_name(self, raw):
        return block_name(raw, self.page_size, self.is_bigram)

    def walk(self):
        """What the tree holds, in the model's form."""
        raw_of, found = {self.cache.root_node: ()}, {}
        for node in iter_nodes(self.cache.root_node):
            above = raw_of[node.parent]
            raw_of[node] = raw = above[: len(above) - self.is_bigram] + tuple(node.key.token_ids)
            pages = self.prefixes(raw, node.key.extra_key)[-(len(node.key) // self.page_size) :]
            for prefix, rows in zip(pages, node.value.reshape(-1, self.page_size).tolist(), strict=True):
                found[prefix] = rows
        return found

    # --- operations ---

    @rule(prompt=PROMPTS, priority=st.integers(0, 3), chunked=st.booleans())
    def insert(self, prompt, priority, chunked):
        tokens, extra_key = self.tokens(prompt)
        prefixes = self.prefixes(tokens, extra_key)
        length = len(prefixes) * self.page_size
        rows = self.pool.alloc(length)
        if rows is None:
            return
        known = self.num_held(prefixes)
        value = np.concatenate((rows, np.zeros(len(tokens) - length, np.int64)))
        result = self.cache.insert(InsertParams(RadixKey(tokens, extra_key), value, chunked, priority))
        assert result[:2] == (known * self.page_size, length)
        self.pool.free(rows[: result.prefix_len])
        for prefix, page in zip(prefixes[known:], rows.reshape(-1, self.page_size).tolist()[known:], strict=True):
            self.held[prefix] = page

    @rule(prompt=PROMPTS)
    def match(self, prompt):
        tokens, extra_key = self.tokens(prompt)
        prefixes = self.prefixes(tokens, extra_key)
        result = self.cache.match_prefix(MatchPrefixParams(RadixKey(tokens, extra_key)))
        expected = [row for prefix in prefixes[: self.num_held(prefixes)] for row in self.held[prefix]]
        assert result.device_indices.tolist() == expected

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def lock(self, data):
        extra_key, raw = data.draw(st.sampled_from(list(self.held)))
        prefixes = self.prefixes(raw, extra_key)
        node = self.cache.match_prefix(MatchPrefixParams(RadixKey(raw, extra_key))).last_device_node
        fresh = len(set(prefixes) - self.locked()) * self.page_size
        assert self.cache.inc_lock_ref(node).delta == -fresh
        self.locks.append((node, prefixes))

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data):
        node, prefixes = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))
        released = len(set(prefixes) - self.locked()) * self.page_size
        assert self.cache.dec_lock_ref(node).delta == released

    @precondition(lambda self: self.held)
    @rule(num_tokens=st.integers(0, 8))
    def evict(self, num_tokens):
        evictable = (len(self.held) - len(self.locked())) * self.page_size
        evicted = self.cache.evict(EvictParams(num_tokens)).num_tokens_evicted
        left = self.walk()
        assert evicted >= min(num_tokens, evictable)
        assert evicted == (len(self.held) - len(left)) * self.page_size
        assert left.items() <= self.held.items()
        self.held = left

    @precondition(lambda self: len(self.held) > 12)
    @rule()
    def reset(self):
        self.cache.reset()
        self.pool.clear()
        self.held, self.locks = {}, []

    # --- what holds after each ---

    @invariant()
    def the_tree_recounts(self):
        self.cache.check(np.empty(0, np.int64))

    @invariant()
    def the_tree_equals_the_model(self):
        assert self.walk() == self.held
        assert self.cache.protected_size() == len(self.locked()) * self.page_size
        assert self.locked() <= self.held.keys()

    @invariant()
    def the_events_replay_to_the_model(self):
        if not self.events:
            assert self.cache.kv_event_queue == []
            assert all(node.hash_value is None for node in iter_nodes(self.cache.root_node))
            return
        for event in self.cache.take_events():
            self.replay(event)
        assert self.replayed == dict(map(self.named, self.held))

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


TestRadixCache = RadixCacheMachine.TestCase
TestRadixCache.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
