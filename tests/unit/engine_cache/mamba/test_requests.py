import numpy as np
import pytest

from engine_cache import Request
from tests.support.caches.checks import check_cache
from tests.support.caches.mamba_rig import NOTHING, Rig


def start(rig, tokens):
    """Start a request and compute the `tokens` that the cache does not have."""
    req = Request("r", [], rig.lines.alloc())
    match = rig.match(tokens, cow_mamba=True, req=req)
    rig.cache.inc_lock_ref(match.last_device_node)
    have = len(match.device_indices)
    req.last_node, req.cache_protected_len, req.token_ids = match.last_device_node, have, tokens
    rig.lines.write(req.req_pool_idx, 0, match.device_indices)
    page = rig.cache.page_size
    rig.lines.write(
        req.req_pool_idx, have, rig.pool.alloc(-(-(len(tokens) - have) // page) * page)[: len(tokens) - have]
    )
    if req.mamba_pool_idx is None:
        req.mamba_pool_idx = rig.slots.alloc(1)
    return req


def track(rig, req, length):
    req.mamba_last_track_seqlen, req.mamba_track_idx = length, rig.slots.alloc(1)


def own(rig, req):
    return rig.lines.read(req.req_pool_idx, len(req.token_ids))[req.cache_protected_len :]


def test_a_running_request_shares_a_copy_of_its_state(rig):
    req = start(rig, [1, 2, 3])
    rig.cache.cache_unfinished_req(req)
    assert (req.cache_protected_len, req.last_node) == (3, rig.node([1, 2, 3]))
    assert req.last_node.mamba_value.tolist() != req.mamba_pool_idx.tolist()
    check_cache(rig.cache, own(rig, req), req.mamba_pool_idx)
    rig.cache.cache_finished_req(req)


def test_a_finished_request_gives_its_state_to_the_tree(rig):
    req = start(rig, [1, 2, 3])
    slot = req.mamba_pool_idx
    rig.cache.cache_finished_req(req)
    assert rig.node([1, 2, 3]).mamba_value.tolist() == slot.tolist()
    assert (req.mamba_pool_idx, req.last_node) == (None, None)
    assert rig.cache.protected_size() == 0


def test_a_finished_request_whose_state_is_there_frees_its_own(rig):
    first, second = start(rig, [1, 2, 3]), start(rig, [1, 2, 3])
    rig.cache.cache_finished_req(first)
    rig.cache.cache_finished_req(second)
    assert (rig.slots.available_size(), rig.pool.available_size()) == (7, 61)


def test_a_request_that_is_not_kept_frees_all_it_owns(rig):
    rig.cache.cache_finished_req(start(rig, [1, 2]))
    rig.cache.cache_finished_req(start(rig, [1, 2, 3, 4]), is_insert=False)
    assert (rig.slots.available_size(), rig.pool.available_size()) == (7, 62)


def test_a_request_without_room_for_a_copy_keeps_its_rows_to_itself():
    rig = Rig(slots=1)
    req = start(rig, [1, 2, 3])
    rig.cache.cache_unfinished_req(req)
    assert req.prefix_indices.tolist() == own(rig, req).tolist()
    assert rig.cache.root_node.children == {}
    rig.cache.cache_finished_req(req)
    assert len(rig.match([1, 2, 3]).device_indices) == 3


def test_the_copy_costs_the_least_recent_state_when_slots_are_out():
    rig = Rig(slots=2)
    rig.insert([5])
    rig.cache.cache_unfinished_req(start(rig, [1, 2]))
    assert rig.match([5]).device_indices.tolist() == []


def test_with_the_extra_buffer_what_was_tracked_is_shared_and_the_rest_stays():
    rig = Rig(page_size=4)
    req = start(rig, [*range(10)])
    rig.cache.cache_unfinished_req(req)
    assert req.cache_protected_len == 0
    track(rig, req, 8)
    rig.cache.cache_unfinished_req(req)
    assert (req.cache_protected_len, len(req.prefix_indices), req.mamba_last_track_seqlen) == (8, 10, None)
    check_cache(rig.cache, own(rig, req), np.concatenate((req.mamba_pool_idx, req.mamba_track_idx)))


def test_with_the_extra_buffer_the_tracked_slot_goes_to_the_tree_and_the_running_one_is_freed():
    rig = Rig(page_size=4)
    req = start(rig, [*range(10)])
    track(rig, req, 8)
    slot = req.mamba_track_idx
    rig.cache.cache_finished_req(req)
    assert rig.node([*range(8)]).mamba_value.tolist() == slot.tolist()
    assert (rig.slots.available_size(), rig.pool.available_size()) == (7, 248)
    check_cache(rig.cache, NOTHING, NOTHING)


def test_an_eagle_request_is_shared_once_the_token_behind_its_state_is_known():
    rig = Rig(page_size=4, is_eagle=True)
    req = start(rig, [*range(8)])
    track(rig, req, 8)
    rig.cache.cache_unfinished_req(req)
    assert req.cache_protected_len == 0
    req.token_ids = [*range(9)]
    rig.lines.write(req.req_pool_idx, 8, rig.pool.alloc(4)[:1])
    rig.cache.cache_unfinished_req(req)
    assert (req.cache_protected_len, len(req.prefix_indices)) == (8, 9)
    rig.cache.cache_finished_req(req)
    check_cache(rig.cache, NOTHING, NOTHING)


@pytest.mark.parametrize("length", [6, 12])
def test_a_tracked_length_is_whole_pages_that_were_computed(length):
    rig = Rig(page_size=4)
    req = start(rig, [*range(10)])
    track(rig, req, length)
    with pytest.raises(ValueError, match=f"mamba_last_track_seqlen: got {length}"):
        rig.cache.cache_finished_req(req)


def test_a_request_without_a_slot_for_its_state_is_refused(rig):
    req = Request("r", [1], rig.lines.alloc())
    with pytest.raises(ValueError, match="mamba_pool_idx: got None"):
        rig.cache.cache_finished_req(req)


def test_a_disabled_cache_gives_every_row_and_slot_back():
    rig = Rig(disable=True)
    assert rig.insert([1, 2]) == (0, 0, True)
    rig.pool.clear()
    req = start(rig, [1, 2, 3])
    rig.cache.cache_unfinished_req(req)
    assert len(req.prefix_indices) == 3
    rig.cache.cache_finished_req(req)
    assert (rig.slots.available_size(), rig.pool.available_size()) == (8, 64)
