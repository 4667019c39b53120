"""A prefetch that has fetched nothing when its request starts to run."""

import pytest

from engine_cache import Lane, StoragePolicy
from tests.support.caches.hybrid_rig import HybridRig
from tests.support.caches.hybrid_steps import PROMPT, node_of
from tests.support.caches.tier_rig import MemoryStorage, Rig

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("make", [Rig, HybridRig])
def test_a_prefetch_of_which_nothing_arrived_waits_for_no_copy(make):
    rig = make()
    rig.cache.attach_storage_backend(MemoryStorage(), StoragePolicy(prefetch_threshold=1))
    rig.insert(PROMPT[:2])
    anchor = node_of(rig, PROMPT[:2])
    rig.cache.prefetch_from_storage("r", anchor, PROMPT[2:])
    assert rig.cache.check_prefetch_progress("r")
    assert rig.cache.pop_prefetch_loaded_tokens("r") == 0
    assert rig.engine.num_queued(Lane.WRITE) == 1
    assert anchor.write_through_pending_id is not None
    rig.settle()
    assert anchor.host_ref_counter == 0
    rig.check()
