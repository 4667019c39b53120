"""The number of nodes that an eviction examines does not depend on the size of the tree, and no leaf is lost."""

import random
from typing import Any

import numpy as np
import pytest

from engine_cache import EvictParams, InsertParams, MatchPrefixParams, RadixKey
from engine_cache.tree.eviction import EVICTION_POLICIES
from tests.models.cache_checks import check_cache
from tests.rigs.cache import CacheRig

FEW, MANY, TURNS = 500, 4_000, 500
CASES = [("radix", "slru"), ("hiradix", "mru"), ("mamba", "lru"), ("himamba", "lru")]


class Unwalked(dict[Any, Any]):
    """Children that may be looked up but not iterated over."""

    def __iter__(self):
        raise AssertionError("all children of a node were visited")

    keys = values = items = __iter__


def make_cache(kind, device_pages, host_pages, policy, write_policy="write_through"):
    """Return a cache without events, with pages of one token."""
    options = {} if "mamba" in kind else {"eviction_policy": policy}
    sizes = {"device_pages": device_pages, "host_pages": host_pages, "slots": device_pages, "host_slots": host_pages}
    options |= {"page_size": 1, "enable_kv_cache_events": False, "write_policy": write_policy}
    return CacheRig(kind, **sizes, **options).cache


def insert(cache, tokens):
    """Insert a prompt that is cached except for its last page."""
    rows = cache.allocator.alloc(1)
    if rows is None:
        cache.evict(EvictParams(1))
        rows = cache.allocator.alloc(1)
    value, state = np.concatenate((np.zeros(len(tokens) - 1, np.int64), rows)), None
    if cache.states is not None:
        state = cache.mamba_allocator.alloc(1)
    params = InsertParams(RadixKey(tokens), value, mamba_value=state, prev_prefix_len=len(tokens) - 1)
    assert cache.insert(params).prefix_len == len(tokens) - 1
    cache.writing_check(write_back=True)


@pytest.fixture
def looked_at(monkeypatch):
    """The nodes that eviction policies were called for, one after the other."""
    nodes = []

    def watched(policy):
        return policy._replace(key=lambda node: nodes.append(node) or policy.key(node))  # type: ignore[func-returns-value]

    for name, policy in EVICTION_POLICIES.items():
        monkeypatch.setitem(EVICTION_POLICIES, name, watched(policy))
    return nodes


def looks_in_a_full_cache(kind, num_leaves, policy, looked_at):
    """Return the number of looks in several turns. In each, one leaf is used and one is inserted, so that another one
    is evicted from every tier. All leaves have the same parent."""
    cache = make_cache(kind, num_leaves // 2, num_leaves, policy)
    for leaf in range(num_leaves):
        insert(cache, [1] if leaf == 0 else [1, 1 + leaf])
    (shared,) = cache.root_node.children.values()
    shared.children = Unwalked(shared.children)
    looked_at.clear()
    draw = random.Random(num_leaves)
    for leaf in range(num_leaves, num_leaves + TURNS):
        cache.match_prefix(MatchPrefixParams(RadixKey([1, 1 + draw.randrange(leaf)])))
        insert(cache, [1, 1 + leaf])
    return len(looked_at)


@pytest.mark.parametrize(("kind", "policy"), CASES)
def test_a_full_cache_looks_at_no_more_nodes_when_it_is_eight_times_as_large(kind, policy, looked_at):
    small = looks_in_a_full_cache(kind, FEW, policy, looked_at)
    large = looks_in_a_full_cache(kind, MANY, policy, looked_at)
    assert TURNS < small < 8 * TURNS
    assert large < 1.4 * small, "log 4,000 / log 500"


def host_tier(num_leaves, write_policy):
    """Return a cache with a device full of one-page nodes and one more host page."""
    cache = make_cache("hiradix", num_leaves, num_leaves + 1, "lru", write_policy=write_policy)
    for leaf in range(num_leaves):
        insert(cache, [leaf])
    return cache


def test_leaves_that_find_no_room_on_the_host_are_looked_at_once_and_stay(looked_at):
    cache = host_tier(8, "write_back")
    cache.evict(EvictParams(8))
    for leaf in range(8):
        insert(cache, [100 + leaf])
    assert cache.evict(EvictParams(1)).num_tokens_evicted == 1, "the page that was free on the host"
    held = list(cache.evictable_host_leaves)
    for node in held:
        cache.host.leaves.hold(node)
    for _ in range(3):
        looked_at.clear()
        assert cache.evict(EvictParams(5)).num_tokens_evicted == 0
        for leaf in cache.evictable_leaves:
            assert 1 <= looked_at.count(leaf) <= 2, "sorted in and taken out"
        assert len(cache.evictable_leaves) == 7
        check_cache(cache)
    cache.host.leaves.release(held[0])
    assert cache.evict(EvictParams(5)).num_tokens_evicted > 0
    check_cache(cache)


def test_leaves_that_are_locked_cost_an_eviction_nothing(looked_at):
    cache = host_tier(500, "write_through")
    cache.evict(EvictParams(500))
    *held, free = sorted(cache.evictable_host_leaves, key=lambda node: node.id)
    for node in held:
        cache.host.leaves.hold(node)
    cache.evict_host(1)
    assert free.former_parent is not None
    looked_at.clear()
    for _ in range(5):
        assert cache.evict_host(1) == 0
    assert looked_at == []
    cache.host.leaves.release(held[0])
    assert cache.evict_host(2) == 1
    assert len(looked_at) < 4
    check_cache(cache)


def test_an_eviction_that_fails_midway_loses_no_leaf(monkeypatch):
    cache = host_tier(4, "write_back")
    with monkeypatch.context() as patch:
        patch.setattr(cache.cache_controller, "write", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cache.evict(EvictParams(2))
    check_cache(cache)
    assert cache.evict(EvictParams(4)).num_tokens_evicted == 4
