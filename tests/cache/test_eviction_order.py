"""The order of eviction: which node goes first, which part of a split node counts as used, and what a call costs."""

import random
from typing import Any

import numpy as np
import pytest

from engine_cache import (
    BytelessHostPool,
    EvictParams,
    HiCacheController,
    HiMambaRadixCache,
    HiRadixCache,
    HostPoolGroup,
    HybridCacheController,
    InsertParams,
    MambaRadixCache,
    MambaSlotAllocator,
    ManualCopyEngine,
    MatchPrefixParams,
    PagedTokenToKVPoolAllocator,
    PoolEntry,
    RadixCache,
    RadixKey,
)
from engine_cache.storage.base import PoolName
from engine_cache.tree.eviction import EVICTION_POLICIES, find_policy
from tests.models.cache_checks import check_cache
from tests.rigs.cache import AB, ABC, GPU, A, rigs

pytestmark = pytest.mark.torch

SMALL = {"page_size": 1, "device_pages": 64, "slots": 8}
ONE_TIER = {"tiers": 1}


# --- the order on the device ---

ORDERS = {
    "lru": [4, 1, 2, 3],
    "lfu": [4, 3, 2, 1],
    "fifo": [1, 2, 3, 4],
    "mru": [3, 2, 1, 4],
    "filo": [4, 3, 2, 1],
    "priority": [2, 4, 3, 1],
    "slru": [4, 3, 1, 2],
}


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_each_policy_has_its_order(policy):
    """Of four leaves of one page each, inserted 1, 2, 3, 4 with priorities 4, 1, 3, 2; then 1 is inserted twice more,
    2 once more, and 3 is matched."""
    cache = RadixCache(page_size=1, eviction_policy=policy)
    for token, priority in ((1, 4), (2, 1), (3, 3), (4, 2), (1, 0), (1, 0), (2, 0)):
        cache.insert(InsertParams(RadixKey([token]), np.array([token]), priority=priority))
    cache.match_prefix(MatchPrefixParams(RadixKey([3])))
    order = list[int]()
    while cache.evictable_size():
        before = {int(node.value[0]) for node in cache.root_node.children.values()}
        assert cache.evict(EvictParams(1)).num_tokens_evicted == 1
        order += before - {int(node.value[0]) for node in cache.root_node.children.values()}
        check_cache(cache)
    assert order == ORDERS[policy]


def test_an_unknown_policy_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'random'.*lru, lfu, fifo, mru, filo, priority, slru"):
        find_policy("random")


@rigs("radix")
def test_leaves_go_first_and_then_their_parents_in_whole_nodes(rig):
    for tokens in ([1, 1, 2, 2], [1, 1, 5, 5, 6, 6]):
        rig.insert(tokens)
    for wanted, evicted, left in ((0, 0, 4), (1, 2, 3), (3, 4, 1), (100, 2, 0), (1, 0, 0)):
        assert rig.cache.evict(EvictParams(wanted)).num_tokens_evicted == evicted
        assert len(rig.held(GPU)) == left
    assert rig.cache.root_node.children == {}


@rigs(("unified+mamba+swa", ONE_TIER))
def test_in_a_unified_tree_what_goes_with_kv_counts_for_the_other_kinds(rig):
    rig.turns(A, AB, ABC)
    assert rig.cache.evict(EvictParams(4, mamba_num=2, swa_num_tokens=4)) == (4, 2, 4)


# --- which part of a split node was used, and is evicted last ---

WINDOWS = ("unified+swa+mamba", {"tiers": 1, "device_pages": 32, "swa_pages": 32})
RIGS = ("radix", "hiradix", ("mamba", SMALL), "himamba", WINDOWS)


@pytest.mark.parametrize(
    ("prompts", "match", "evicted", "left"),
    [
        (([1, 2], [9]), [1], 1, {(1,), (1, 2)}),  # a match that splits a node uses its lower part, too
        (([1, 2], [9], [1, 3]), None, 1, {(1,), (1, 2), (1, 3)}),  # and so does an insert
        (([1, 2], [9], [1, 3]), None, 2, {(1,), (1, 3)}),  # but it is older than the new leaf beside it
    ],
)
@rigs(*RIGS, page_size=1)
def test_a_split_uses_the_lower_part_too(rig, prompts, match, evicted, left):
    rig.turns(*prompts)
    if match:
        rig.match(match)
    rig.cache.evict(EvictParams(evicted))
    assert rig.ends() == left


@pytest.mark.parametrize(
    ("prompts", "match", "left"),
    [
        (([1, 2], [9], [1, 3]), None, {(1, 2), (1, 3)}),
        (([1, 2], [9]), [1], {(1, 2)}),
        (([1], [1, 2, 3], [1, 2, 4]), None, {(1, 2, 3), (1, 2, 4)}),  # newer than those on the way
        (([1], [1, 2, 3]), [1, 2], {(1,)}),  # older than those on the way
    ],
)
@rigs(*RIGS[2:], page_size=1)
def test_a_split_uses_the_state_below(rig, prompts, match, left):
    rig.turns(*prompts)
    if match:
        rig.match(match)
    rig.cache.evict_mamba(1)
    assert rig.ends("mamba") == left


@rigs("mamba", **SMALL)
def test_a_match_uses_the_way_to_the_state_and_beyond_it_only_what_it_splits(rig):
    rig.turns([1, 2], [1, 2, 3, 4], [5])
    rig.match([1, 2, 3])
    order = [rig.node_of(tokens) for tokens in ([5], [1, 2, 3], [1, 2, 3, 4], [1, 2])]
    times = [node.last_access_time for node in order]
    assert times == sorted(times)
    assert list(rig.cache.states.device_lru_list) == [order[0], *order[2:]]


@pytest.mark.parametrize(
    ("rig", "used"), [(("unified+mamba", {}), (A, AB, ABC)), (("unified+swa", {}), (AB, ABC))], indirect=["rig"]
)
def test_a_match_refreshes_states_on_the_way_and_swa_rows_of_the_window_only(rig, used):
    rig.turns(A, AB, ABC, [7, 7])
    rig.match(ABC)
    order = list(rig.cache.auxiliaries[0].device_lru_list)
    assert order[-len(used) :] == [rig.node_of(tokens) for tokens in used]
    assert order[-1 - len(used)] is rig.node_of([7, 7]) or rig.kinds == ("swa",)


@rigs("himamba", "unified+mamba", page_size=1)
def test_a_load_back_does_not_use_the_states_on_the_way(rig):
    rig.turns([1], [1, 2])
    rig.cache.evict(EvictParams(1))
    match = rig.match([1, 2])
    rig.turns([9])
    _, _, lock = rig.load_back(match)
    rig.cache.release(lock)
    rig.settle()
    rig.end_requests()
    rig.cache.evict_mamba(1)
    assert rig.ends("mamba") == {(1, 2), (9,)}


WIDE = {"page_size": 1, "tiers": 1, "window": 3, "device_pages": 32, "swa_pages": 32}


@rigs("unified+swa", **WIDE)
def test_the_window_that_an_insert_uses_ends_with_its_new_leaf(rig):
    rig.turns([*range(8)])
    rig.match([*range(8)])
    rig.turns([0, 1, 2, 3, 4, 50, 51, 52, 53])
    assert rig.cache.evict(EvictParams(0, swa_num_tokens=1)) == (0, 0, 5)
    assert rig.events() == []
    new = (0, 1, 2, 3, 4, 50)
    assert rig.ends("swa") == {tuple(range(8)), new, (*new, 51, 52, 53)}


@rigs("unified+swa", **WIDE)
def test_an_insert_uses_what_its_new_leaf_lacks_of_a_window_of_the_nodes_above(rig):
    rig.turns([0], [0, 1], [9], [0, 1, 2])
    rig.cache.evict(EvictParams(0, swa_num_tokens=1))
    assert rig.ends("swa") == {(0,), (0, 1), (0, 1, 2)}


# --- hits of the two parts of a split node, which determine their backups ---


@rigs("himamba", page_size=1, write_policy="write_through_selective")
def test_the_upper_part_of_a_split_begins_without_hits(rig):
    for tokens, expected in (([1, 2], set()), ([1, 3], set()), ([1, 4], {(1,)})):
        rig.turns(tokens)
        assert rig.ends("full", "host_value") == expected


@rigs("himamba", page_size=1, write_policy="write_through_selective")
def test_a_match_that_splits_a_node_gives_the_upper_part_no_hits(rig):
    rig.insert([1, 2])
    rig.match([1])
    rig.turns([1, 2])
    assert rig.ends("full", "host_value") == set()


SELECTIVE = {"page_size": 1, "window": 2, "swa_pages": 8, "write_policy": "write_through_selective"}


@rigs("unified+swa", **SELECTIVE)
def test_of_a_leaf_cut_at_the_window_only_the_lower_part_has_the_hit(rig):
    rig.turns([1, 2, 3, 4], [1, 2])
    assert rig.ends("full", "host_value") == set()
    rig.turns([1, 2, 3, 4])
    assert rig.ends("full", "host_value") == {(1, 2), (1, 2, 3, 4)}


# --- the number of nodes that an eviction examines does not depend on the size of the tree ---

FEW, MANY, TURNS = 1_000, 16_000, 500
CASES = [("radix", "slru"), ("hiradix", "mru"), ("mamba", "lru"), ("himamba", "lru")]


class Unwalked(dict[Any, Any]):
    """Children that may be looked up but not iterated over."""

    def __iter__(self):
        raise AssertionError("all children of a node were visited")

    keys = values = items = __iter__


def make_cache(kind, device_pages, host_pages, policy, write_policy="write_through"):
    pool, slots = PagedTokenToKVPoolAllocator(device_pages, 1), MambaSlotAllocator(device_pages)
    if kind == "radix":
        return RadixCache(page_size=1, allocator=pool, eviction_policy=policy)
    if kind == "mamba":
        return MambaRadixCache(page_size=1, allocator=pool, mamba_allocator=slots)
    kv = PoolEntry(PoolName.KV, BytelessHostPool(host_pages, 1), None, pool)
    if kind == "hiradix":
        controller = HiCacheController(kv, ManualCopyEngine())
        return HiRadixCache(
            page_size=1, allocator=pool, controller=controller, eviction_policy=policy, write_policy=write_policy
        )
    states = PoolEntry(PoolName.MAMBA, BytelessHostPool(host_pages, 1), None, slots)
    controller = HybridCacheController(HostPoolGroup.of(kv, states), ManualCopyEngine())
    return HiMambaRadixCache(page_size=1, allocator=pool, mamba_allocator=slots, controller=controller)


def insert(cache, tokens):
    """Insert a prompt that is cached except for its last page."""
    rows = cache.allocator.alloc(1)
    if rows is None:
        cache.evict(EvictParams(1))
        rows = cache.allocator.alloc(1)
    value, state = np.concatenate((np.zeros(len(tokens) - 1, np.int64), rows)), None
    if isinstance(cache, MambaRadixCache | HiMambaRadixCache):
        state = cache.mamba_allocator.alloc(1)
    params = InsertParams(RadixKey(tokens), value, mamba_value=state, prev_prefix_len=len(tokens) - 1)
    assert cache.insert(params).prefix_len == len(tokens) - 1
    if isinstance(cache, HiRadixCache | HiMambaRadixCache):
        cache.writing_check(write_back=True)


def looked_at_in_a_full_cache(kind, num_leaves, policy, monkeypatch):
    """Return the policy calls of several turns. In each, one leaf is used and one is inserted, so that another one is
    evicted from every tier. All leaves have the same parent."""
    calls, original = [], EVICTION_POLICIES[policy]

    def counted(node):
        calls.append(node)
        return original.key(node)

    monkeypatch.setitem(EVICTION_POLICIES, policy, original._replace(key=counted))
    cache = make_cache(kind, num_leaves // 2, num_leaves, policy)
    for leaf in range(num_leaves):
        insert(cache, [1] if leaf == 0 else [1, 1 + leaf])
    (shared,) = cache.root_node.children.values()
    shared.children = Unwalked(shared.children)
    calls.clear()
    draw = random.Random(num_leaves)
    for leaf in range(num_leaves, num_leaves + TURNS):
        cache.match_prefix(MatchPrefixParams(RadixKey([1, 1 + draw.randrange(leaf)])))
        insert(cache, [1, 1 + leaf])
    return len(calls)


@pytest.mark.parametrize(("kind", "policy"), CASES)
def test_a_full_cache_looks_at_no_more_nodes_when_it_is_sixteen_times_as_large(kind, policy, monkeypatch):
    small = looked_at_in_a_full_cache(kind, FEW, policy, monkeypatch)
    large = looked_at_in_a_full_cache(kind, MANY, policy, monkeypatch)
    assert TURNS < small < 8 * TURNS
    assert large < 1.4 * small, "log 16,000 / log 1,000"


def host_tier(num_leaves, write_policy, monkeypatch):
    """Return a cache with a device full of one-page nodes, one more host page, and a list of the examined nodes."""
    looked_at = []

    def watched(node):
        looked_at.append(node)
        return node.last_access_time, node.id

    monkeypatch.setitem(EVICTION_POLICIES, "lru", EVICTION_POLICIES["lru"]._replace(key=watched))
    cache = make_cache("hiradix", num_leaves, num_leaves + 1, "lru", write_policy=write_policy)
    for leaf in range(num_leaves):
        insert(cache, [leaf])
    return cache, looked_at


def test_leaves_that_find_no_room_on_the_host_are_looked_at_once_and_stay(monkeypatch):
    cache, looked_at = host_tier(8, "write_back", monkeypatch)
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


def test_a_leaf_whose_chances_change_while_it_is_refused_has_its_turn_next_time(monkeypatch):
    cache = make_cache("hiradix", 5, 6, "lru", write_policy="write_back")

    def put(tokens):
        rows = cache.allocator.alloc(len(tokens))
        cache.allocator.free(rows[: cache.insert(InsertParams(RadixKey(tokens), rows)).prefix_len])

    put([1, 2])
    put([1, 2, 3])
    cache.evict(EvictParams(1))  # the host has page 3, below two pages that are on the device only
    for others in ([5, 6, 7], [8, 9]):
        put(others)
        leaf = cache.match_prefix(MatchPrefixParams(RadixKey([1, 2]))).last_device_node
        cache.evict(EvictParams(len(others)))
        (node,) = (node for node in cache.evictable_host_leaves if node.key.raw[0] == others[0])
        cache.host.leaves.hold(node)
    assert cache.cache_controller.kv.host_pool.available_size() == 0
    backups, tried = cache.host.backups, []
    write = backups.write
    monkeypatch.setattr(backups, "write", lambda node, **how: tried.append(node) or write(node, **how))  # type: ignore[func-returns-value]
    assert cache.evict(EvictParams(2)).num_tokens_evicted == 0
    assert cache.cache_controller.kv.host_pool.available_size() == 1, "page 3 went, in vain"
    assert tried == list(cache.evictable_leaves) == [leaf]
    check_cache(cache)


def test_host_leaves_that_are_locked_are_passed_over_and_stay(monkeypatch):
    cache, _ = host_tier(4, "write_through", monkeypatch)
    cache.evict(EvictParams(4))
    first, *_ = sorted(cache.evictable_host_leaves, key=lambda node: node.id)
    cache.host.leaves.hold(first)
    cache.host.leaves.hold(first)
    assert cache.evict_host(2) == 2
    assert first.host_value is not None
    assert cache.evict_host(9) == 1
    cache.host.leaves.release(first)
    assert cache.evict_host(1) == 0, "it has another lock"
    cache.host.leaves.release(first)
    assert cache.evict_host(1) == 1
    check_cache(cache)


def test_leaves_that_are_locked_cost_an_eviction_nothing(monkeypatch):
    cache, looked_at = host_tier(500, "write_through", monkeypatch)
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
    cache, _ = host_tier(4, "write_back", monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(cache.cache_controller, "write", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cache.evict(EvictParams(2))
    check_cache(cache)
    assert cache.evict(EvictParams(4)).num_tokens_evicted == 4


def test_use_counts_on_the_host_too():
    """Under `mru`, the node that was just matched is evicted first, although it was older when it was queued."""
    cache = make_cache("hiradix", 4, 5, "mru")
    for leaf in range(4):
        insert(cache, [leaf])
    cache.evict(EvictParams(4))
    assert cache.evict_host(1) == 1
    cache.match_prefix(MatchPrefixParams(RadixKey([1])))
    check_cache(cache)
    cache.evict_host(1)
    assert sorted(int(node.key.raw[0]) for node in cache.evictable_host_leaves) == [0, 2]
