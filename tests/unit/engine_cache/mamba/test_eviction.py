import pytest

from engine_cache import (
    CacheStateError,
    EvictParams,
    EvictResult,
    InsertParams,
    MatchPrefixParams,
    RadixCache,
    RadixKey,
)
from kv_events.schema import BlockRemoved
from tests.support.caches.mamba_rig import Rig, tokens_of


def test_losing_the_state_of_an_inner_node_is_silent_and_leaves_its_kv(rig):
    rig.insert([1, 2])
    rig.insert([1, 2, 3, 4])
    rig.cache.take_events()
    assert rig.cache.evict(EvictParams(0, mamba_num=1)) == EvictResult(0, 1)
    assert rig.slots.available_size() == 7
    assert rig.cache.take_events() == []
    assert rig.match([1, 2]).device_indices.tolist() == []
    assert len(rig.match([1, 2, 3, 4]).device_indices) == 4


def test_losing_the_state_of_a_leaf_removes_its_kv(rig):
    rig.insert([1, 2])
    rig.cache.take_events()
    assert rig.cache.evict_mamba(1) == EvictResult(2, 1)
    assert tokens_of(rig.cache.take_events()) == [BlockRemoved, BlockRemoved]
    assert (rig.slots.available_size(), rig.pool.available_size()) == (8, 64)


def test_tombstones_above_an_evicted_leaf_go_with_it_children_first(rig):
    rig.insert([1])
    rig.insert([1, 2])
    rig.insert([1, 2, 3])
    names = [event.block_hashes for event in rig.cache.take_events()]
    rig.cache.evict_mamba(2)
    assert rig.cache.evict_full(1) == EvictResult(3, 1)
    assert [event.block_hashes for event in rig.cache.take_events()] == names[::-1]


def test_the_cascade_stops_at_a_state(rig):
    rig.insert([1])
    rig.insert([1, 2, 3])
    rig.match([1, 2])
    assert rig.cache.evict_full(1) == EvictResult(2, 1)
    assert len(rig.match([1, 2, 3]).device_indices) == 1


def test_the_cascade_stops_at_a_node_with_other_children(rig):
    rig.insert([1, 2])
    rig.insert([1, 3])
    assert rig.cache.evict_full(1) == EvictResult(1, 1)
    assert len(rig.match([1, 3]).device_indices) == 2


def test_the_oldest_leaf_goes_first_and_then_its_parent_if_that_is_older_still(rig):
    rig.insert([1])
    rig.insert([1, 2])
    rig.insert([5])
    assert rig.cache.evict_full(2) == EvictResult(2, 2)
    assert len(rig.match([5]).device_indices) == 1


def test_a_parent_that_was_used_later_than_another_leaf_stays_longer(rig):
    rig.insert([1])
    rig.insert([1, 2])
    rig.insert([5])
    rig.match([1])
    assert rig.cache.evict_full(2) == EvictResult(2, 2)
    assert len(rig.match([1]).device_indices) == 1


def test_states_go_in_the_order_of_their_own_use(rig):
    for tokens in ([1], [1, 2], [5], [5, 6]):
        rig.insert(tokens)
    rig.match([1])
    rig.cache.evict_mamba(2)
    assert [len(rig.match(tokens).device_indices) for tokens in ([1], [1, 2], [5], [5, 6])] == [1, 1, 0, 2]


def test_kv_goes_before_states_and_each_only_if_asked(rig):
    for token in range(4):
        rig.insert([token])
    assert rig.cache.evict(EvictParams(0)) == EvictResult(0, 0)
    assert rig.cache.evict(EvictParams(1)) == EvictResult(1, 1)
    assert rig.cache.evict(EvictParams(1, mamba_num=1)) == EvictResult(2, 2)


def test_locks_keep_the_way_and_the_state_but_not_the_states_on_the_way(rig):
    rig.insert([1])
    rig.insert([1, 2])
    node = rig.lock([1, 2])
    assert (rig.cache.protected_size(), rig.cache.states.protected_size) == (2, 1)
    assert rig.cache.evict(EvictParams(9, mamba_num=9)) == EvictResult(0, 1)
    assert len(rig.match([1, 2]).device_indices) == 2
    assert rig.match([1]).device_indices.tolist() == []
    rig.cache.dec_lock_ref(node)
    assert (rig.cache.states.evictable_size, rig.cache.states.protected_size) == (1, 0)


def test_a_tombstone_that_loses_its_last_child_under_a_lock_goes_when_unlocked(rig):
    rig.insert([1, 2, 3])
    rig.match([1, 2])
    tombstone = rig.node([1, 2])
    rig.cache.inc_lock_ref(tombstone)
    rig.cache.evict_full(1)
    assert rig.cache.protected_size() == 2
    rig.cache.dec_lock_ref(tombstone)
    assert rig.cache.root_node.children == {}
    assert rig.pool.available_size() == 64


def test_a_state_given_to_a_locked_tombstone_is_locked(rig):
    rig.insert([1, 2, 3])
    rig.match([1, 2])
    tombstone = rig.node([1, 2])
    rig.cache.inc_lock_ref(tombstone)
    rig.insert([1, 2])
    assert rig.cache.states.protected_size == 1
    assert rig.cache.evict_mamba(9).mamba_num_evicted == 1
    rig.cache.dec_lock_ref(tombstone)
    assert rig.cache.states.evictable_size == 1


def test_unlocking_a_node_that_only_a_deeper_lock_holds_raises_and_changes_nothing(rig):
    rig.insert([1])
    rig.insert([1, 2])
    node = rig.lock([1, 2])
    with pytest.raises(CacheStateError, match="mamba_lock_ref 0"):
        rig.cache.dec_lock_ref(node.parent)
    assert node.parent.lock_ref == 1
    rig.cache.dec_lock_ref(node)


def test_the_root_is_locked_and_unlocked_for_free(rig):
    assert rig.cache.inc_lock_ref(rig.cache.root_node).delta == 0
    assert rig.cache.dec_lock_ref(rig.cache.root_node).delta == 0


def test_nodes_of_other_trees_are_refused(rig):
    other = Rig()
    other.insert([1])
    foreign = other.lock([1])
    plain = RadixCache(page_size=1)
    plain.insert(InsertParams(RadixKey([1])))
    for method in (rig.cache.inc_lock_ref, rig.cache.dec_lock_ref):
        for node in (foreign, plain.match_prefix(MatchPrefixParams(RadixKey([1]))).last_device_node):
            with pytest.raises(CacheStateError):
                method(node)
