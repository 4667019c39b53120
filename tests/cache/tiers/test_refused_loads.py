"""Load-backs that are refused or come late: requests that go on elsewhere or have ended, matches that have changed."""

import numpy as np
import pytest

from engine_cache import CacheStateError, EvictParams, InitLoadBackParams, Lane, PoolExhaustedError, Request
from kv_events.errors import InvalidValueError
from tests.models.cache_checks import check_cache
from tests.rigs.cache import AB, ABC, FAILED, NOTHING, A, refuse, rigs
from tests.rigs.cache_steps import init_load_back

STATES = ("himamba", "unified+mamba")


# --- requests whose load is refused continue from a node on the device ---


def at_the_anchor(rig):
    """Return a request at A, which is on the device, and its best match, AB, which is on the host."""
    rig.turns(A, AB)
    rig.cache.evict(EvictParams(2))
    req = Request("r", [], rig.lines.alloc())
    match = rig.match(AB, cow_mamba=True, req=req)
    assert (req.mamba_pool_idx, req.mamba_cow_src_index) == (None, None)
    assert match.last_device_node is rig.node_of(A)
    lock = rig.cache.inc_lock_ref(match.last_device_node)
    req.last_node, req.lock_params = lock.node, lock.to_dec_params()
    return req, match


def assert_starts_from(rig, req, node):
    """Check that the request must copy the state of the node to its slot, and end it."""
    assert req.mamba_cow_src_index.tolist() == rig.data(node, "mamba").value.tolist()
    check_cache(rig.cache, NOTHING, req.mamba_pool_idx)
    rig.cache.cache_finished_req(req, is_insert=False)


@pytest.mark.parametrize("has_slot", [False, True])
@rigs(*STATES)
def test_the_request_gets_the_state_of_the_node_it_continues_from(rig, has_slot):
    req, match = at_the_anchor(rig)
    own = req.mamba_pool_idx = rig.slots.alloc(1) if has_slot else None
    rig.controller.load = lambda *args: None
    rows, node = init_load_back(rig, match, req=req)
    assert (rows.tolist(), node) == ([], rig.node_of(A))
    assert own is None or req.mamba_pool_idx is own
    assert_starts_from(rig, req, node)


@rigs("unified+mamba", slots=2)
def test_room_for_the_slot_is_not_made_of_the_state_that_is_copied(rig):
    req, match = at_the_anchor(rig)
    rig.turns([7, 7])
    assert rig.slots.available_size() == 0
    _, node = init_load_back(rig, match, 0, req)
    assert rig.has([7, 7], "mamba")[0] is False
    assert_starts_from(rig, req, node)


@rigs(*STATES)
def test_without_a_free_slot_the_caller_gets_an_error(rig):
    req, match = at_the_anchor(rig)
    taken = rig.slots.alloc(rig.slots.available_size())
    with pytest.raises(PoolExhaustedError, match="needs a state slot"):
        init_load_back(rig, match, 0 if rig.cls == "unified" else None, req)
    rig.cache.cache_finished_req(req, is_insert=False)
    rig.slots.free(taken)


@rigs("unified")
def test_a_request_that_is_not_on_the_way_is_refused(rig):
    rig.turns(A, AB, ABC, [8, 8])
    rig.cache.evict(EvictParams(2))
    match = rig.match(ABC)
    with pytest.raises(InvalidValueError, match="last_node"):
        init_load_back(rig, match)
    with pytest.raises(InvalidValueError, match="on the way to"):
        init_load_back(rig, match, req=Request("r", [], 0, last_node=rig.node_of([8, 8])))
    assert rig.cache.ongoing_load_back == {}


# --- requests that end while their state is loaded ---


@pytest.mark.parametrize("is_started", [False, True])
@rigs(*STATES)
def test_no_late_copy_overwrites_the_state_of_the_next_owner(rig, is_started):
    rig.demoted(A, AB)
    _, req, lock = rig.load_back(rig.match(AB), req=Request("r", [], 0))
    rig.cache.release(lock)
    slot = req.mamba_pool_idx
    if is_started:
        rig.cache.ready_to_load_host_cache()
    rig.end_requests()
    others = [rig.slots.alloc(1) for _ in range(rig.slots.available_size())]
    assert slot not in np.concatenate(others)
    check_cache(rig.cache, NOTHING, np.concatenate(others))
    rig.cache.ready_to_load_host_cache()
    rig.run(Lane.LOAD)
    assert rig.slots.available_size() == 0  # the cache does not know yet that the copy has ended
    rig.cache.check_hicache_events()
    assert rig.slots.alloc(1).tolist() == slot.tolist()
    rig.slots.free(np.concatenate((*others, slot)))  # the fixture compares the state that the tree has loaded


# --- matches that have changed since ---

TURNS = pytest.mark.usefixtures("turns")
CLASSES = ("hiradix", "himamba")


@pytest.fixture
def turns(rig):
    """A, AB and ABC on both tiers, the last of them on the host only."""
    rig.turns(A, AB, ABC)
    rig.cache.evict(EvictParams(2))


@TURNS
@rigs(*CLASSES)
def test_a_deleted_node_can_be_neither_loaded_nor_locked(rig):
    node = rig.node_of(ABC)
    rig.cache.evict_host(2)
    assert rig.cache.load_back(node) is None
    with pytest.raises(CacheStateError, match=f"node {node.id} "):
        rig.cache.inc_lock_ref(node)


@TURNS
@rigs(*CLASSES)
def test_nothing_is_found_of_a_tree_that_was_reset(rig):
    for demote in (False, True):
        if demote:
            rig.demoted(A)
        node = rig.node_of(A)
        rig.reset()
        with pytest.raises(CacheStateError, match="is not below root"):
            rig.cache.init_load_back(InitLoadBackParams(node, 2))


@rigs("hiradix", "himamba", "unified")
def test_a_load_that_the_engine_refuses_stays_queued(rig, monkeypatch):
    rig.demoted(A)
    rows = rig.cache.load_back(rig.match(A).best_match_node)
    assert len(rows) == 2
    with monkeypatch.context() as patch:
        patch.setattr(rig.engine, "submit", refuse)
        with pytest.raises(RuntimeError, match=FAILED):
            rig.cache.ready_to_load_host_cache()
    assert rig.cache.ready_to_load_host_cache() == 0
    rig.settle()
    rig.check()
    assert rig.match(A).last_device_node.lock_ref == 0
    assert rig.cache.evict(EvictParams(2)).num_tokens_evicted == 2


@rigs("hiradix", "himamba", "unified+mamba+swa")
def test_a_load_whose_end_fails_is_released_like_the_others(rig, monkeypatch):
    rig.demoted(A, [3, 3])
    for tokens in (A, [3, 3]):
        rig.cache.load_back(rig.match(tokens).best_match_node)
    rig.cache.ready_to_load_host_cache()
    rig.engine.drain()
    end = rig.cache.host._end_load

    def failing(*args):
        end(*args)
        refuse()

    with monkeypatch.context() as patch:
        patch.setattr(rig.cache.host, "_end_load", failing)
        with pytest.raises(RuntimeError, match=FAILED):
            rig.cache.loading_check()
    assert (rig.cache.ongoing_load_back, rig.cache.protected_size()) == ({}, 0)
