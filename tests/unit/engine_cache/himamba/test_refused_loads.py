"""A request whose load-back is refused continues from a node on the device, with a slot and a state to copy to it."""

import pytest

from engine_cache import EvictParams, InitLoadBackParams, MatchPrefixParams, PoolExhaustedError, RadixKey, Request
from tests.support.caches.checks import check_cache
from tests.support.caches.hybrid_rig import NOTHING, HybridRig
from tests.support.caches.hybrid_steps import node_of, two_turns

pytestmark = pytest.mark.torch


def matched(**params):
    """Return a request on [1, 2], which is on the device. The best match, [1, 2, 3, 4], has its state on the host."""
    rig = HybridRig(load_back_threshold=1, **params)
    upper, _ = two_turns(rig)
    rig.cache.evict(EvictParams(2))
    req = Request("r", [], rig.lines.alloc())
    match = rig.cache.match_prefix(MatchPrefixParams(RadixKey([1, 2, 3, 4]), cow_mamba=True, req=req))
    assert (req.mamba_pool_idx, req.mamba_cow_src_index) == (None, None)
    assert match.last_device_node is upper
    req.last_node = rig.cache.inc_lock_ref(upper).node
    return rig, req, InitLoadBackParams(match.best_match_node, match.host_hit_length, req=req)


def refuse(rig):
    rig.controller.load = lambda *args: None


@pytest.mark.parametrize("has_slot", [False, True])
def test_the_request_gets_the_state_of_the_node_it_continues_from(has_slot):
    rig, req, params = matched()
    own = req.mamba_pool_idx = rig.slots.alloc(1) if has_slot else None
    refuse(rig)
    rows, node = rig.cache.init_load_back(params)
    assert (rows.tolist(), node) == ([], node_of(rig, [1, 2]))
    assert req.mamba_cow_src_index.tolist() == node.mamba_value.tolist()
    assert own is None or req.mamba_pool_idx is own
    check_cache(rig.cache, NOTHING, req.mamba_pool_idx)
    rig.cache.cache_finished_req(req, is_insert=False)
    rig.check()


def test_without_a_free_slot_the_caller_gets_an_error():
    rig, req, params = matched()
    taken = [rig.slots.alloc(1) for _ in range(rig.slots.available_size())]
    with pytest.raises(PoolExhaustedError, match="needs a state slot"):
        rig.cache.init_load_back(params)
    rig.cache.cache_finished_req(req, is_insert=False)
    for slot in taken:
        rig.slots.free(slot)
    rig.check()


def test_a_state_that_came_to_the_device_since_the_match_is_copied():
    rig, req, params = matched()
    rig.insert([1, 2, 3, 4])
    rows, node = rig.cache.init_load_back(params)
    assert (rows.tolist(), node) == ([], params.best_match_node)
    assert req.mamba_cow_src_index.tolist() == node.mamba_value.tolist()
    assert req.mamba_pool_idx is not None


def test_a_request_that_has_its_state_loaded_copies_none():
    rig, req, params = matched()
    rows, node = rig.cache.init_load_back(params)
    assert (len(rows), node, req.mamba_cow_src_index) == (2, params.best_match_node, None)
    assert req.mamba_pool_idx is not None
