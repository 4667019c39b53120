"""The order of eviction: which node goes first, and which part of a split node counts as used."""

import numpy as np
import pytest

from engine_cache import EvictParams, InsertParams, MatchPrefixParams, RadixCache, RadixKey
from engine_cache.tree.eviction import EVICTION_POLICIES, find_policy
from tests.models.cache_checks import check_cache
from tests.rigs.cache import AB, ABC, A, rigs

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


@rigs("hiradix", page_size=1, eviction_policy="mru")
def test_a_match_counts_as_a_use_of_leaves_on_the_host(rig):
    """Under `mru`, the node that was just matched is evicted first, although it was older when it was queued."""
    rig.demoted([0], [1], [2], [3])
    assert rig.cache.evict_host(1) == 1
    rig.match([1])
    rig.check()
    assert rig.cache.evict_host(1) == 1
    assert [rig.match([token]).host_hit_length for token in range(4)] == [1, 0, 1, 0]


def test_an_unknown_policy_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'random'.*lru, lfu, fifo, mru, filo, priority, slru"):
        find_policy("random")


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


SELECTIVE = {"page_size": 1, "window": 2, "swa_pages": 8, "write_policy": "write_through_selective"}


@rigs("unified+swa", **SELECTIVE)
def test_of_a_leaf_cut_at_the_window_only_the_lower_part_has_the_hit(rig):
    rig.turns([1, 2, 3, 4], [1, 2])
    assert rig.ends("full", "host_value") == set()
    rig.turns([1, 2, 3, 4])
    assert rig.ends("full", "host_value") == {(1, 2), (1, 2, 3, 4)}
