"""Caches with one tier against a model: what such a cache holds after an operation follows from what it held before.

The model adds to the invariants of `CacheMachine`: an insert keeps everything and adds exactly its pages, eviction
takes what an eviction by hand takes, and locks are exactly those of their holders.
"""

from collections import Counter
from contextlib import contextmanager
from typing import ClassVar

import pytest
from hypothesis import settings

from engine_cache import EVICTION_POLICIES
from engine_cache.tree.node import iter_nodes
from tests.rigs.cache import GPU
from tests.rigs.machines.cache_machine import CacheMachine, operation, soak
from tests.support.effort import num_examples


class ModelMachine(CacheMachine):
    def content(self):
        """Return the prefixes with KV, and those with a state."""
        return self.rig.held(GPU), self.rig.held_group("mamba", GPU) if self.rig.kinds else set()

    @contextmanager
    def adds(self, prefixes, *, may_evict=False):
        """Check that an operation adds these pages, with a state at their end, and takes nothing else away."""
        pages, states = self.content()
        pages, states = pages | set(prefixes), states | set(prefixes[-1:] if self.rig.kinds else ())
        yield
        held, held_states = self.content()
        assert set(prefixes) <= held <= pages
        assert set(prefixes[-1:] if self.rig.kinds else ()) <= held_states <= states
        assert may_evict or (held, held_states) == (pages, states)

    @operation(weight=5)
    def insert(self, draw):
        tokens, extra_key = self.prompt(draw)
        prefixes, (pages, states) = self.names.prefixes(tokens, extra_key), self.content()
        chunked, priority = draw.random() < 0.5, draw.randrange(4)
        has_room = self.rig.pool.available_size() >= len(prefixes) * self.page_size and self.rig.slots.available_size()
        if not prefixes or not has_room:
            self.rig.insert(tokens, extra_key, chunked=chunked, priority=priority)
            return
        known = next((i for i, prefix in enumerate(prefixes) if prefix not in pages), len(prefixes))
        with self.adds(prefixes):
            result = self.rig.insert(tokens, extra_key, chunked=chunked, priority=priority)
        assert result == (known * self.page_size, len(prefixes) * self.page_size, prefixes[-1] in states)

    @operation(weight=2)
    def match(self, draw):
        with self.adds([]):
            super().match(draw)

    def checked_evict(self, params):
        evictable = self.cache.evictable_size()
        left = evicted_by_hand(self.cache, params.num_tokens, params.mamba_num) if self.rig.kinds else None
        result = super().checked_evict(params)
        assert result.num_tokens_evicted >= min(params.num_tokens, evictable)
        nodes = list(iter_nodes(self.cache.root_node))
        if left is not None:
            assert ({node.id for node in nodes}, {node.id for node in nodes if node.mamba_value is not None}) == left
        return result

    def to_share(self, req):
        """Return the prefixes that a request can share. With states, they end at its own."""
        length = len(req.token_ids)
        if self.rig.kinds and self.rig.has_extra_buffer:
            length = req.mamba_last_track_seqlen or 0
        prefixes = self.names.prefixes(req.token_ids[: length + self.rig.is_bigram], req.extra_key)
        is_complete = len(prefixes) * self.page_size == length and length > req.cache_protected_len
        return prefixes if is_complete or not self.rig.kinds else []

    @operation(weight=2, when=lambda machine: machine.served.running)
    def share_what_is_computed(self, draw):
        req, free = self.one_request(draw), self.rig.slots.available_size()
        has_slot = not self.rig.kinds or free + self.cache.states.evictable_size > 0
        shared = self.to_share(req) if has_slot else []
        with self.adds(shared, may_evict=free == 0):
            self.served.share(req, chunked=draw.random() < 0.3)
        assert not shared or req.cache_protected_len >= len(shared) * self.page_size

    @operation(weight=3, when=lambda machine: machine.served.running)
    def end_a_request(self, draw):
        req, is_insert = self.one_request(draw), draw.random() < 0.7
        with self.adds(self.to_share(req) if is_insert else []):
            self.served.end(req, is_insert=is_insert)

    def check(self):
        super().check()
        held = Counter([lock.node for lock in self.locks] + [req.last_node for req in self.served.running])
        for node in iter_nodes(self.cache.root_node):
            assert node.lock_ref == held[node] + sum(child.lock_ref for child in node.children.values())
            assert not self.rig.kinds or node.mamba_lock_ref == held[node]
            assert self.events or node.hash_value is None


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


class RadixMachine(ModelMachine):
    CLASS = "radix"
    OPTIONS: ClassVar = {
        "page_size": (1, 2, 3),
        "is_eagle": (False, True),
        "eviction_policy": tuple(sorted(EVICTION_POLICIES)),
        "enable_kv_cache_events": (True, False),
        "device_pages": (20,),
    }


class MambaMachine(ModelMachine):
    CLASS = "mamba"
    OPTIONS: ClassVar = {
        "page_size": (1, 1, 2, 3),
        "is_eagle": (False, True),
        "extra_buffer": (False, True),
        "enable_kv_cache_events": (True, True, False),
    }

    def begin(self, page_size=1, is_eagle=False, extra_buffer=False, **options):
        extra_buffer |= page_size > 1 or is_eagle
        sizes = {"device_pages": 20, "slots": 7}
        super().begin(page_size=page_size, is_eagle=is_eagle, extra_buffer=extra_buffer, **sizes | options)


def _case(machine):
    case = machine.TestCase
    case.settings = settings(max_examples=num_examples(75), stateful_step_count=40)
    return case


TestRadix = _case(RadixMachine)
TestMamba = _case(MambaMachine)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("page_size", "is_eagle", "extra_buffer"), [(1, False, False), (1, False, True), (2, False, True), (2, True, True)]
)
def test_the_promises_hold_through_2500_operations(page_size, is_eagle, extra_buffer):
    machine = MambaMachine()
    machine.begin(page_size, is_eagle, extra_buffer)
    soak(machine, 2500, seed=2 * page_size + is_eagle, recount_every=1)
