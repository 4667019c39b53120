"""A state that is inserted after the KV of its node was backed up is copied to the host separately."""

import pytest

from engine_cache import EvictParams, Lane
from tests.support.caches.hybrid_rig import HybridRig
from tests.support.caches.hybrid_steps import demoted, node_of, two_turns

pytestmark = pytest.mark.torch


def test_a_late_state_of_a_shared_prefix_reaches_the_host_at_the_first_hit():
    rig = HybridRig(page_size=1, device_pages=16, host_pages=24)
    rig.insert([1, 1, 2, 2])
    rig.insert([1, 1, 3, 3])
    rig.settle()
    rig.insert([1, 1])
    rig.settle()
    assert node_of(rig, [1, 1]).mamba_host_value is not None
    rig.check()


def test_it_takes_no_page_and_no_event(rig, late):
    free = rig.host.available_size(), rig.host_states.available_size()
    rig.insert([1, 2])
    assert (rig.host.available_size(), rig.host_states.available_size()) == (free[0], free[1] - 1)
    rig.settle()
    assert rig.events() == []
    assert late.write_through_pending_id is None


def test_the_copy_outlives_the_state_on_the_device(rig, in_flight):
    rig.settle()
    rig.cache.evict(EvictParams(100))
    assert in_flight.mamba_value is None
    match = rig.match([1, 2])
    assert (match.host_hit_length, match.mamba_host_hit_length) == (2, 1)
    rig.load_back([1, 2])
    rig.settle()  # the fixture then compares the bytes


def test_state_and_slot_stay_until_the_copy_is_acknowledged(rig, in_flight):
    rig.cache.evict(EvictParams(100, mamba_num=5))
    rig.cache.evict_mamba_host(5)
    assert in_flight.value is not None
    assert in_flight.mamba_value is not None
    assert in_flight.mamba_host_value is not None
    rig.settle()
    assert (in_flight.lock_ref, in_flight.host_mamba_ref_counter) == (0, 0)
    assert rig.cache.evict_mamba_host(1) == 1


def test_one_copy_at_a_time(rig, in_flight):
    rig.insert([1, 2])
    assert not rig.cache.host.backups.write_late(in_flight)
    assert rig.engine.num_queued(Lane.WRITE) == 1


def test_it_waits_for_as_many_hits_as_kv_does():
    rig = HybridRig(write_policy="write_through_selective")
    for _ in range(2):
        rig.insert([1, 2])
    rig.settle()
    node = node_of(rig, [1, 2])
    rig.cache.evict_mamba_host(1)
    node.hit_count = 0
    rig.insert([1, 2])
    assert node.mamba_host_value is None
    rig.insert([1, 2])
    assert node.mamba_host_value is not None
    rig.settle()
    rig.check()


def test_a_chunk_of_a_prompt_starts_no_copy(rig, late):
    rig.insert([1, 2], chunked=True)
    assert late.mamba_value is not None
    assert late.mamba_host_value is None


def test_a_state_that_host_eviction_took_comes_back_at_the_next_hit(rig):
    upper, _ = two_turns(rig)
    rig.cache.evict_mamba_host(1)
    assert upper.mamba_host_value is None
    rig.insert([1, 2])
    rig.settle()
    assert upper.mamba_host_value is not None


def test_a_part_of_a_prompt_that_is_computed_again_has_its_new_state_copied(rig):
    demoted(rig, [1, 2, 3, 4])
    rig.match([1, 2])
    rig.insert([1, 2])  # was on the host only
    rig.settle()
    assert node_of(rig, [1, 2]).mamba_host_value is not None


# --- no room, failures ---


def test_without_a_slot_nothing_is_taken_and_a_later_hit_heals(rig, late):
    held = rig.host_states.alloc(rig.host_states.available_size())
    rig.cache.states.lock_host(node_of(rig, [1, 2, 3, 4]))
    rig.insert([1, 2])
    assert (late.mamba_host_value, late.lock_ref, late.host_mamba_ref_counter) == (None, 0, 0)
    assert rig.engine.num_queued(Lane.WRITE) == 0
    rig.host_states.free(held)
    rig.cache.states.unlock_host(node_of(rig, [1, 2, 3, 4]))
    rig.insert([1, 2])
    rig.settle()
    assert late.mamba_host_value is not None


def test_it_takes_the_slot_of_the_least_recent_state(rig, late):
    held = rig.host_states.alloc(rig.host_states.available_size())
    rig.insert([1, 2])
    assert late.mamba_host_value is not None
    assert node_of(rig, [1, 2, 3, 4]).mamba_host_value is None
    rig.host_states.free(held)
    rig.settle()


def test_a_copy_that_fails_gives_the_slot_back_leaves_the_node_as_it_was_and_heals(rig, in_flight):
    rig.host_states.write_faults = 2
    free = rig.host_states.available_size()
    rig.settle()
    assert rig.cache.num_failed_backups == 1
    assert rig.host_states.available_size() == free + 1
    assert (in_flight.mamba_host_value, in_flight.lock_ref, in_flight.host_mamba_ref_counter) == (None, 0, 0)
    assert in_flight.host_value is not None
    assert in_flight.mamba_value is not None
    rig.insert([1, 2])
    rig.settle()
    assert in_flight.mamba_host_value is not None
    assert rig.events() == []


def test_an_engine_that_refuses_leaves_all_as_it_was(rig, late, monkeypatch):
    def refuse(lane, steps):
        raise RuntimeError("closed")

    free = rig.host_states.available_size()
    slot = rig.slots.alloc(1)
    rig.write_state(slot, 0)
    rig.cache.states.put_on_device(late, slot)
    with monkeypatch.context() as patch:
        patch.setattr(rig.engine, "submit", refuse)
        with pytest.raises(RuntimeError, match="closed"):
            rig.cache.host.backups.write_late(late)
    assert (late.mamba_host_value, late.lock_ref, late.host_mamba_ref_counter) == (None, 0, 0)
    assert rig.host_states.available_size() == free
    rig.cache.evict_mamba(5)


def test_a_state_that_is_there_is_not_written_again(rig):
    upper, _ = two_turns(rig)
    assert not rig.cache.host.backups.write_late(upper)
    assert rig.engine.num_queued(Lane.WRITE) == 0


def test_a_node_without_kv_on_the_host_or_a_state_has_nothing_to_copy(full_host):
    full_host.insert([1, 2, 3, 4])
    full_host.match([1, 2])
    for tokens in ([1, 2], [1, 2, 3, 4]):
        assert not full_host.cache.host.backups.write_late(node_of(full_host, tokens))
