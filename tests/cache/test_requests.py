"""Requests: what a match gives them, what they share while they run, and what is left when they end."""

from typing import Any

import numpy as np
import pytest

from engine_cache import (
    CacheStateError,
    EvictParams,
    PoolExhaustedError,
    RadixCache,
    Request,
)
from engine_cache.components.component import num_accepted
from tests.models.cache_checks import check_cache
from tests.rigs.cache import AB, ABC, ABCD, NOTHING, A, CacheRig, rigs
from tests.rigs.cache_requests import Requests

pytestmark = pytest.mark.torch

HOST = ("hiradix", "himamba", "unified")
SMALL = {"page_size": 1, "device_pages": 64, "slots": 8}
STATES = (("mamba", SMALL), ("unified+mamba", SMALL | {"tiers": 1}))
ALL = ("radix", "mamba", "hiradix", "himamba", "unified", "unified+mamba+swa")
MAMBA = {"page_size": 1, "device_pages": 64, "slots": 8, "extra_buffer": False, "mamba_pool": None}


def locked(rig, kind="full", field="lock_ref"):
    return rig.ends(kind, field)


def ends(*prompts):
    return {tuple(tokens) for tokens in prompts}


# --- matches ---


@rigs("mamba", ("unified+mamba", {"tiers": 1}), page_size=1, device_pages=64, slots=8)
def test_a_match_ends_at_the_deepest_node_with_a_state(rig):
    rig.turns([1, 2], [1, 2, 3, 4])
    for tokens, length in (([1, 2, 3, 4, 5], 4), ([1, 2, 3], 2), ([1, 9], 0), ([1], 0)):
        result = rig.match(tokens)
        assert (len(result.device_indices), result.host_hit_length, result.mamba_host_hit_length) == (length, 0, 0)
        assert result.last_device_node is result.last_host_node is result.best_match_node
        assert result.best_match_node is (rig.node_of(tokens[:length]) if length else rig.cache.root_node)
    assert [rig.has(tokens, "mamba")[0] for tokens in ([1, 2, 3], [1, 2, 3, 4])] == [False, True]


@pytest.mark.parametrize(
    ("tokens", "length"),
    [([1, 2], None), ([1, 2, 7], None), ([1, 2, 3, 4, 9], 4), ([1, 2, 3, 4, 5, 9], 4), ([8], None), ([5, 9], None)],
)
@rigs(*STATES)
def test_the_branching_length_is_the_kv_beyond_the_state_in_whole_chunks(rig, tokens, length):
    rig.turns([1, 2], [1, 2, 3, 4, 5, 6], [5, 6, 7, 8])
    assert rig.match(tokens).mamba_branching_seqlen == length


@rigs("himamba", page_size=1)
def test_the_branching_point_is_where_kv_on_the_device_ends(rig):
    rig.insert([1, 2, 3, 4])
    rig.match([1, 2])
    rig.settle()
    rig.cache.evict(EvictParams(1))
    result = rig.match([1, 2, 3])
    assert (result.host_hit_length, result.mamba_branching_seqlen) == (0, 2)
    rig.cache.evict(EvictParams(4))
    assert rig.node_of([1, 2]).host_value is not None
    assert rig.match([1, 2]).mamba_branching_seqlen is None, "KV on the host alone is no branching point"


@rigs(("unified+mamba", {"tiers": 1}), "unified+mamba")
def test_the_branching_length_of_a_unified_tree_is_reported_without_a_host_tier_only(rig):
    rig.turns(A, ABCD)
    assert rig.match(AB).mamba_branching_seqlen == (4 if rig.controller is None else None)
    assert rig.match(A).mamba_branching_seqlen is None


@rigs("himamba", "hiradix")
def test_the_anchor_on_the_host_is_above_what_was_not_backed_up(rig):
    rig.turns(A)
    rig.insert(AB, chunked=True)
    result = rig.match(AB)
    assert (result.last_device_node, result.last_host_node) == (rig.node_of(AB), rig.node_of(A))
    assert result.mamba_host_hit_length == 0


@rigs("unified", "hiradix")
def test_kv_on_the_host_counts_for_the_best_match_alone(rig):
    rig.turns(AB, ABC)
    rig.cache.host.evict_leaf(rig.node_of(ABC))
    result = rig.match(ABC)
    assert (len(result.device_indices), result.host_hit_length) == (4, 2)
    assert (result.last_device_node, result.best_match_node) == (rig.node_of(AB), rig.node_of(ABC))


@rigs("unified+mamba")
def test_a_state_on_the_host_only_makes_the_best_match_deeper_than_the_device_match(rig):
    rig.turns(A, AB, ABC)
    node = rig.node_of(AB)
    rig.cache.states.free_on_device(node)
    result = rig.match(AB)
    assert result.best_match_node is result.last_host_node is node
    assert (result.last_device_node, result.host_hit_length) == (rig.node_of(A), 2)
    assert result.device_indices.tolist() == rig.node_of(A).value.tolist()
    assert result.mamba_host_hit_length == 1
    result = rig.match(ABC)  # a device match goes beyond a node without a state
    assert result.best_match_node is result.last_device_node is rig.node_of(ABC)
    assert (len(result.device_indices), result.host_hit_length, result.mamba_host_hit_length) == (6, 0, 0)
    for tokens in (A, AB, ABC, [1, 1, 9, 9]):
        result = rig.match(tokens)
        above = reversed(list(rig.up(result.last_device_node)))
        assert result.device_indices.tolist() == [row for step in above for row in step.value]


@pytest.mark.parametrize(
    ("gap", "tokens", "device", "lengths"),
    [(AB, ABC, A, (4, 2)), (A, A, [], (2, 2)), (A, AB, [], (4, 2)), (A, ABC, ABC, (0, 0))],
)
@rigs("unified+swa")
def test_a_match_needs_one_window_of_swa_rows_or_those_from_the_root_on(rig, gap, tokens, device, lengths):
    rig.turns(A, AB, ABC)
    rig.cache.auxiliaries[0].free_on_device(rig.node_of(gap))
    result = rig.match(tokens)
    assert result.best_match_node is rig.node_of(tokens)
    assert result.last_device_node is (rig.node_of(device) if device else rig.cache.root_node)
    assert (result.host_hit_length, result.swa_host_hit_length) == lengths


@rigs("unified+mamba+swa", "unified+swa+mamba")
def test_a_gap_of_one_kind_does_not_change_what_another_counts(rig):
    """The SWA window continues after a node at which Mamba does not allow a match to end."""
    rig.insert(ABC)
    rig.match(A)
    rig.match(AB)  # two nodes above that have SWA rows, but no state
    assert rig.match(ABC).last_device_node is rig.node_of(ABC)
    assert rig.match(AB).best_match_node is rig.cache.root_node
    rig.settle()


def test_every_validator_sees_every_node():
    seen, nodes = list[Any](), list[Any]("abc")
    validators = [lambda node: node != "c", lambda node: seen.append(node) or node != "a"]  # type: ignore[func-returns-value]
    assert (num_accepted(nodes, validators), seen) == (2, nodes)


@rigs(*HOST)
def test_a_node_on_no_tier_ends_a_match(rig):
    rig.turns(A, AB)
    node = rig.node_of(AB)
    kept = node.value, node.host_value
    node.value = node.host_value = None
    result = rig.match(AB)
    assert result.best_match_node is result.last_device_node is rig.node_of(A)
    assert len(result.device_indices) == 2
    node.value, node.host_value = kept


@rigs("unified")
def test_a_partial_match_splits_at_a_page(rig):
    rig.insert(ABC)
    assert len(rig.match([1, 1, 2, 9]).device_indices) == 2
    assert rig.ends() == {tuple(A), tuple(ABC)}
    rig.settle()


# --- requests ---

ONE_TIER = ("radix", "mamba", *((f"unified{kinds}", {"tiers": 1}) for kinds in ("", "+mamba", "+swa", "+mamba+swa")))


@pytest.fixture
def requests(rig):
    return Requests(rig)


def started(requests, tokens):
    """Begin a request and compute all its tokens."""
    req = requests.begin(tokens)
    assert requests.compute(req, tokens)
    return req


@rigs(*ONE_TIER)
def test_a_request_shares_its_whole_pages_and_ends_without_a_trace(rig, requests):
    req = started(requests, [*ABC, 4])
    requests.share(req)
    assert (req.cache_protected_len, req.last_node) == (6, rig.node_of(ABC))
    assert req.prefix_indices[:6].tolist() == rig.match(ABC).device_indices.tolist()
    assert (len(req.prefix_indices), rig.cache.protected_size()) == (7, 6)
    rig.check()
    assert rig.cache.evict(EvictParams(100)).num_tokens_evicted == 0
    requests.end(req)
    assert (req.last_node, req.mamba_pool_idx, req.mamba_track_idx) == (None, None, None)
    assert (rig.cache.evictable_size(), rig.cache.protected_size()) == (6, 0)


@rigs(*ONE_TIER, slots=8)
def test_a_second_request_with_the_same_prompt_is_put_on_the_rows_of_the_first(rig, requests):
    first, second = requests.begin(ABC), requests.begin(ABC)
    for req in (first, second):
        requests.compute(req, ABC)
    for req in (first, second):
        requests.share(req)
        rig.check()
    assert second.prefix_indices.tolist() == first.prefix_indices.tolist()
    assert rig.pool.available_size() == rig.pool.size - 6
    for req in (first, second):
        requests.end(req)
    assert (rig.cache.protected_size(), rig.cache.evictable_size()) == (0, 6)


@rigs(*ONE_TIER, device_pages=20, swa_pages=20)
def test_a_request_cached_chunk_by_chunk_ends_as_one_path(rig, requests):
    tokens = [*range(17)]
    req = requests.begin(tokens)
    for end in (6, 9, 17):
        requests.compute(req, tokens[:end])
        requests.share(req, chunked=True)
        rig.check()
    requests.end(req)
    assert rig.cache.evictable_size() == rig.pool.size - rig.pool.available_size() == 16


@rigs(*ONE_TIER)
def test_a_request_that_is_not_kept_frees_all_it_owns(rig, requests):
    requests.end(started(requests, AB))
    requests.end(started(requests, [*ABC, 7]), is_insert=False)
    assert rig.ends() == ends(AB)
    rig.check()


@pytest.mark.parametrize("is_insert", [False, True])
@rigs("radix", is_eagle=True, page_size=4)
def test_an_eagle_request_keeps_the_row_of_its_last_token_and_the_tree_its_rows(rig, requests, is_insert):
    """The last unit of a prefix ends with a token that a request which has computed nothing does not count yet."""
    tokens = [*range(9)]
    req = started(requests, tokens)
    requests.share(req)
    assert (req.cache_protected_len, len(req.prefix_indices)) == (8, 9)
    rig.check()
    requests.end(req)
    req = requests.begin(tokens)
    assert len(req.token_ids) == 8
    requests.share(req)
    assert (req.cache_protected_len, len(req.prefix_indices)) == (8, 8)
    requests.end(req, is_insert=is_insert)
    assert rig.cache.evictable_size() == 8


@rigs("mamba", is_eagle=True, page_size=4)
def test_an_eagle_request_is_shared_once_the_token_behind_its_state_is_known(rig, requests):
    req = requests.begin([*range(9)])
    requests.compute(req, [*range(8)])
    req.mamba_last_track_seqlen = 8
    requests.share(req)
    assert (req.cache_protected_len, req.mamba_last_track_seqlen) == (0, 8)
    requests.compute(req, [*range(9)])
    requests.share(req)
    assert (req.cache_protected_len, len(req.prefix_indices)) == (8, 9)
    requests.end(req)


@rigs("radix", "mamba", disable=True)
def test_a_disabled_cache_gives_every_row_and_slot_back(rig, requests):
    req = started(requests, ABC)
    requests.share(req)
    assert len(req.prefix_indices) == 6
    requests.end(req)
    assert (rig.pool.available_size(), rig.slots.available_size()) == (rig.pool.size, rig.slots.size)


def test_requests_need_their_pool():
    with pytest.raises(CacheStateError, match="req_to_token_pool"):
        RadixCache(page_size=4).cache_unfinished_req(Request("r", [1], 0))


@rigs("unified+swa")
def test_swa_rows_that_the_window_has_left_are_not_shared(rig, requests):
    req = started(requests, [*ABCD])
    requests.slide_window(req)
    assert req.swa_evicted_seqlen == 4
    requests.share(req)
    rig.check()
    assert rig.match(A).best_match_node is rig.cache.root_node
    assert len(rig.match(ABCD).device_indices) == 8
    requests.end(req)
    rig.settle()


@rigs("unified+swa", window=1, tiers=1)
def test_a_running_request_keeps_rows_that_no_other_could_use(rig, requests):
    """All of its whole pages are outside the window, but it still reads their full rows."""
    req = started(requests, [*ABC, 4])
    requests.slide_window(req)
    requests.share(req)
    assert (req.swa_evicted_seqlen, rig.cache.root_node.children) == (6, {})
    rig.check()
    requests.end(req)


# --- requests and their states ---


def own(rig, req):
    return rig.lines.read(req.req_pool_idx, len(req.token_ids))[req.cache_protected_len :]


def bare(rig, tokens):
    req = Request("r", [], rig.lines.alloc())
    match = rig.match(tokens, cow_mamba=True, req=req)
    rig.cache.inc_lock_ref(match.last_device_node)
    have = len(match.device_indices)
    req.last_node, req.cache_protected_len, req.token_ids = match.last_device_node, have, tokens
    rows = np.concatenate((match.device_indices, rig.pool.alloc(len(tokens) - have)))
    rig.lines.write(req.req_pool_idx, 0, rows)
    req.mamba_pool_idx = rig.slots.alloc(1) if req.mamba_pool_idx is None else req.mamba_pool_idx
    return req


@pytest.fixture
def plain(request):
    """A Mamba cache without an extra buffer: a running request has one state. No state is copied."""
    rig = CacheRig("mamba", **MAMBA | getattr(request, "param", {}))
    yield rig
    check_cache(rig.cache)


def test_a_running_request_shares_a_copy_of_its_state_and_gives_it_to_the_tree_at_its_end(plain):
    req = bare(plain, [1, 2, 3])
    plain.cache.cache_unfinished_req(req)
    assert (req.cache_protected_len, req.last_node) == (3, plain.node_of([1, 2, 3]))
    assert plain.data(req.last_node, "mamba").value.tolist() != req.mamba_pool_idx.tolist()
    check_cache(plain.cache, own(plain, req), req.mamba_pool_idx)
    plain.cache.cache_finished_req(req)
    req = bare(plain, [1, 2, 3, 4])
    slot = req.mamba_pool_idx
    plain.cache.cache_finished_req(req)
    assert plain.data(plain.node_of([1, 2, 3, 4]), "mamba").value.tolist() == slot.tolist()
    assert (req.mamba_pool_idx, req.last_node, plain.cache.protected_size()) == (None, None, 0)


def test_a_finished_request_whose_state_is_there_frees_its_own(plain):
    first, second = bare(plain, [1, 2, 3]), bare(plain, [1, 2, 3])
    for req in (first, second):
        plain.cache.cache_finished_req(req)
    assert (plain.slots.available_size(), plain.pool.available_size()) == (7, 61)


@pytest.mark.parametrize("plain", [{"slots": 1}], indirect=True)
def test_a_request_without_room_for_a_copy_keeps_its_rows_to_itself(plain):
    req = bare(plain, [1, 2, 3])
    plain.cache.cache_unfinished_req(req)
    assert req.prefix_indices.tolist() == own(plain, req).tolist()
    assert plain.cache.root_node.children == {}
    plain.cache.cache_finished_req(req)
    assert len(plain.match([1, 2, 3]).device_indices) == 3


@pytest.mark.parametrize("plain", [{"slots": 2}], indirect=True)
def test_the_copy_costs_the_least_recent_state_when_slots_are_out(plain):
    plain.insert([5])
    plain.cache.cache_unfinished_req(bare(plain, [1, 2]))
    assert len(plain.match([5]).device_indices) == 0


@rigs("mamba", page_size=4)
def test_with_an_extra_buffer_what_was_tracked_is_shared_and_its_slot_goes_to_the_tree(rig, requests):
    req = started(requests, [*range(10)])
    req.mamba_last_track_seqlen = None
    requests.share(req)
    assert req.cache_protected_len == 0
    req.mamba_last_track_seqlen = 8
    requests.share(req)
    assert (req.cache_protected_len, len(req.prefix_indices), req.mamba_last_track_seqlen) == (8, 10, None)
    rig.check()
    requests.end(req)
    req = started(requests, [*range(20, 30)])
    slot = req.mamba_track_idx
    requests.end(req)
    assert rig.data(rig.node_of([*range(20, 28)]), "mamba").value.tolist() == slot.tolist()
    assert (rig.slots.available_size(), rig.pool.available_size()) == (3, rig.pool.size - 16)


@pytest.mark.parametrize("length", [6, 12])
@rigs("mamba", page_size=4)
def test_a_tracked_length_is_whole_pages_that_were_computed(rig, requests, length):
    req = started(requests, [*range(10)])
    req.mamba_last_track_seqlen = length
    with pytest.raises(ValueError, match=f"mamba_last_track_seqlen: got {length}"):
        rig.cache.cache_finished_req(req)
    req.mamba_last_track_seqlen = 8


def test_a_request_without_a_slot_for_its_state_is_refused(plain):
    req = Request("r", [1], plain.lines.alloc())
    with pytest.raises(ValueError, match="mamba_pool_idx: got None"):
        plain.cache.cache_finished_req(req)


# --- requests start from a copy of a state ---


@pytest.mark.parametrize("has_slot", [False, True])
@rigs("mamba", "himamba", ("unified+mamba", {"tiers": 1}))
def test_a_request_gets_a_slot_of_its_own_and_the_state_to_copy(rig, has_slot):
    rig.turns(A)
    had = rig.slots.alloc(1) if has_slot else None
    req = Request("r", [], 0, mamba_pool_idx=had)
    rig.match([*A, 3, 3], cow_mamba=True, req=req)
    assert req.mamba_cow_src_index.tolist() == rig.data(rig.node_of(A), "mamba").value.tolist()
    assert req.mamba_pool_idx.tolist() != req.mamba_cow_src_index.tolist()
    assert had is None or req.mamba_pool_idx is had
    check_cache(rig.cache, NOTHING, req.mamba_pool_idx)
    rig.slots.free(req.mamba_pool_idx)


@rigs("mamba")
def test_without_a_state_there_is_nothing_to_copy(rig):
    req = Request("r", [], 0, mamba_cow_src_index=np.array([3]))
    rig.match(A, cow_mamba=True, req=req)
    assert (req.mamba_pool_idx, req.mamba_cow_src_index) == (None, None)
    with pytest.raises(ValueError, match="req: got None"):
        rig.match(A, cow_mamba=True)


@rigs("mamba", ("unified+mamba", {"tiers": 1}), slots=2)
def test_a_full_pool_evicts_another_state_but_not_the_one_to_copy(rig):
    rig.turns(A, [5, 5])
    req = Request("r", [], 0)
    rig.match([5, 5], cow_mamba=True, req=req)
    assert rig.ends("mamba") == {(5, 5)}
    check_cache(rig.cache, NOTHING, req.mamba_pool_idx)
    rig.slots.free(req.mamba_pool_idx)


@pytest.mark.parametrize("fails", [False, True])
@rigs("mamba", slots=1)
def test_a_request_that_no_slot_is_left_for_gets_an_error_and_leaves_no_lock(rig, monkeypatch, fails):
    rig.turns(A)
    if fails:
        monkeypatch.setattr(rig.cache, "evict_mamba", lambda mamba_num: 1 // 0)
    req, error = Request("r", [], 0), ZeroDivisionError if fails else PoolExhaustedError
    with pytest.raises(error, match="zero" if fails else "request r needs a state slot: 0 of 1 free"):
        rig.match([*A, 3, 3], cow_mamba=True, req=req)
    assert (rig.cache.protected_size(), rig.cache.states.protected_size, req.mamba_pool_idx) == (0, 0, None)
    assert issubclass(PoolExhaustedError, RuntimeError)
