"""A request that ends while its state is being loaded. Its slot is not reused before the copy has ended."""

import numpy as np
import pytest

from engine_cache import Lane
from engine_cache.storage.base import PoolName
from tests.support.caches.checks import check_cache
from tests.support.caches.unified_rig import NOTHING, UnifiedRig

pytestmark = pytest.mark.torch

A, AB = [1, 1], [1, 1, 2, 2]


@pytest.fixture
def rig():
    """A rig with [1, 1, 2, 2] and its states on the host only."""
    rig = UnifiedRig(("mamba",), slots=4)
    for tokens in (A, AB):
        rig.insert(tokens)
        rig.settle()
    rig.cache.host.evict_leaf(rig.node_of(AB))
    return rig


def begin(rig):
    _, req, lock = rig.load_back(rig.match(AB))
    rig.cache.release(lock)
    return req


@pytest.mark.parametrize("is_started", [False, True])
def test_no_late_copy_overwrites_the_state_of_the_next_owner(rig, is_started):
    req = begin(rig)
    slot = req.mamba_pool_idx
    if is_started:
        rig.cache.ready_to_load_host_cache()
    rig.end_requests()
    others = [rig.slots.alloc(1) for _ in range(rig.slots.available_size())]
    assert slot not in np.concatenate(others)
    check_cache(rig.cache, NOTHING, np.concatenate(others))
    rig.cache.ready_to_load_host_cache()
    rig.engine.step(Lane.LOAD)
    assert rig.slots.available_size() == 0  # the cache does not know yet that the copy has ended
    rig.cache.check_hicache_events()
    assert rig.slots.alloc(1).tolist() == slot.tolist()


def test_a_slot_that_two_loads_fill_waits_for_both(rig):
    req = begin(rig)
    slot = req.mamba_pool_idx
    rig.cache.ready_to_load_host_cache()
    component = rig.cache.auxiliaries[0]
    rig.insert([8, 8])
    rig.settle_writes()
    component.free_on_device(rig.node_of([8, 8]))
    match = rig.match([8, 8])
    again = rig.load_back(match, req=req)
    assert again[1].mamba_pool_idx is slot
    rig.cache.release(again[2])
    rig.cache.ready_to_load_host_cache()
    rig.end_requests()
    free = rig.slots.available_size()
    for expected in (free, free + 1):
        rig.engine.step(Lane.LOAD)
        rig.cache.check_hicache_events()
        assert rig.slots.available_size() == expected
    rig.check()


def test_a_slot_is_free_at_once_when_its_load_has_ended(rig):
    begin(rig)
    rig.settle()
    free = rig.slots.available_size()
    rig.end_requests()
    assert rig.slots.available_size() == free + 1


def test_a_reset_forgets_the_slots_that_were_waited_for(rig):
    begin(rig)
    rig.end_requests()
    rig.cache.reset()
    rig.tokens.clear()
    rig.slots.clear()
    rig.check()
    rig.settle()
    rig.check()


def test_the_state_that_the_tree_loads_is_right_all_the_same(rig):
    begin(rig)
    rig.end_requests()
    rig.settle()
    rig.check()
    slot = rig.data(rig.node_of(AB), "mamba").value
    assert rig.device_pools[PoolName.MAMBA].rows[slot] != 0
