import pytest

from engine_cache import (
    CacheStateError,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    MatchPrefixParams,
    RadixKey,
    Request,
)
from tests.support.caches.hybrid_steps import PROMPT, node_of, two_turns

pytestmark = pytest.mark.torch


def test_locking_what_is_not_on_the_device_locks_the_way_to_it_and_names_it(rig):
    upper, lower = two_turns(rig)
    rig.cache.evict(EvictParams(2))
    locked = rig.cache.inc_lock_ref(lower)
    assert locked == IncLockRefResult(-2, upper)
    assert (upper.lock_ref, lower.lock_ref) == (1, 0)
    assert rig.cache.evict(EvictParams(2)) == EvictResult(0, 0)
    rig.cache.dec_lock_ref(locked.node)
    assert upper.lock_ref == 0
    rig.cache.evict_host(2)
    with pytest.raises(CacheStateError, match="has no ancestor on the device"):
        rig.cache.inc_lock_ref(lower)


def test_a_lock_is_taken_back_where_it_was_taken_whatever_was_loaded_since(rig):
    upper, lower = two_turns(rig)
    rig.cache.evict(EvictParams(2))
    locked = rig.cache.inc_lock_ref(lower).node
    rig.load_back([1, 2, 3, 4])
    rig.settle()
    other = rig.cache.inc_lock_ref(lower).node
    assert (upper.lock_ref, lower.lock_ref, lower.mamba_lock_ref) == (2, 1, 1)
    rig.cache.dec_lock_ref(locked)
    assert (upper.lock_ref, lower.lock_ref, lower.mamba_lock_ref) == (1, 1, 1)
    rig.cache.dec_lock_ref(other)


def test_a_lock_is_taken_back_where_it_was_taken_whatever_was_demoted_since(rig):
    upper, lower = two_turns(rig)
    rig.cache.evict(EvictParams(2))
    locked = rig.cache.inc_lock_ref(lower).node
    rig.load_back([1, 2, 3, 4])
    rig.settle()
    rig.cache.evict(EvictParams(2))
    rig.cache.dec_lock_ref(locked)
    assert (upper.lock_ref, upper.mamba_lock_ref, lower.lock_ref) == (0, 0, 0)


def test_what_is_not_on_the_device_holds_no_lock_to_take_back(rig):
    upper, lower = two_turns(rig)
    rig.cache.evict(EvictParams(2))
    rig.cache.inc_lock_ref(upper)
    with pytest.raises(CacheStateError, match=f"node {lower.id} is not on the device"):
        rig.cache.dec_lock_ref(lower)
    assert (upper.lock_ref, upper.mamba_lock_ref) == (1, 1)
    rig.cache.dec_lock_ref(upper)


def test_a_request_remembers_the_node_that_is_locked_for_it(rig):
    two_turns(rig)
    rig.cache.evict(EvictParams(2))
    req = Request("r", PROMPT, 0)
    match = rig.cache.match_prefix(MatchPrefixParams(RadixKey([1, 2, 3, 4])))
    rig.cache._requests._move_lock(req, match.best_match_node)
    assert req.last_node is node_of(rig, [1, 2])
    rig.cache._requests._move_lock(req, None)
    assert rig.cache.protected_size() == 0
