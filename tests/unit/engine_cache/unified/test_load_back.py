"""Load-backs of a match: the data that is copied, the rows that the request gets, and the state after a refusal."""

import pytest

from engine_cache import CacheStateError, EvictParams, InitLoadBackParams, Request
from kv_events.errors import InvalidValueError
from tests.support.caches.unified_rig import UnifiedRig

pytestmark = pytest.mark.torch

A, AB, ABC = [1, 1], [1, 1, 2, 2], [1, 1, 2, 2, 3, 3]
EVERYTHING = EvictParams(100, 100, 100)


def filled(kinds=(), **params):
    """Return a rig with a chain of three nodes on both tiers."""
    rig = UnifiedRig(kinds, **params)
    for tokens in (A, AB, ABC):
        rig.insert(tokens)
        rig.settle()
    return rig


def rows_of(rig, *paths):
    return [row for tokens in paths for row in rig.node_of(tokens).value]


def locks(rig):
    return {
        place.node.id: (place.node.lock_ref, [rig.data(place.node, kind).lock_ref for kind in ("swa", "mamba")])
        for place in rig.walk()
    }


def free(rig):
    return [pool.available_size() for pool in (rig.pool, rig.slots, *rig.host_pools.values())]


@pytest.mark.parametrize("kinds", [(), ("mamba",), ("swa",), ("mamba", "swa")])
def test_what_was_demoted_comes_back_and_the_lengths_add_up(kinds):
    rig = filled(kinds)
    rig.cache.evict(EVERYTHING)
    match = rig.match(ABC)
    assert (len(match.device_indices), match.host_hit_length) == (0, 6)
    (rows, node), req, lock = rig.load_back(match)
    assert node is match.best_match_node is rig.node_of(ABC)
    assert rows.tolist() == rows_of(rig, A, AB, ABC)
    rig.settle()
    rig.check()
    again = rig.match(ABC)
    assert again.device_indices.tolist() == rows.tolist()
    assert (req.mamba_pool_idx is not None) == ("mamba" in kinds)
    rig.cache.release(lock)
    rig.end_requests()
    rig.check()


def test_only_what_is_below_the_device_match_is_new():
    rig = filled()
    rig.cache.evict(EvictParams(4))
    match = rig.match(ABC)
    (rows, node), _, _ = rig.load_back(match)
    assert (match.last_device_node, node) == (rig.node_of(A), rig.node_of(ABC))
    assert rows.tolist() == rows_of(rig, AB, ABC)
    assert len(match.device_indices) + len(rows) == 6


@pytest.mark.parametrize("kind", ["mamba", "swa"])
def test_a_load_of_another_kind_alone_makes_kv_that_was_there_usable(kind):
    rig = filled((kind,))
    (component,) = rig.cache.auxiliaries
    component.free_on_device(rig.node_of(AB))
    match = rig.match(AB)
    expected_anchor = rig.node_of(A)
    assert match.last_device_node is expected_anchor
    events_before = rig.events()
    (rows, node), _, _ = rig.load_back(match)
    assert node is rig.node_of(AB)
    assert rows.tolist() == rows_of(rig, AB)
    rig.settle()
    assert rig.events() == []  # no KV has moved
    assert events_before
    assert rig.match(AB).last_device_node is node
    rig.check()


def test_nothing_is_gained_when_the_request_stands_at_the_best_match_already():
    rig = filled(("mamba",))
    node = rig.node_of(AB)
    rig.cache.auxiliaries[0].free_on_device(node)
    req = Request("r", [], 0, last_node=node, mamba_host_hit_length=1)
    rows, last = rig.cache.init_load_back(InitLoadBackParams(node, 0, req=req))
    assert (rows.tolist(), last) == ([], node)
    assert rig.data(node, "mamba").value is not None
    rig.slots.free(req.mamba_pool_idx)
    rig.settle()
    rig.check()


def test_there_is_nothing_to_load_of_what_is_on_the_device():
    rig = filled(("mamba", "swa"))
    match = rig.match(ABC)
    (rows, node), req, _ = rig.load_back(match)
    assert (rows.tolist(), node, req.mamba_pool_idx) == ([], match.last_device_node, None)
    assert rig.cache.ongoing_load_back == {}


@pytest.mark.parametrize(
    ("params", "quota", "is_loaded"),
    [
        ({"load_back_threshold": 5}, None, False),
        ({"load_back_threshold": 4}, None, True),
        ({}, 3, False),
        ({}, 5, False),  # two units of it are the anchor's
        ({}, 6, True),
    ],
)
def test_a_load_that_is_too_small_or_beyond_the_quota_is_refused_without_a_trace(params, quota, is_loaded):
    rig = filled(**params)
    rig.cache.evict(EvictParams(4))
    match = rig.match(ABC)
    before = locks(rig), free(rig)
    req = Request("r", [], 0, last_node=match.last_device_node)
    load = InitLoadBackParams(match.best_match_node, match.host_hit_length, quota, req)
    rows, node = rig.cache.init_load_back(load)
    if is_loaded:
        assert (len(rows), node) == (4, match.best_match_node)
    else:
        assert (rows.tolist(), node) == ([], match.last_device_node)
        assert (locks(rig), free(rig)) == before
    rig.check()


def test_a_quota_holds_for_kv_even_when_a_state_comes_along():
    rig = filled(("mamba",), load_back_threshold=100)
    rig.cache.evict(EVERYTHING)
    (rows, _), req, _ = rig.load_back(rig.match(ABC), mem_quota=5)
    assert (rows.tolist(), req.mamba_pool_idx) == ([], None)
    (rows, _), _, _ = rig.load_back(rig.match(ABC), mem_quota=6)  # no threshold for what brings a state
    assert len(rows) == 6


@pytest.mark.parametrize("kinds", [(), ("mamba",), ("swa",)])
def test_without_room_on_the_device_the_request_stays_where_it_is(kinds):
    rig = filled(kinds)
    rig.cache.evict(EVERYTHING)
    taken = rig.pool.alloc(rig.pool.available_size() - 2)
    match = rig.match(ABC)
    before = locks(rig), free(rig)
    (rows, node), req, lock = rig.load_back(match)
    assert (rows.tolist(), node, req.mamba_pool_idx) == ([], rig.cache.root_node, None)
    rig.cache.release(lock)
    assert (locks(rig), free(rig)) == before
    rig.pool.free(taken)
    rig.check()


def test_without_a_slot_for_the_request_nothing_is_loaded():
    rig = filled(("mamba",), slots=4)
    rig.cache.evict(EVERYTHING)
    taken = rig.slots.alloc(3)
    (rows, _), req, _ = rig.load_back(rig.match(ABC))
    assert (rows.tolist(), req.mamba_pool_idx, rig.slots.available_size()) == ([], None, 1)
    rig.slots.free(taken)
    rig.check()


def test_room_is_made_by_eviction_but_not_of_what_the_load_needs():
    rig = filled(("swa",), device_pages=3, swa_pages=3)
    rig.cache.auxiliaries[0].free_on_device(rig.node_of(AB))
    rig.cache.evict(EvictParams(2))
    rig.insert([7, 7])
    rig.settle()
    match = rig.match(ABC)
    (rows, node), _, _ = rig.load_back(match)
    rig.settle()
    assert (len(rows), node) == (6 - len(match.device_indices), rig.node_of(ABC))
    assert rig.match(ABC).last_device_node is node
    rig.check()


def test_loaded_nodes_are_locked_until_the_load_has_ended():
    rig = filled(("swa",))
    rig.cache.evict(EVERYTHING)
    _, _, lock = rig.load_back(rig.match(ABC))
    rig.cache.release(lock)
    assert rig.cache.evict(EVERYTHING) == (0, 0, 0)
    rig.settle()
    assert rig.cache.evict(EVERYTHING) == (6, 0, 4)  # SWA rows of one window were loaded


def test_events_of_a_load_go_from_the_root_down():
    rig = filled(("mamba",))
    rig.cache.evict(EVERYTHING)
    rig.events()
    rig.load_back(rig.match(ABC))
    assert rig.events() == [("BlockStored", "GPU", page) for page in ([1, 1], [2, 2], [3, 3])]


def test_a_request_that_cannot_continue_from_the_best_match_takes_the_state_of_its_anchor():
    rig = filled(("mamba", "swa"))
    swa = rig.cache.auxiliaries[1]
    swa.free_on_device(rig.node_of(AB))
    req = Request("r", [], 0)
    match = rig.match(ABC, cow_mamba=True, req=req)
    assert match.last_device_node is rig.node_of(A)
    assert req.mamba_cow_src_index.tolist() == rig.data(rig.node_of(ABC), "mamba").value.tolist()
    req.last_node = match.last_device_node
    taken = rig.swa.swa.alloc(rig.swa.swa.available_size())
    held = [rig.cache.inc_lock_ref(rig.node_of(tokens)) for tokens in (A, ABC)]  # so that no SWA row is available
    rows, node = rig.cache.init_load_back(InitLoadBackParams(match.best_match_node, match.host_hit_length, req=req))
    assert (rows.tolist(), node) == ([], rig.node_of(A))
    assert req.mamba_cow_src_index.tolist() == rig.data(node, "mamba").value.tolist()
    for lock in held:
        rig.cache.release(lock)
    rig.swa.swa.free(taken)
    rig.slots.free(req.mamba_pool_idx)
    rig.check()


def test_a_match_that_has_left_the_tree_gives_nothing():
    rig = filled()
    rig.cache.evict(EVERYTHING)
    match = rig.match(ABC)
    rig.cache.evict_host(100)
    req = Request("r", [], 0, last_node=match.last_device_node)
    rows, node = rig.cache.init_load_back(InitLoadBackParams(match.best_match_node, match.host_hit_length, req=req))
    assert (rows.tolist(), node) == ([], rig.cache.root_node)


def test_a_request_that_is_not_on_the_way_is_refused():
    rig = filled()
    rig.insert([8, 8])
    rig.cache.evict(EvictParams(2))
    match = rig.match(ABC)
    with pytest.raises(InvalidValueError, match="last_node"):
        rig.cache.init_load_back(InitLoadBackParams(match.best_match_node, 2))
    other = Request("r", [], 0, last_node=rig.node_of([8, 8]))
    with pytest.raises(InvalidValueError, match="on the way to"):
        rig.cache.init_load_back(InitLoadBackParams(match.best_match_node, 2, req=other))
    assert rig.cache.ongoing_load_back == {}


def test_a_node_of_another_tree_cannot_be_locked():
    with pytest.raises(CacheStateError):
        filled().cache.inc_lock_ref(filled().node_of(A))
