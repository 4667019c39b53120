"""The separate copy of a state, concurrent with copies of KV, changes of the tree and archives."""

import pytest

from engine_cache import EvictParams, Lane, StoragePolicy
from engine_cache.storage.base import PoolName
from tests.support.caches.hybrid_rig import HybridRig
from tests.support.caches.hybrid_steps import CPU, GPU, node_of, removed, stored, tombstone_and_leaf
from tests.support.caches.tier_rig import MemoryStorage

pytestmark = pytest.mark.torch


@pytest.fixture
def both_pending(rig):
    """Backups of [1, 2] in flight: its KV, and then its state, which was inserted later."""
    rig.insert([1, 2, 3, 4])
    rig.match([1, 2])
    upper = node_of(rig, [1, 2])
    rig.insert([1, 2])
    assert upper.write_through_pending_id is not None
    assert rig.engine.num_queued(Lane.WRITE) == 2
    rig.cache.take_events()
    return upper


def test_a_state_that_comes_while_kv_is_copied_follows_it(rig, both_pending):
    rig.engine.step(Lane.WRITE)
    rig.cache.writing_check()
    assert rig.events() == stored(CPU, [1, 2], [3, 4])
    assert both_pending.host_mamba_ref_counter == 1
    assert rig.cache.evict_mamba_host(5) == 1  # the leaf's
    rig.settle()
    assert both_pending.host_mamba_ref_counter == 0
    assert rig.events() == []


@pytest.mark.parametrize("copies", [[(0, 2), (0, 0)], [(1, 0), (0, 2)]])
def test_if_kv_fails_the_state_goes_too_whichever_comes_first(rig, both_pending, copies):
    for position, rig.host.write_faults in copies:
        rig.engine.step(Lane.WRITE, position)
    rig.host.write_faults = 0
    rig.cache.writing_check()
    assert (both_pending.host_value, both_pending.mamba_host_value) == (None, None)
    assert (both_pending.lock_ref, both_pending.host_mamba_ref_counter) == (0, 0)
    assert rig.host_states.available_size() == rig.host_states.size
    rig.insert([1, 2])
    rig.settle()
    assert both_pending.mamba_host_value is not None


def test_the_slot_of_a_dropped_copy_is_nobodys_until_the_copy_has_ended(rig, both_pending):
    rig.host.write_faults = 2
    rig.engine.step(Lane.WRITE)
    rig.cache.writing_check()
    assert both_pending.mamba_host_value is None
    free = rig.host_states.available_size()
    rig.insert([1, 2])  # the same prompt again, with another slot
    rig.check()
    rig.engine.step(Lane.WRITE)
    rig.cache.writing_check()
    assert rig.host_states.available_size() == free
    assert both_pending.mamba_host_value is not None
    rig.settle()
    assert both_pending.host_mamba_ref_counter == 0


def test_the_state_belongs_to_the_lower_part_of_a_node_that_is_split_concurrently(rig):
    store = MemoryStorage()
    rig.cache.attach_storage_backend(store, StoragePolicy())
    rig.insert([1, 2, 3, 4, 5, 6])
    rig.match([1, 2, 3, 4])
    rig.settle()
    rig.insert([1, 2, 3, 4])
    rig.match([1, 2])
    upper, lower = node_of(rig, [1, 2]), node_of(rig, [1, 2, 3, 4])
    assert (upper.mamba_host_value, upper.host_mamba_ref_counter, upper.lock_ref) == (None, 0, 1)
    assert (len(lower.mamba_host_value), lower.host_mamba_ref_counter, lower.lock_ref) == (1, 1, 1)
    rig.settle()
    assert (upper.lock_ref, lower.lock_ref, lower.host_mamba_ref_counter) == (0, 0, 0)
    assert (PoolName.MAMBA, lower.hash_value[-1]) in store.pages


def test_eviction_goes_round_a_node_whose_state_is_copied(rig, in_flight):
    rig.cache.evict(EvictParams(100))
    assert rig.events() == removed(GPU)  # the leaf below
    rig.settle()
    rig.cache.evict(EvictParams(100))
    assert rig.events() == removed(GPU)


def test_after_a_reset_it_is_forgotten(rig, in_flight):
    rig.cache.reset()
    rig.pool.clear()
    rig.slots.clear()
    rig.settle()
    assert rig.host_states.available_size() == rig.host_states.size


# --- storage ---


def test_a_late_state_is_archived_when_it_is_acknowledged(rig):
    store = MemoryStorage()
    rig.cache.attach_storage_backend(store, StoragePolicy(emit_storage_events=True))
    upper, _ = tombstone_and_leaf(rig)
    pages = set(store.pages)
    rig.insert([1, 2])
    rig.engine.step(Lane.WRITE)
    assert set(store.pages) == pages
    rig.settle()
    assert set(store.pages) - pages == {(PoolName.MAMBA, upper.hash_value[-1])}
    assert (upper.host_ref_counter, upper.host_mamba_ref_counter) == (0, 0)
    assert rig.events() == []


def test_a_state_that_is_still_copied_is_not_archived_with_its_kv(rig):
    store = MemoryStorage()
    rig.cache.attach_storage_backend(store, StoragePolicy())
    rig.insert([1, 2, 3, 4])
    rig.match([1, 2])
    rig.insert([1, 2])
    rig.engine.step(Lane.WRITE)  # KV of both parts
    rig.cache.writing_check()
    while rig.engine.step(Lane.ARCHIVE):
        pass
    upper = node_of(rig, [1, 2])
    assert (PoolName.KV, upper.hash_value[-1]) in store.pages
    assert (PoolName.MAMBA, upper.hash_value[-1]) not in store.pages
    rig.settle()
    assert (PoolName.MAMBA, upper.hash_value[-1]) in store.pages


def test_another_cache_continues_from_a_late_state_in_the_store(rig):
    store = MemoryStorage()
    rig.cache.attach_storage_backend(store, StoragePolicy())
    tombstone_and_leaf(rig)
    rig.insert([1, 2])
    rig.settle()
    assert rig.cache.detach_storage_backend()[0]
    reader = HybridRig()
    reader.cache.attach_storage_backend(store, StoragePolicy(prefetch_threshold=1))
    reader.cache.prefetch_from_storage("r", reader.cache.root_node, [1, 2])
    reader.engine.drain()
    assert reader.cache.check_prefetch_progress("r")
    assert reader.match([1, 2]).mamba_host_hit_length == 1
    reader.settle()
    reader.check()
