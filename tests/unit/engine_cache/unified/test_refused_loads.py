"""A request whose load-back is refused continues from its start node, with a slot and a state to copy to it."""

import pytest

from engine_cache import ComponentType, InitLoadBackParams, PoolExhaustedError, Request
from tests.support.caches.checks import check_cache
from tests.support.caches.unified_rig import NOTHING, UnifiedRig

pytestmark = pytest.mark.torch

A, AB = [1, 1], [1, 1, 2, 2]


def at_the_anchor(**params):
    """Return a request on [1, 1], which is on the device, and its best match, which is on the host."""
    rig = UnifiedRig(("mamba",), **params)
    for tokens in (A, AB):
        rig.insert(tokens)
        rig.settle()
    rig.cache.host.evict_leaf(rig.node_of(AB))
    req = Request("r", [], 0)
    match = rig.match(AB, cow_mamba=True, req=req)
    assert (req.mamba_pool_idx, req.mamba_cow_src_index) == (None, None)
    lock = rig.cache.inc_lock_ref(match.last_device_node)
    req.last_node, req.lock_params = lock.node, lock.to_dec_params()
    return rig, req, match


def load(rig, req, match, quota=0):
    params = InitLoadBackParams(match.best_match_node, match.host_hit_length, quota, req)
    return rig.cache.init_load_back(params)


@pytest.mark.parametrize("has_slot", [False, True])
def test_the_request_gets_the_state_of_its_anchor(has_slot):
    rig, req, match = at_the_anchor()
    own = req.mamba_pool_idx = rig.slots.alloc(1) if has_slot else None
    rows, node = load(rig, req, match)
    assert (rows.tolist(), node) == ([], rig.node_of(A))
    assert req.mamba_cow_src_index.tolist() == rig.data(node, "mamba").value.tolist()
    assert own is None or req.mamba_pool_idx is own
    check_cache(rig.cache, NOTHING, req.mamba_pool_idx)
    rig.cache.cache_finished_req(req, is_insert=False)
    rig.check()


def test_room_for_the_slot_is_not_made_of_the_state_that_is_copied():
    rig, req, match = at_the_anchor(slots=2)
    rig.insert([7, 7])
    rig.settle()
    assert rig.slots.available_size() == 0
    _, node = load(rig, req, match)
    assert rig.data(rig.node_of([7, 7]), "mamba").value is None
    assert req.mamba_cow_src_index.tolist() == rig.data(node, "mamba").value.tolist()


def test_without_a_free_slot_the_caller_gets_an_error():
    rig, req, match = at_the_anchor(slots=2)
    taken = rig.slots.alloc(1)
    with pytest.raises(PoolExhaustedError, match="needs a state slot"):
        load(rig, req, match)
    rig.cache.cache_finished_req(req, is_insert=False)
    rig.slots.free(taken)
    rig.check()


def test_a_request_at_the_root_starts_from_nothing():
    rig, req, match = at_the_anchor()
    rig.cache.cache_finished_req(req, is_insert=False)
    rig.cache.host.evict_leaf(rig.node_of(A))
    match = rig.match(AB)
    req.last_node = rig.cache.root_node
    rows, node = load(rig, req, match)
    assert (rows.tolist(), node, req.mamba_pool_idx) == ([], rig.cache.root_node, None)


def test_a_state_that_went_since_the_match_is_not_continued_from():
    rig, req, match = at_the_anchor()
    rig.cache.auxiliaries[0].free_on_host(rig.node_of(AB))
    rows, node = load(rig, req, match, quota=None)
    assert (rows.tolist(), node) == ([], rig.node_of(A))
    assert req.mamba_cow_src_index.tolist() == rig.data(node, "mamba").value.tolist()


def test_rows_of_the_window_that_went_since_the_match_are_not_continued_from():
    rig = UnifiedRig(("swa",))
    for tokens in (A, AB):
        rig.insert(tokens)
        rig.settle()
    rig.cache.host.evict_leaf(rig.node_of(AB))
    match = rig.match(AB)
    assert (match.host_hit_length, match.swa_host_hit_length) == (2, 2)
    rig.cache.auxiliaries[0].free_on_host(rig.node_of(AB))
    (rows, node), _, _ = rig.load_back(match)
    assert (rows.tolist(), node) == ([], rig.node_of(A))
    assert rig.node_of(AB).value is None
    rig.check()


def window_on_the_host(**params):
    """Return a request and its best match, which lacks only SWA rows on the device."""
    rig = UnifiedRig(("mamba", "swa"), **params)
    for tokens in (A, AB):
        rig.insert(tokens)
        rig.settle()
    rig.cache.component(ComponentType.SWA).free_on_device(rig.node_of(AB))
    req = Request("r", [], 0)
    match = rig.match(AB, cow_mamba=True, req=req)
    assert match.last_device_node is rig.node_of(A)
    lock = rig.cache.inc_lock_ref(match.last_device_node)
    req.last_node, req.lock_params = lock.node, lock.to_dec_params()
    return rig, req, match


def test_a_state_that_moved_since_the_match_is_copied_from_where_it_is():
    rig, req, match = window_on_the_host()
    mamba, node = rig.cache.component(ComponentType.MAMBA), rig.node_of(AB)
    mamba.free_on_device(node)
    other = rig.slots.alloc(1)
    mamba.put_on_device(node, rig.slots.alloc(1))
    assert load(rig, req, match, quota=None)[1] is node
    assert req.mamba_cow_src_index.tolist() == mamba.data(node).value.tolist()
    rig.slots.free(other)


def test_a_state_that_came_to_the_device_since_the_match_is_copied():
    rig, req, match = window_on_the_host()
    mamba, node = rig.cache.component(ComponentType.MAMBA), rig.node_of(AB)
    rig.slots.free(req.mamba_pool_idx)
    mamba.free_on_device(node)
    req.mamba_pool_idx = req.mamba_cow_src_index = None  # as after a match that finds the state on the host
    mamba.put_on_device(node, rig.slots.alloc(1))
    assert load(rig, req, match, quota=None)[1] is node
    assert req.mamba_cow_src_index.tolist() == mamba.data(node).value.tolist()
    assert req.mamba_pool_idx is not None
