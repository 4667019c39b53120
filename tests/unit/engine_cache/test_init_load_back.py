"""Load-backs of a match that has changed since. The result for the scheduler is the same in both classes."""

import numpy as np
import pytest

from engine_cache import CacheStateError, EvictParams, InitLoadBackParams
from tests.support.caches.hybrid_rig import HybridRig
from tests.support.caches.hybrid_steps import node_of
from tests.support.caches.tier_rig import Rig

pytestmark = pytest.mark.torch
TURNS = [[1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]


@pytest.fixture(params=[Rig, HybridRig])
def make(request):
    return request.param


@pytest.fixture
def rig(make):
    """Three turns on both tiers, with one node and, if the class has states, one state each."""
    rig = make()
    for turn in TURNS:
        rig.insert(turn)
        rig.settle()
    yield rig
    rig.check()


def init_load_back(rig, node):
    rows, node = rig.cache.init_load_back(InitLoadBackParams(node, 2))
    assert rows.tolist() == []
    return node


def test_a_node_that_was_deleted_stands_for_what_it_hung_below(rig):
    rig.cache.evict(EvictParams(2))
    match = rig.match(TURNS[2])
    assert match.host_hit_length == 2
    locked = rig.cache.inc_lock_ref(match.last_device_node).node
    rig.cache.evict_host(2)
    assert init_load_back(rig, match.best_match_node) is match.last_device_node is node_of(rig, TURNS[1])
    rig.cache.dec_lock_ref(locked)


def test_so_does_a_path_that_was_deleted_one_by_one(rig):
    rig.cache.evict(EvictParams(4))
    match = rig.match(TURNS[2])
    rig.cache.inc_lock_ref(match.last_device_node)
    rig.cache.evict_host(2)
    rig.cache.evict_host(2)
    assert init_load_back(rig, match.best_match_node) is node_of(rig, TURNS[0])
    rig.cache.dec_lock_ref(match.last_device_node)


def test_what_is_left_may_have_left_the_device_since(rig):
    rig.cache.evict(EvictParams(2))
    match = rig.match(TURNS[2])
    rig.cache.evict_host(2)
    rig.cache.evict(EvictParams(2))
    assert init_load_back(rig, match.best_match_node) is node_of(rig, TURNS[0])


def test_a_node_that_was_split_since_is_still_the_deeper_part(make):
    rig = make()
    rig.insert(TURNS[1])
    rig.insert(TURNS[2])
    rig.settle()
    rig.cache.evict(EvictParams(2))
    match = rig.match(TURNS[2])
    rig.cache.evict_host(2)
    rig.match(TURNS[0])
    assert init_load_back(rig, match.best_match_node) is node_of(rig, TURNS[1])
    rig.check()


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_node_that_is_on_no_tier_is_not_returned(make, tier):
    rig = make()
    held = rig.host.alloc(rig.host.size) if tier == "device" else np.empty(0, np.int64)
    rig.insert(TURNS[0])
    rig.settle()
    node = node_of(rig, TURNS[0])
    rig.cache.evict(EvictParams(2))
    rig.cache.evict_host(2)
    assert list(rig.walk()) == []
    assert init_load_back(rig, node) is rig.cache.root_node
    rig.host.free(held)
    rig.check()


def test_a_deleted_node_can_be_neither_loaded_nor_locked(rig):
    rig.cache.evict(EvictParams(2))
    node = node_of(rig, TURNS[2])
    rig.cache.evict_host(2)
    assert rig.cache.load_back(node) is None
    with pytest.raises(CacheStateError, match=f"node {node.id} "):
        rig.cache.inc_lock_ref(node)


def test_nothing_is_found_of_a_tree_that_was_reset(rig):
    for demote in (False, True):
        if demote:
            rig.insert(TURNS[0])
            rig.settle()
            rig.cache.evict(EvictParams(2))
        node = node_of(rig, TURNS[0])
        rig.cache.reset()
        rig.pool.clear()
        if isinstance(rig, HybridRig):
            rig.slots.clear()
        with pytest.raises(CacheStateError, match="is not below root"):
            rig.cache.init_load_back(InitLoadBackParams(node, 2))


def test_with_states_the_way_up_ends_at_one_on_the_device():
    rig = HybridRig()
    for turn in TURNS:
        rig.insert(turn)
        rig.settle()
    rig.cache.evict(EvictParams(2))
    match = rig.match(TURNS[2])
    rig.cache.evict_host(2)
    rig.cache.states.free_on_device(node_of(rig, TURNS[1]))
    assert init_load_back(rig, match.best_match_node) is node_of(rig, TURNS[0])
    rig.cache.states.free_on_device(node_of(rig, TURNS[0]))
    assert init_load_back(rig, match.best_match_node) is rig.cache.root_node
    rig.check()
