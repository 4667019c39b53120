"""Locks: what they hold, on each tier, and releases that undo exactly their own lock."""

import pytest

from engine_cache import CacheStateError, DecLockRefParams, EvictParams, EvictResult, IncLockRefResult
from kv_events.errors import InvalidValueError
from tests.rigs.cache import AB, ABC, ABCD, EVERYTHING, A, CacheRig, rigs
from tests.rigs.cache_steps import holdings

ALL = ("radix", "mamba", "hiradix", "himamba", "unified", "unified+mamba+swa")


def locked(rig, kind="full", field="lock_ref"):
    return rig.ends(kind, field)


def ends(*prompts):
    return {tuple(tokens) for tokens in prompts}


# --- locks ---


@rigs(*ALL)
def test_a_locked_prefix_is_not_evicted_and_locks_count(rig):
    rig.turns(A, AB, [1, 1, 5, 5])
    node = rig.match(AB).last_device_node
    locks = [rig.cache.inc_lock_ref(node) for _ in range(2)]
    assert [(lock.delta, lock.node) for lock in locks] == [(-4, node), (0, node)]
    assert (rig.cache.evictable_size(), rig.cache.protected_size()) == (2, 4)
    assert rig.cache.evict(EvictParams(100)).num_tokens_evicted == 2
    assert len(rig.match(AB).device_indices) == 4
    assert [rig.cache.release(lock).delta for lock in locks] == [0, 4]
    with pytest.raises(CacheStateError, match="lock_ref 0"):
        rig.cache.dec_lock_ref(node, DecLockRefParams())
    assert (node.lock_ref, rig.cache.evict(EvictParams(100)).num_tokens_evicted) == (0, 4)


@rigs("unified+mamba+swa")
def test_a_lock_that_is_released_twice_leaves_the_locks_of_others(rig):
    rig.turns(A, AB)
    node = rig.match(AB).last_device_node
    first, other = (rig.cache.inc_lock_ref(node) for _ in range(2))
    params = first.to_dec_params()
    rig.cache.dec_lock_ref(node, params)
    with pytest.raises(CacheStateError, match="is not locked by these params"):
        rig.cache.dec_lock_ref(node, params)
    assert rig.cache.evict(EvictParams(100)).num_tokens_evicted == 0
    assert (node.lock_ref, rig.cache.release(other).delta) == (1, 4)


@rigs(*ALL)
def test_nodes_of_another_tree_or_of_none_are_refused(rig):
    rig.insert(A)
    rig.settle()
    node, other = rig.node_of(A), CacheRig(rig.name).cache
    with pytest.raises(CacheStateError, match="is not below"):
        other.inc_lock_ref(node)
    with pytest.raises(CacheStateError):
        other.dec_lock_ref(node, DecLockRefParams())
    rig.cache.evict(EvictParams(2))
    rig.cache.evict_host(2)
    with pytest.raises(CacheStateError):
        rig.cache.inc_lock_ref(node)


@rigs("hiradix")
def test_an_evicted_node_can_be_neither_locked_nor_unlocked(rig):
    rig.demoted(A)
    for method in (rig.cache.inc_lock_ref, rig.cache.dec_lock_ref):
        with pytest.raises(CacheStateError, match="not on the device"):
            method(rig.node_of(A))


@rigs("mamba")
def test_locks_keep_the_way_and_the_state_but_not_the_states_on_the_way(rig):
    rig.turns(A, AB)
    lock = rig.cache.inc_lock_ref(rig.node_of(AB))
    states = rig.cache.states
    assert (rig.cache.protected_size(), states.protected_size) == (4, 1)
    with pytest.raises(CacheStateError, match="mamba_lock_ref 0"):
        rig.cache.dec_lock_ref(rig.node_of(A))
    assert rig.node_of(A).lock_ref == 1
    assert rig.cache.evict(EVERYTHING) == EvictResult(0, 1)
    assert (rig.ends(), rig.ends("mamba")) == (ends(A, AB), ends(AB))
    rig.cache.release(lock)
    assert (states.evictable_size, states.protected_size) == (1, 0)


@rigs("himamba")
def test_locking_what_is_not_on_the_device_locks_the_way_to_it_and_names_it(rig):
    upper, lower = rig.turns(A, AB)
    rig.cache.evict(EvictParams(2))
    lock = rig.cache.inc_lock_ref(lower)
    assert lock == IncLockRefResult(-2, upper)
    assert (upper.lock_ref, lower.lock_ref) == (1, 0)
    with pytest.raises(CacheStateError, match=f"node {lower.id} is not on the device"):
        rig.cache.dec_lock_ref(lower)
    assert rig.cache.evict(EvictParams(2)) == EvictResult(0, 0)
    rig.cache.dec_lock_ref(lock.node)
    assert (upper.lock_ref, rig.data(upper, "mamba").lock_ref) == (0, 0)
    rig.cache.evict_host(2)
    with pytest.raises(CacheStateError, match="has no ancestor on the device"):
        rig.cache.inc_lock_ref(lower)


@rigs("unified+mamba")
def test_a_release_must_state_what_it_takes_back(rig):
    node, _ = rig.turns(A, AB)
    lock = rig.cache.inc_lock_ref(node)
    with pytest.raises(InvalidValueError, match="params"):
        rig.cache.dec_lock_ref(lock.node)
    rig.cache.dec_lock_ref(lock.node, lock.to_dec_params())


@rigs("unified")
def test_a_tree_of_kv_alone_needs_no_params_for_a_release(rig):
    _, node = rig.turns(A, AB)
    assert (rig.cache.inc_lock_ref(node).delta, rig.cache.dec_lock_ref(node).delta) == (-4, 4)


# --- locks of a sliding window with gaps ---


def make_gap(rig, node):
    """Free the SWA rows of a node on both tiers."""
    (swa,) = rig.cache.auxiliaries
    swa.free_on_device(node)
    swa.free_on_host(node)


def acquire(rig, tokens, tier="lock_ref"):
    """Lock the window that ends with these tokens. Returns the function that releases it."""
    (swa,), node = rig.cache.auxiliaries, rig.node_of(tokens)
    if tier == "lock_ref":
        lock = rig.cache.inc_lock_ref(node)
        return lambda: rig.cache.release(lock)
    ticket = swa.acquire(node, on_host=True)
    return lambda: swa.release(ticket)


WIDE = {"window": 4, "device_pages": 10, "swa_pages": 10}


@pytest.mark.parametrize(("gap", "held"), [(ABC, (AB, ABCD)), (ABCD, (AB, ABC))])
@pytest.mark.parametrize("tier", ["lock_ref", "host_lock_ref"])
@rigs("unified+swa", **WIDE)
def test_a_lock_continues_behind_a_gap_and_above_a_tombstone(rig, tier, gap, held):
    rig.turns(A, AB, ABC, ABCD)
    make_gap(rig, rig.node_of(gap))
    release = acquire(rig, ABCD, tier)
    assert locked(rig, "swa", tier) == ends(*held)
    release()
    assert locked(rig, "swa", tier) == set()


@rigs(*ALL)
def test_a_lock_of_the_root_protects_nothing_and_is_released_without_a_trace(rig):
    before = holdings(rig)
    lock = rig.cache.inc_lock_ref(rig.cache.root_node)
    assert (lock.delta, lock.tickets, rig.cache.release(lock).delta) == (0, (), 0)
    assert holdings(rig) == before
