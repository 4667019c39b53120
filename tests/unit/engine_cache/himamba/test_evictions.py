import pytest

from engine_cache import EvictParams, EvictResult
from tests.support.caches.hybrid_rig import HybridRig
from tests.support.caches.hybrid_steps import CPU, GPU, demoted, node_of, removed, stored, tombstone_and_leaf, two_turns

pytestmark = pytest.mark.torch


def test_a_backed_up_node_leaves_the_device_with_its_state_and_stays_on_the_host(rig):
    rig.insert([1, 2, 3, 4])
    rig.settle()
    rig.cache.take_events()
    assert rig.cache.evict(EvictParams(4)) == EvictResult(4, 1)
    assert rig.events() == removed(GPU, 2)
    match = rig.match([1, 2, 3, 4])
    assert (len(match.device_indices), match.host_hit_length, match.mamba_host_hit_length) == (0, 4, 1)
    assert match.last_host_node is match.best_match_node is node_of(rig, [1, 2, 3, 4])


def test_a_node_whose_state_has_no_host_copy_is_no_end_of_a_match_once_it_is_evicted(rig):
    two_turns(rig)
    rig.cache.evict_mamba_host(2)
    rig.cache.evict(EvictParams(2))
    match = rig.match([1, 2, 3, 4])
    assert (len(match.device_indices), match.host_hit_length) == (2, 0)
    assert match.mamba_branching_seqlen is None


def test_a_node_that_was_never_backed_up_is_deleted_with_its_tombstones_children_first(full_host):
    full_host.insert([1, 2, 3, 4])
    full_host.match([1, 2])
    full_host.cache.take_events()
    assert full_host.cache.evict(EvictParams(1)) == EvictResult(4, 1)
    assert full_host.events() == removed(GPU, 2)
    assert list(full_host.walk()) == []


def test_host_eviction_deletes_the_node_with_its_state(rig):
    demoted(rig, [1, 2])
    assert rig.cache.evict_host(1) == 2
    assert rig.events() == removed(CPU)
    assert rig.host_states.available_size() == rig.host_states.size
    assert rig.match([1, 2]).host_hit_length == 0


def test_a_tombstone_that_lost_its_last_child_goes_from_both_tiers(rig):
    tombstone_and_leaf(rig)
    rig.cache.evict(EvictParams(2))
    assert rig.events() == removed(GPU)
    assert rig.cache.evict_host(1) == 4
    assert rig.events() == removed(CPU) + removed(GPU) + removed(CPU)
    assert list(rig.walk()) == []


@pytest.mark.parametrize("hold", ["lock_ref", "host_ref_counter"])
def test_a_tombstone_in_use_stays(rig, hold):
    upper, _ = tombstone_and_leaf(rig)
    rig.cache.evict(EvictParams(2))
    if hold == "lock_ref":
        rig.cache.inc_lock_ref(upper)
    else:
        rig.cache.host.leaves.hold(upper)
    assert rig.cache.evict_host(1) == 2
    assert rig.events() == removed(GPU) + removed(CPU)
    assert [node for node, _, _ in rig.walk()] == [upper]
    if hold == "lock_ref":
        rig.cache.dec_lock_ref(upper)
    else:
        rig.cache.host.leaves.release(upper)


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_cascade_ends_at_a_state_on_either_tier(rig, tier):
    upper, _ = two_turns(rig)
    rig.cache.evict(EvictParams(2))
    rig.cache.evict_mamba(1) if tier == "host" else rig.cache.evict_mamba_host(1)
    rig.cache.take_events()
    rig.cache.evict_host(1)
    assert [node for node, _, _ in rig.walk()] == [upper]


def test_losing_the_state_of_an_inner_node_is_silent_on_either_tier(rig):
    upper, _ = two_turns(rig)
    assert rig.cache.evict(EvictParams(0, mamba_num=1)) == EvictResult(0, 1)
    assert rig.cache.evict_mamba_host(1) == 1
    assert rig.events() == []
    assert (upper.mamba_value, upper.mamba_host_value) == (None, None)
    match = rig.match([1, 2, 3, 4])
    assert (len(match.device_indices), rig.match([1, 2]).host_hit_length) == (4, 0)


def test_losing_the_state_of_a_leaf_demotes_it(rig):
    two_turns(rig)
    assert rig.cache.evict(EvictParams(0, mamba_num=2)) == EvictResult(2, 2)
    assert rig.events() == removed(GPU)
    assert node_of(rig, [1, 2, 3, 4]).mamba_host_value is not None


def test_a_node_whose_children_are_on_the_host_only_keeps_its_kv_when_its_state_goes(rig):
    upper, _ = two_turns(rig)
    rig.cache.evict(EvictParams(2))
    rig.cache.take_events()
    assert rig.cache.evict(EvictParams(0, mamba_num=1)) == EvictResult(0, 1)
    assert rig.events() == []
    assert upper.mamba_host_value is not None


def test_a_host_state_of_a_node_on_the_host_only_goes_with_all_it_has(rig):
    two_turns(rig)
    rig.cache.evict(EvictParams(4))
    rig.cache.take_events()
    assert rig.cache.evict_mamba_host(2) == 2
    assert rig.events() == removed(CPU, 2)  # the leaf, and its parent, which was a tombstone by then
    assert list(rig.walk()) == []


def test_states_on_the_host_go_in_the_order_of_their_use(rig):
    for token in (1, 2, 3):
        demoted(rig, [token, token])
    rig.match([1, 1])
    rig.cache.evict_mamba_host(1)
    assert [rig.match([token, token]).host_hit_length for token in (1, 2, 3)] == [2, 0, 2]


def test_write_back_reports_the_host_before_it_leaves_the_device():
    rig = HybridRig(write_policy="write_back")
    rig.insert([1, 2])
    rig.insert([1, 2, 3, 4])
    rig.cache.take_events()
    assert rig.cache.evict(EvictParams(4)) == EvictResult(4, 2)
    assert rig.events() == stored(CPU, [3, 4]) + stored(CPU, [1, 2]) + removed(GPU, 2)
    rig.check()
    assert rig.match([1, 2, 3, 4]).host_hit_length == 4


def test_write_back_of_a_leaf_for_its_state_keeps_the_leaf_if_its_copy_fails():
    rig = HybridRig(write_policy="write_back")
    rig.insert([1, 2])
    rig.cache.take_events()
    rig.host_states.write_faults = 2
    assert rig.cache.evict(EvictParams(0, mamba_num=1)) == EvictResult(0, 0)
    assert rig.events() == []
    assert rig.cache.evict(EvictParams(0, mamba_num=1)) == EvictResult(2, 1)
    assert rig.events() == stored(CPU, [1, 2]) + removed(GPU)
    rig.check()


def test_room_for_a_write_back_does_not_take_the_tombstone_that_is_written():
    rig = HybridRig(write_policy="write_back", device_pages=4, host_pages=5)
    upper, _ = tombstone_and_leaf(rig)
    rig.cache.evict(EvictParams(2))
    held = rig.host.alloc(rig.host.available_size())
    assert rig.cache.evict(EvictParams(2)) == EvictResult(2, 0)
    assert rig.events() == stored(CPU, [3, 4]) + removed(GPU) + removed(CPU) + stored(CPU, [1, 2]) + removed(GPU)
    assert [node for node, _, _ in rig.walk()] == [upper]
    rig.host.free(held)
    rig.check()
