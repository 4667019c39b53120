"""A request that ends while its state is being loaded. Its slot is not reused before the copy has ended."""

import numpy as np
import pytest

from engine_cache import Lane
from tests.support.caches.checks import check_cache
from tests.support.caches.hybrid_rig import NOTHING
from tests.support.caches.hybrid_steps import demoted

pytestmark = pytest.mark.torch


def begin(rig):
    demoted(rig, [1, 2])
    rig.load_back([1, 2], with_request=True)
    (req,) = rig.loaded
    return req.mamba_pool_idx


@pytest.mark.parametrize("is_started", [False, True])
def test_no_late_copy_overwrites_the_state_of_the_next_owner(rig, is_started):
    slot = begin(rig)
    if is_started:
        rig.cache.ready_to_load_host_cache()
    rig.end_request()
    others = [rig.slots.alloc(1) for _ in range(rig.slots.available_size())]
    assert slot not in np.concatenate(others)
    check_cache(rig.cache, NOTHING, np.concatenate(others))
    rig.cache.ready_to_load_host_cache()
    while rig.engine.step(Lane.LOAD):
        pass
    assert rig.slots.available_size() == 0  # the cache does not know yet that the copy has ended
    rig.cache.check_hicache_events()
    assert rig.slots.alloc(1).tolist() == slot.tolist()
    rig.slots.free(np.concatenate((*others, slot)))


def test_a_slot_is_free_at_once_when_its_load_has_ended(rig):
    begin(rig)
    rig.settle()
    free = rig.slots.available_size()
    rig.end_request()
    assert rig.slots.available_size() == free + 1


def test_a_reset_forgets_the_slots_that_were_waited_for(rig):
    begin(rig)
    rig.end_request()
    rig.cache.reset()
    rig.pool.clear()
    rig.slots.clear()
    rig.check()
