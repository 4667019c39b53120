"""Requests on a unified tree: the data that they share while they run and when they end."""

import numpy as np
import pytest

from engine_cache import EvictParams, ReqToTokenPool, Request
from engine_cache.storage.base import PoolName
from tests.support.caches.checks import check_cache
from tests.support.caches.number_pools import content
from tests.support.caches.unified_rig import NOTHING, UnifiedRig

pytestmark = pytest.mark.torch

ABC = [1, 1, 2, 2, 3, 3]


def rig_for_requests(*kinds, **params):
    return UnifiedRig(kinds, tiers=1, req_to_token_pool=ReqToTokenPool(4, 32), **params)


def compute(rig, req, tokens):
    """Allocate rows for the tokens of the request that have none."""
    known = len(req.token_ids)
    pages = -(-(len(tokens) - known) // rig.page_size)
    rows = rig.alloc(pages * rig.page_size)
    prefixes = rig.prefixes(tokens)[known // rig.page_size :]
    if prefixes:
        rig.compute(rows[: len(prefixes) * rig.page_size], None, prefixes)
    rig.cache.req_to_token_pool.write(req.req_pool_idx, known, rows[: len(tokens) - known])
    req.token_ids = tokens
    if "mamba" in rig.kinds:
        if req.mamba_pool_idx is None:
            req.mamba_pool_idx = rig.alloc_slot()
        if req.mamba_track_idx is None:
            req.mamba_track_idx = rig.alloc_slot()
        req.mamba_last_track_seqlen = len(rig.prefixes(tokens)) * rig.page_size
        rig.device_pools[PoolName.MAMBA].rows[req.mamba_track_idx] = state_after(rig, tokens)


def state_after(rig, tokens):
    return content(None, rig.prefixes(tokens)[-1], "mamba")


def check(rig, *requests):
    """Check that the pools add up with the rows and slots of running requests."""
    rows = [
        rig.cache.req_to_token_pool.read(r.req_pool_idx, len(r.token_ids))[r.cache_protected_len :] for r in requests
    ]
    slots = [slot for r in requests for slot in (r.mamba_pool_idx, r.mamba_track_idx) if slot is not None]
    check_cache(rig.cache, np.concatenate([NOTHING, *rows]), np.concatenate([NOTHING, *slots]))
    rig.check_bytes()


@pytest.mark.parametrize("kinds", [(), ("mamba",), ("swa",), ("mamba", "swa")])
def test_a_request_shares_what_it_has_computed_and_ends_without_a_trace(kinds):
    rig = rig_for_requests(*kinds)
    req = Request("r", [], rig.cache.req_to_token_pool.alloc())
    compute(rig, req, [*ABC, 4])
    rig.cache.cache_unfinished_req(req)
    assert (req.cache_protected_len, req.last_node) == (6, rig.node_of(ABC))
    assert req.prefix_indices[:6].tolist() == rig.match(ABC).device_indices.tolist()
    check(rig, req)
    assert rig.cache.evict(EvictParams(100)).num_tokens_evicted == 0
    compute(rig, req, [*ABC, 4, 4, 5][:7])
    rig.cache.cache_finished_req(req)
    assert rig.cache.protected_size() == 0
    check(rig)
    assert len(rig.match(ABC).device_indices) == 6


@pytest.mark.parametrize("kinds", [(), ("mamba",), ("swa",)])
def test_a_second_request_with_the_same_prompt_is_put_on_the_rows_of_the_first(kinds):
    rig = rig_for_requests(*kinds, slots=8)
    first, second = (Request(name, [], rig.cache.req_to_token_pool.alloc()) for name in "ab")
    for req in (first, second):
        compute(rig, req, ABC)
    for req in (first, second):
        rig.cache.cache_unfinished_req(req)
        check(rig, first, second)
    assert second.prefix_indices.tolist() == first.prefix_indices.tolist()
    for req in (first, second):
        rig.cache.cache_finished_req(req)
    check(rig)
    assert rig.cache.protected_size() == 0


@pytest.mark.parametrize("kinds", [(), ("mamba",), ("swa",)])
def test_a_request_that_is_not_to_be_inserted_gives_everything_back(kinds):
    rig = rig_for_requests(*kinds)
    req = Request("r", [], rig.cache.req_to_token_pool.alloc())
    compute(rig, req, ABC)
    rig.cache.cache_finished_req(req, is_insert=False)
    assert rig.cache.root_node.children == {}
    check(rig)


def test_swa_rows_that_the_window_has_left_are_not_shared():
    rig = rig_for_requests("swa")
    req = Request("r", [], rig.cache.req_to_token_pool.alloc())
    compute(rig, req, [*ABC, 4, 4])
    rows = rig.cache.req_to_token_pool.read(req.req_pool_idx, 8)
    rig.swa.free_swa(rows[:2])
    req.swa_evicted_seqlen = 2
    rig.cache.cache_unfinished_req(req)
    check(rig, req)
    assert rig.match([1, 1]).best_match_node is rig.cache.root_node
    assert len(rig.match([*ABC, 4, 4]).device_indices) == 8
    rig.cache.cache_finished_req(req)
    check(rig)


def test_a_running_request_keeps_rows_that_no_other_could_use():
    """All of its whole pages are outside the window, but it still reads their full rows."""
    rig = rig_for_requests("swa", window=1)
    req = Request("r", [], rig.cache.req_to_token_pool.alloc())
    compute(rig, req, [*ABC, 4])
    rows = rig.cache.req_to_token_pool.read(req.req_pool_idx, 7)
    rig.swa.free_swa(rows[:6])
    req.swa_evicted_seqlen = 6
    rig.cache.cache_unfinished_req(req)
    assert (rig.cache.root_node.children, req.prefix_indices.tolist()) == ({}, rows.tolist())
    check(rig, req)
    rig.cache.cache_finished_req(req)
    check(rig)


def test_a_request_without_a_state_shares_nothing():
    rig = rig_for_requests("mamba")
    req = Request("r", [], rig.cache.req_to_token_pool.alloc())
    compute(rig, req, ABC)
    req.mamba_last_track_seqlen = None
    rig.cache.cache_unfinished_req(req)
    assert rig.cache.root_node.children == {}
    check(rig, req)


def test_a_request_starts_from_a_copy_of_the_state_of_its_match():
    rig = rig_for_requests("mamba", slots=2)
    rig.insert([1, 1])
    rig.insert(ABC)
    req = Request("r", [], rig.cache.req_to_token_pool.alloc())
    match = rig.match(ABC, cow_mamba=True, req=req)  # both slots are in the tree: one state is evicted for it
    assert match.best_match_node is rig.node_of(ABC)
    assert req.mamba_cow_src_index.tolist() == rig.data(rig.node_of(ABC), "mamba").value.tolist()
    assert rig.data(rig.node_of([1, 1]), "mamba").value is None
    check_cache(rig.cache, NOTHING, req.mamba_pool_idx)
