import pytest

from engine_cache import EvictParams, EvictResult, InitLoadBackParams, Request, TransferError
from tests.support.caches.hybrid_rig import HybridRig
from tests.support.caches.hybrid_steps import GPU, demoted, node_of, removed, stored, tombstone_and_leaf, two_turns

pytestmark = pytest.mark.torch


def test_a_load_back_reports_the_device_top_down_and_keeps_the_host(rig):
    two_turns(rig)
    rig.cache.evict(EvictParams(4))
    rig.cache.take_events()
    rows, node = rig.load_back([1, 2, 3, 4])
    assert rig.events() == stored(GPU, [1, 2], [3, 4])
    assert (len(rows), node) == (4, node_of(rig, [1, 2, 3, 4]))
    rig.settle()
    assert rig.events() == []
    assert node.mamba_value is not None
    assert node_of(rig, [1, 2]).mamba_value is None


def test_a_load_that_only_restores_the_state_is_silent(rig):
    upper, _ = two_turns(rig)
    rig.cache.evict(EvictParams(0, mamba_num=1))
    match = rig.match([1, 2])
    assert (len(match.device_indices), match.host_hit_length, match.mamba_host_hit_length) == (2, 0, 1)
    rows, node = rig.load_back([1, 2])
    assert (len(rows), node) == (0, upper)
    rig.settle()
    assert rig.events() == []
    assert rig.match([1, 2]).mamba_host_hit_length == 0


def test_a_request_gets_a_copy_of_the_state_that_is_loaded(rig):
    demoted(rig, [1, 2])
    rig.load_back([1, 2], with_request=True)
    (req,) = rig.loaded
    assert rig.slots.available_size() == rig.slots.size - 2
    rig.settle()
    rig.check()  # compares the request's state, too
    rig.end_request()
    assert req.mamba_cow_src_index is None


def test_a_request_keeps_the_slot_it_has_for_the_state_that_is_loaded(rig):
    demoted(rig, [1, 2])
    slot = rig.slots.alloc(1)
    req = Request("r", [], 0, mamba_pool_idx=slot)
    match = rig.match([1, 2])
    rig.cache.init_load_back(InitLoadBackParams(match.best_match_node, match.host_hit_length, req=req))
    assert req.mamba_pool_idx is slot
    assert rig.slots.available_size() == rig.slots.size - 2
    rig.slots.free(slot)


def test_neither_threshold_nor_quota_hold_a_state_back():
    rig = HybridRig(load_back_threshold=100)
    demoted(rig, [1, 2])
    rows, _ = rig.load_back([1, 2], mem_quota=0)
    assert len(rows) == 2


def test_kv_without_a_state_is_held_to_threshold_and_quota(rig):
    tombstone_and_leaf(rig)
    rig.cache.evict(EvictParams(4))
    node = node_of(rig, [1, 2])
    assert rig.cache.load_back(node, mem_quota=1) is None
    rig.cache.host.loads.threshold = 3
    assert rig.cache.load_back(node) is None
    rig.cache.host.loads.threshold = 2
    assert len(rig.cache.load_back(node, mem_quota=2)) == 2


def test_a_load_without_room_changes_nothing_and_ends_at_the_deepest_state_on_the_device(rig):
    upper, lower = two_turns(rig)
    rig.cache.evict(EvictParams(2))
    rig.cache.inc_lock_ref(upper)
    held = rig.slots.alloc(rig.slots.available_size())
    rig.cache.take_events()
    free = rig.pool.available_size()
    assert rig.load_back([1, 2, 3, 4])[1] is upper
    assert rig.events() == []
    assert rig.pool.available_size() == free
    assert (lower.host_ref_counter, lower.host_mamba_ref_counter) == (0, 0)
    rig.cache.dec_lock_ref(upper)
    rig.slots.free(held)


def test_a_load_makes_room_for_kv_and_state():
    rig = HybridRig(device_pages=2, slots=1, host_slots=3)
    demoted(rig, [1, 2, 3, 4])
    rig.insert([5, 6, 7, 8])
    rig.settle()
    rig.cache.take_events()
    rig.load_back([1, 2, 3, 4])
    assert rig.events() == removed(GPU, 2) + stored(GPU, [1, 2], [3, 4])
    rig.settle()
    rig.check()


def test_a_load_is_a_use(rig):
    demoted(rig, [1, 2])
    rig.insert([3, 4])
    rig.settle()
    rig.cache.load_back(node_of(rig, [1, 2]))
    rig.settle()
    assert rig.cache.evict(EvictParams(0, mamba_num=1)) == EvictResult(2, 1)
    assert rig.match([3, 4]).host_hit_length == 2
    rig.check()


def test_the_host_state_stays_while_it_is_loaded(rig):
    demoted(rig, [1, 2])
    rig.load_back([1, 2])
    assert rig.cache.evict_mamba_host(1) == 0
    rig.settle()
    assert rig.cache.evict_mamba_host(1) == 1


def test_a_load_that_fails_is_an_error_until_the_cache_is_reset(rig):
    demoted(rig, [1, 2])
    rig.load_back([1, 2])
    rig.host.load_faults = 2
    with pytest.raises(TransferError, match="injected load fault"):
        rig.settle()
    rig.cache.reset()
    rig.pool.clear()
    rig.slots.clear()
    assert rig.insert([1, 2]) is not None
