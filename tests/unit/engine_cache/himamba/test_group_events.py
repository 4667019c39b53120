"""Group events of states that move between tiers."""

import pytest

from engine_cache import ComponentType, EvictParams, Lane, StoragePolicy
from kv_events.schema import AllBlocksCleared, BlockStored
from tests.support.caches.hybrid_rig import HybridRig
from tests.support.caches.hybrid_steps import CPU, GPU, node_of, tombstone_and_leaf
from tests.support.caches.tier_rig import MemoryStorage

pytestmark = pytest.mark.torch
STORE, REMOVE = "store", "remove"


@pytest.fixture
def rig():
    rig = HybridRig(emit_group_events=True)
    assert rig.cache.take_group_events() == {"mamba": [AllBlocksCleared()]}
    yield rig
    rig.check()


def reported(rig):
    """Return (kind, medium) of the group events since the last call."""
    events = rig.cache.take_group_events()["mamba"]
    return [(STORE if isinstance(event, BlockStored) else REMOVE, event.medium) for event in events]


def test_a_state_is_on_the_host_when_its_copy_is_acknowledged(rig):
    rig.insert([1, 2, 3, 4])
    assert reported(rig) == [(STORE, GPU)]
    while rig.engine.step(Lane.WRITE):
        pass
    assert reported(rig) == []
    rig.cache.writing_check()
    assert reported(rig) == [(STORE, CPU)]


def test_a_copy_that_failed_is_not_reported(rig):
    rig.host_states.write_faults = 2
    rig.insert([1, 2])
    rig.settle()
    assert reported(rig) == [(STORE, GPU)]


def test_a_state_that_follows_its_kv_is_reported_when_it_has_arrived(rig):
    upper, _ = tombstone_and_leaf(rig)
    reported(rig)
    rig.insert([1, 2])
    assert upper.auxiliary(ComponentType.MAMBA).pending_id is not None
    assert reported(rig) == [(STORE, GPU)]
    rig.settle()
    assert reported(rig) == [(STORE, CPU)]


def test_a_follower_that_failed_is_not_reported(rig):
    tombstone_and_leaf(rig)
    reported(rig)
    rig.host_states.write_faults = 2
    rig.insert([1, 2])
    rig.settle()
    assert reported(rig) == [(STORE, GPU)]


def test_demotion_and_load_back_are_those_of_the_state(rig):
    rig.insert([1, 2])
    rig.settle()
    reported(rig)
    rig.cache.evict(EvictParams(100))
    assert reported(rig) == [(REMOVE, GPU)]
    rig.load_back([1, 2])
    rig.settle()
    assert reported(rig) == [(STORE, GPU)]


def test_a_host_slot_that_goes_alone_is_reported(rig):
    rig.insert([1, 2])
    rig.settle()
    reported(rig)
    rig.events()
    rig.cache.evict_mamba_host(1)
    assert reported(rig) == [(REMOVE, CPU)]
    assert rig.events() == []


def test_a_state_that_was_fetched_is_on_the_host(rig):
    rig.cache.attach_storage_backend(MemoryStorage(), StoragePolicy(1))
    rig.insert([1, 2, 3, 4])
    rig.settle()
    rig.cache.evict(EvictParams(100))
    rig.cache.evict_host(100)
    reported(rig)
    rig.cache.prefetch_from_storage("r", rig.cache.root_node, [1, 2, 3, 4])
    rig.settle()
    assert rig.cache.check_prefetch_progress("r")
    assert node_of(rig, [1, 2, 3, 4]).mamba_host_value is not None
    assert reported(rig) == [(STORE, CPU)]
    rig.settle()
