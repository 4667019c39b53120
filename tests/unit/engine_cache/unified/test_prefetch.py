"""Prefetches of a unified tree: KV as in other caches, one slot for a state, one window of SWA rows."""

import pytest

from engine_cache import EvictParams, Lane, StoragePolicy
from engine_cache.storage.base import PoolName
from tests.support.caches.page_names import block_hash
from tests.support.caches.tier_rig import MemoryStorage
from tests.support.caches.unified_rig import UnifiedRig

pytestmark = pytest.mark.torch

A, AB, ABC, ABCD = [1, 1], [1, 1, 2, 2], [1, 1, 2, 2, 3, 3], [1, 1, 2, 2, 3, 3, 4, 4]
SIZES = {"device_pages": 8, "swa_pages": 8, "host_pages": 16, "swa_host_pages": 10}


def attached(kinds, store, **params):
    rig = UnifiedRig(kinds, **(SIZES | params))
    assert rig.cache.attach_storage_backend(store, StoragePolicy(1))[0]
    return rig


def archived(kinds, *prompts, **params):
    """Return a store to which another worker has archived these prompts."""
    store = MemoryStorage()
    rig = attached(kinds, store, **params)
    for tokens in prompts:
        rig.insert(tokens)
        rig.settle()
    assert rig.cache.detach_storage_backend()[0]
    return store


def prefetch(rig, tokens, req_id="r"):
    anchor = rig.match(tokens).last_host_node
    start = sum(len(node.key) for node in rig.up(anchor))
    rig.cache.prefetch_from_storage(req_id, anchor, tokens[start:])


def finish(rig, req_id="r"):
    while rig.engine.step(Lane.PREFETCH):
        pass
    rig.cache.check_hicache_events()
    assert rig.cache.check_prefetch_progress(req_id)
    rig.cache.check_hicache_events()
    return rig.cache.pop_prefetch_loaded_tokens(req_id)


def used(rig):
    return {name.value: pool.size - pool.available_size() for name, pool in rig.host_pools.items()}


@pytest.mark.parametrize("kinds", [(), ("mamba",), ("swa",), ("mamba", "swa")])
def test_what_another_worker_archived_can_be_matched_loaded_and_used(kinds):
    store = archived(kinds, ABCD)
    rig = attached(kinds, store)
    rig.events()
    prefetch(rig, ABCD)
    assert finish(rig) == 8
    assert rig.events() == [("BlockStored", "CPU_PINNED", page) for page in ([1, 1], [2, 2], [3, 3], [4, 4])]
    match = rig.match(ABCD)
    assert (len(match.device_indices), match.host_hit_length) == (0, 8)
    rig.check()
    (rows, _), _, lock = rig.load_back(match)
    rig.settle()
    assert rig.match(ABCD).device_indices.tolist() == rows.tolist()
    rig.cache.release(lock)
    rig.end_requests()
    rig.check()


def test_swa_rows_of_one_window_are_fetched_and_no_more():
    rig = attached(("swa",), archived(("swa",), ABCD))
    prefetch(rig, ABCD)
    finish(rig)
    assert used(rig) == {"kv": 8, "swa": 4, "mamba": 0}
    (leaf,) = [place.node for place in rig.walk() if rig.data(place.node, "swa").host_value is not None]
    assert len(leaf.key) == 4
    rig.check()


def test_a_hit_ends_at_the_last_state():
    store = archived(("mamba",), AB, ABCD)
    store.lose(block_hash(tuple(ABCD), 2, False).hex(), PoolName.MAMBA)
    rig = attached(("mamba",), store)
    prefetch(rig, ABCD)
    assert finish(rig) == 4
    assert rig.match(ABCD).best_match_node is rig.node_of(AB)
    rig.check()


def test_a_state_is_given_to_a_node_that_had_none_on_the_host():
    """The node was added by another request while its pages were being fetched."""
    rig = attached(("mamba",), archived(("mamba",), AB), write_policy="write_back")
    prefetch(rig, AB)
    while rig.engine.step(Lane.PREFETCH):
        pass
    rig.insert(AB)
    assert finish(rig) == 0
    data = rig.data(rig.node_of(AB), "mamba")
    assert data.value is not None
    assert data.host_value is not None
    assert rig.node_of(AB).host_value is not None  # adopted
    rig.check()


def test_swa_rows_fill_tombstones_from_the_end_upward_and_the_rest_is_released():
    rig = attached(("swa",), archived(("swa",), ABCD), window=3)
    rig.insert(ABC)
    rig.settle()
    rig.cache.evict(EvictParams(100))
    (swa,) = rig.cache.auxiliaries
    prefetch(rig, ABCD)
    finish(rig)
    before = used(rig)["swa"]
    assert before <= 8
    rig.check()
    assert rig.match(ABC).best_match_node is rig.node_of(ABC)
    assert swa.host_lru_list


@pytest.mark.parametrize("kinds", [("mamba",), ("swa",), ("swa", "mamba")])
def test_without_room_for_a_kind_nothing_is_begun(kinds):
    rig = attached(kinds, archived(kinds, ABCD))
    last = {"mamba": PoolName.MAMBA, "swa": PoolName.SWA}[kinds[-1]]
    taken = rig.host_pools[last].alloc(rig.host_pools[last].size)
    before = used(rig)
    prefetch(rig, ABCD)
    assert (rig.cache.ongoing_prefetch, used(rig), rig.cache.prefetch_tokens_occupied) == ({}, before, 0)
    assert rig.cache.root_node.host_ref_counter == 0
    rig.host_pools[last].free(taken)


@pytest.mark.parametrize("kinds", [(), ("mamba",), ("swa",), ("mamba", "swa")])
def test_a_prefetch_is_cut_to_the_pages_that_are_free_without_a_second_eviction(kinds):
    rig = attached(kinds, archived(kinds, AB, ABCD))
    taken = rig.host.alloc(rig.host.size - 4)
    evictions = []
    evict = rig.cache.host.leaves.evict
    rig.cache.host.leaves.evict = lambda num: evictions.append(num) or evict(num)  # type: ignore[func-returns-value]
    prefetch(rig, ABCD)
    (operation,) = rig.cache.ongoing_prefetch.values()
    assert (len(operation.key), rig.cache.prefetch_tokens_occupied, evictions) == (4, 4, [8])
    assert finish(rig) == 4
    assert rig.cache.prefetch_tokens_occupied == 0
    assert rig.match(ABCD).best_match_node is rig.node_of(AB)
    rig.host.free(taken)
    rig.check()


def test_a_cut_below_the_threshold_is_not_worth_it():
    rig = attached((), archived((), ABCD))
    rig.cache.store.io.policy = StoragePolicy(6)
    taken = rig.host.alloc(rig.host.size - 4)
    prefetch(rig, ABCD)
    assert (rig.cache.ongoing_prefetch, rig.cache.root_node.host_ref_counter, rig.host.available_size()) == ({}, 0, 4)
    rig.host.free(taken)


def test_the_anchor_keeps_what_it_has_on_the_host_of_each_kind_until_the_end():
    store = archived(("mamba", "swa"), AB, ABCD)
    rig = attached(("mamba", "swa"), store)
    rig.insert(AB)
    rig.settle()
    rig.cache.evict(EvictParams(100, 100, 100))
    prefetch(rig, ABCD)
    anchor = rig.node_of(AB)
    assert rig.cache.evict_host(100) == 0
    assert [rig.cache.host.leaves.evict_component(each, 100) for each in rig.cache.auxiliaries] == [0, 0]
    assert [rig.data(anchor, kind).host_lock_ref for kind in ("full", "mamba", "swa")] == [1, 1, 1]
    finish(rig)
    assert [rig.data(anchor, kind).host_lock_ref for kind in ("full", "mamba", "swa")] == [0, 0, 0]
    rig.check()


def test_an_anchor_that_leaves_the_tree_gives_back_what_it_held_above():
    """Its own backup fails after the prefetch was begun, and then it is evicted."""
    kinds = ("mamba", "swa")
    rig = attached(kinds, archived(kinds, ABCD))
    rig.insert(A)
    rig.settle()
    rig.insert(AB)
    prefetch(rig, ABCD)
    assert rig.data(rig.node_of(A), "swa").host_lock_ref == 1
    rig.host.write_faults = 2
    while rig.engine.step(Lane.WRITE):
        pass
    rig.cache.check_hicache_events()
    assert rig.cache.evict(EvictParams(2)).num_tokens_evicted == 2
    assert finish(rig) == 0
    assert rig.data(rig.node_of(A), "swa").host_lock_ref == 0
    rig.settle()
    rig.check()


@pytest.mark.parametrize("way_out", ["abort", "revoke", "reset", "detach"])
def test_every_way_out_gives_everything_back(way_out):
    kinds = ("mamba", "swa")
    store = archived(kinds, ABCD) if way_out != "revoke" else MemoryStorage()
    rig = attached(kinds, store)
    tier = rig.cache.store
    prefetch(rig, ABCD)
    assert used(rig) == {"kv": 8, "swa": 4, "mamba": 1}
    if way_out == "abort":
        rig.cache.release_aborted_request("r")
    elif way_out == "reset":
        rig.cache.reset()
    elif way_out == "detach":
        assert rig.cache.detach_storage_backend()[0]
    rig.settle()
    assert used(rig) == {"kv": 0, "swa": 0, "mamba": 0}
    assert (rig.cache.ongoing_prefetch, rig.cache.prefetch_tokens_occupied, tier.ongoing_archives) == ({}, 0, {})
    assert rig.cache.root_node.host_ref_counter == 0
    rig.check()
