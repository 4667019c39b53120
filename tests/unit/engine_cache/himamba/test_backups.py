import pytest

from engine_cache import EvictParams, EvictResult, Lane, StoragePolicy
from engine_cache.storage.base import PoolName
from tests.support.caches.hybrid_rig import HybridRig
from tests.support.caches.hybrid_steps import CPU, GPU, demoted, node_of, removed, stored
from tests.support.caches.tier_rig import MemoryStorage

pytestmark = pytest.mark.torch


def test_pages_are_reported_on_the_device_at_once_and_on_the_host_when_acknowledged(rig):
    rig.insert([1, 2, 3, 4])
    assert rig.events() == stored(GPU, [1, 2], [3, 4])
    rig.cache.writing_check()
    rig.engine.step(Lane.WRITE)
    assert rig.events() == []
    rig.cache.writing_check()
    assert rig.events() == stored(CPU, [1, 2], [3, 4])
    rig.cache.writing_check()
    assert rig.events() == []


def test_a_state_is_copied_along_with_its_kv(rig):
    rig.insert([1, 2])
    node = node_of(rig, [1, 2])
    assert len(node.mamba_host_value) == 1
    assert rig.engine.num_queued(Lane.WRITE) == 1
    rig.settle()  # the fixture then compares the bytes


def test_kv_and_state_are_kept_on_both_tiers_while_they_are_copied(rig):
    rig.insert([1, 2])
    node = node_of(rig, [1, 2])
    assert rig.cache.evict(EvictParams(2, mamba_num=1)) == EvictResult(0, 0)
    assert rig.cache.evict_mamba_host(1) == 0
    rig.settle()
    assert node.host_mamba_ref_counter == 0
    assert rig.cache.evict_mamba_host(1) == 1


def test_all_parts_of_a_node_that_was_split_while_pending_are_reported_and_archived_parents_first(rig):
    store = MemoryStorage()
    rig.cache.attach_storage_backend(store, StoragePolicy())
    rig.insert([1, 2, 3, 4, 5, 6])
    rig.match([1, 2])
    rig.cache.take_events()
    rig.engine.step(Lane.WRITE)
    rig.cache.writing_check()
    assert rig.events() == stored(CPU, [1, 2], [3, 4], [5, 6])
    rig.settle()
    assert [name for name, _ in store.pages] == [PoolName.KV, PoolName.MAMBA, PoolName.KV, PoolName.KV]


def test_without_room_for_the_state_nothing_is_taken_and_nothing_reported(rig):
    held = rig.host_states.alloc(rig.host_states.size)
    rig.insert([1, 2])
    node = node_of(rig, [1, 2])
    assert (node.host_value, node.mamba_host_value, node.lock_ref) == (None, None, 0)
    assert rig.host.available_size() == rig.host.size
    rig.settle()
    assert rig.events() == stored(GPU, [1, 2])
    rig.host_states.free(held)
    assert rig.cache.write_backup(node) == 2


def test_a_backup_without_room_for_kv_takes_no_slot(full_host):
    full_host.insert([1, 2])
    assert full_host.host_states.available_size() == full_host.host_states.size
    assert full_host.events() == stored(GPU, [1, 2])


def test_a_backup_takes_the_slot_of_the_least_recent_state():
    rig = HybridRig(slots=3, host_slots=4)
    for token in (1, 2, 3, 4):
        demoted(rig, [token, token])
    rig.match([1, 1])
    rig.insert([5, 5])
    assert rig.events() == stored(GPU, [5, 5]) + removed(CPU)
    assert rig.match([2, 2]).host_hit_length == 0
    assert rig.match([1, 1]).host_hit_length == 2
    rig.settle()
    rig.check()


@pytest.mark.parametrize("pool", ["host", "host_states"])
def test_a_copy_that_fails_emits_nothing_frees_all_it_took_and_heals(rig, pool):
    rig.insert([1, 2, 3, 4])
    rig.match([1, 2])
    getattr(rig, pool).write_faults = 2
    rig.settle()
    assert rig.events() == stored(GPU, [1, 2], [3, 4])
    assert rig.cache.num_failed_backups == 1
    assert rig.host.available_size() == rig.host.size
    assert rig.host_states.available_size() == rig.host_states.size
    rig.insert([1, 2, 3, 4])
    rig.settle()
    assert rig.events() == stored(CPU, [1, 2], [3, 4])


def test_states_below_a_failed_copy_are_dropped_once_they_are_written(rig):
    rig.insert([1, 2])
    rig.insert([1, 2, 3, 4])
    rig.host.write_faults = 2
    rig.engine.step(Lane.WRITE)
    rig.cache.writing_check()
    below = node_of(rig, [1, 2, 3, 4])
    assert (below.host_value, below.mamba_host_value, below.host_mamba_ref_counter) == (None, None, 0)
    assert rig.host_states.available_size() == rig.host_states.size - 1
    rig.settle()
    assert rig.host_states.available_size() == rig.host_states.size
