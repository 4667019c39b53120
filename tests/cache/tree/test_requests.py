"""Requests: what a match gives them, what they share while they run, and what is left when they end."""

from typing import Any

import numpy as np
import pytest

from engine_cache import CacheStateError, PoolExhaustedError, RadixCache, Request
from engine_cache.components.component import num_accepted
from tests.models.cache_checks import check_cache
from tests.rigs.cache import AB, ABC, NOTHING, A, rigs
from tests.rigs.cache_requests import Requests

HOST = ("hiradix", "himamba", "unified")


# --- matches ---


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


# --- requests ---


@pytest.fixture
def requests(rig):
    return Requests(rig)


def started(requests, tokens):
    """Begin a request and compute all its tokens."""
    req = requests.begin(tokens)
    assert requests.compute(req, tokens)
    return req


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


# --- requests and their states ---


@pytest.mark.parametrize("length", [6, 12])
@rigs("mamba", page_size=4)
def test_a_tracked_length_is_whole_pages_that_were_computed(rig, requests, length):
    req = started(requests, [*range(10)])
    req.mamba_last_track_seqlen = length
    with pytest.raises(ValueError, match=f"mamba_last_track_seqlen: got {length}"):
        rig.cache.cache_finished_req(req)
    req.mamba_last_track_seqlen = 8


@rigs("mamba", page_size=1, extra_buffer=False)
def test_a_request_without_a_slot_for_its_state_is_refused(rig):
    req = Request("r", [1], rig.lines.alloc())
    with pytest.raises(ValueError, match="mamba_pool_idx: got None"):
        rig.cache.cache_finished_req(req)


@rigs("mamba", page_size=1, extra_buffer=False, mamba_pool=None)
def test_without_a_pool_of_states_a_running_request_shares_another_slot(rig, requests):
    req = started(requests, [1, 2, 3])
    requests.share(req)
    assert rig.data(rig.node_of([1, 2, 3]), "mamba").value.tolist() != req.mamba_pool_idx.tolist()
    requests.end(req)
    rig.reset()  # nothing was copied, so the content of the state is undefined


@rigs("mamba", "himamba", "unified+mamba", slots=8)
def test_a_running_request_gives_back_the_copy_of_a_state_that_the_tree_has(rig, requests):
    first, second = started(requests, ABC), started(requests, ABC)
    requests.share(first)
    free = rig.slots.available_size()
    requests.share(second)
    assert (rig.slots.available_size(), rig.ends("mamba")) == (free, {tuple(ABC)})
    requests.end(first)
    requests.end(second)
    rig.check()


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
