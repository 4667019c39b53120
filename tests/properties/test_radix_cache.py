"""RadixCache against a brute-force model: a dict from every cached prefix to the rows of its last page.

After every operation the invariants of the tree are recounted and the events are replayed; the result must equal the
model's pages.
"""

from typing import ClassVar

import numpy as np
from hypothesis import settings

from engine_cache import (
    EVICTION_POLICIES,
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    PagedTokenToKVPoolAllocator,
    RadixCache,
    RadixKey,
)
from engine_cache.tree.node import TreeNode, iter_nodes
from tests.models.cache_checks import check_cache
from tests.support.caches.cache_machine import CacheMachine, operation
from tests.support.effort import num_examples

POOL_PAGES = 20


class RadixCacheMachine(CacheMachine):
    OPTIONS: ClassVar = {
        "page_size": (1, 2, 3),
        "is_eagle": (False, True),
        "eviction_policy": tuple(sorted(EVICTION_POLICIES)),
        "enable_kv_cache_events": (True, False),
    }

    def begin(self, page_size, is_eagle, enable_kv_cache_events, **options):  # type: ignore[override]
        self.pool = PagedTokenToKVPoolAllocator(POOL_PAGES * page_size, page_size)
        self.cache = RadixCache(
            page_size=page_size,
            allocator=self.pool,
            is_eagle=is_eagle,
            enable_kv_cache_events=enable_kv_cache_events,
            **options,
        )
        self.watch(page_size, is_bigram=is_eagle, events=enable_kv_cache_events)
        self.model = {}  # (namespace, raw tokens of a prefix of whole pages) -> rows of its last page
        self.locks = []  # (node, its prefixes)

    # --- the model ---

    def held(self, medium):
        return self.model

    def num_held(self, prefixes):
        return next((i for i, prefix in enumerate(prefixes) if prefix not in self.model), len(prefixes))

    def locked(self):
        return {prefix for _, prefixes in self.locks for prefix in prefixes}

    def walk(self):
        """Return the contents of the tree in the form of the model."""
        raw_of: dict[TreeNode, tuple[int, ...]] = {self.cache.root_node: ()}
        found = {}
        for node in iter_nodes(self.cache.root_node):
            above = raw_of[node.parent]
            raw_of[node] = raw = above[: len(above) - self.is_bigram] + tuple(node.key.token_ids)
            pages = self.names.prefixes(raw, node.key.extra_key)[-(len(node.key) // self.page_size) :]
            for prefix, rows in zip(pages, node.value.reshape(-1, self.page_size).tolist(), strict=True):
                found[prefix] = rows
        return found

    # --- operations ---

    @operation(weight=3)
    def insert(self, draw):
        tokens, extra_key = self.prompt(draw)
        prefixes = self.names.prefixes(tokens, extra_key)
        length = len(prefixes) * self.page_size
        rows = self.pool.alloc(length)
        if rows is None:
            return
        known = self.num_held(prefixes)
        value = np.concatenate((rows, np.zeros(len(tokens) - length, np.int64)))
        params = InsertParams(RadixKey(tokens, extra_key), value, draw.random() < 0.5, draw.randrange(4))
        result = self.cache.insert(params)
        assert result[:2] == (known * self.page_size, length)
        self.pool.free(rows[: result.prefix_len])
        for prefix, page in zip(prefixes[known:], rows.reshape(-1, self.page_size).tolist()[known:], strict=True):
            self.model[prefix] = page

    @operation()
    def match(self, draw):
        tokens, extra_key = self.prompt(draw)
        prefixes = self.names.prefixes(tokens, extra_key)
        result = self.cache.match_prefix(MatchPrefixParams(RadixKey(tokens, extra_key)))
        expected = [row for prefix in prefixes[: self.num_held(prefixes)] for row in self.model[prefix]]
        assert result.device_indices.tolist() == expected

    @operation(when=lambda machine: machine.model)
    def lock(self, draw):
        extra_key, raw = draw.choice(list(self.model))
        prefixes = self.names.prefixes(raw, extra_key)
        node = self.cache.match_prefix(MatchPrefixParams(RadixKey(raw, extra_key))).last_device_node
        fresh = len(set(prefixes) - self.locked()) * self.page_size
        assert self.cache.inc_lock_ref(node).delta == -fresh
        self.locks.append((node, prefixes))

    @operation(weight=2, when=lambda machine: machine.locks)
    def unlock(self, draw):
        node, prefixes = self.locks.pop(draw.randrange(len(self.locks)))
        released = len(set(prefixes) - self.locked()) * self.page_size
        assert self.cache.dec_lock_ref(node).delta == released

    @operation(when=lambda machine: machine.model)
    def evict(self, draw):
        num_tokens = draw.randrange(9)
        evictable = (len(self.model) - len(self.locked())) * self.page_size
        evicted = self.cache.evict(EvictParams(num_tokens)).num_tokens_evicted
        left = self.walk()
        assert evicted >= min(num_tokens, evictable)
        assert evicted == (len(self.model) - len(left)) * self.page_size
        assert left.items() <= self.model.items()
        self.model = left

    @operation(when=lambda machine: len(machine.model) > 12)
    def reset(self, draw):
        self.cache.reset()
        self.pool.clear()
        self.model, self.locks = {}, []

    # --- invariants --------------

    def check(self):
        check_cache(self.cache, np.empty(0, np.int64))
        assert self.walk() == self.model
        assert self.cache.protected_size() == len(self.locked()) * self.page_size
        assert self.locked() <= self.model.keys()
        if not self.events:
            assert all(node.hash_value is None for node in iter_nodes(self.cache.root_node))


TestRadixCache = RadixCacheMachine.TestCase
TestRadixCache.settings = settings(max_examples=num_examples(150), stateful_step_count=40)
