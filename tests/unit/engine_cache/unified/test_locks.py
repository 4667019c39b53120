"""Locks of a unified tree: the data that they hold, and releases that undo exactly their own lock."""

import pytest

from engine_cache import CacheStateError, DecLockRefParams, EvictParams
from kv_events.errors import InvalidValueError
from tests.support.caches.unified_rig import UnifiedRig

pytestmark = pytest.mark.torch

A, AB, ABC, ABCD = [1, 1], [1, 1, 2, 2], [1, 1, 2, 2, 3, 3], [1, 1, 2, 2, 3, 3, 4, 4]
EVERYTHING = EvictParams(100, 100, 100)


def filled(*kinds, **params):
    rig = UnifiedRig(kinds, **params)
    for tokens in (A, AB, ABC, ABCD):
        rig.insert(tokens)
        rig.settle()
    return rig


def locked(rig, kind, field="lock_ref"):
    return {tuple(place.prefixes[-1]) for place in rig.walk() if getattr(rig.data(place.node, kind), field)}


def test_kv_is_locked_up_to_the_root_a_window_of_swa_rows_and_one_state():
    rig = filled("mamba", "swa")
    lock = rig.cache.inc_lock_ref(rig.node_of(ABC))
    assert locked(rig, "full") == {tuple(tokens) for tokens in (A, AB, ABC)}
    assert locked(rig, "swa") == {tuple(tokens) for tokens in (AB, ABC)}
    assert locked(rig, "mamba") == {tuple(ABC)}
    rig.cache.evict(EVERYTHING)
    rig.check()
    assert rig.match(ABC).last_device_node is rig.node_of(ABC)
    rig.cache.release(lock)
    assert locked(rig, "full") == locked(rig, "swa") == locked(rig, "mamba") == set()
    rig.check()


@pytest.mark.parametrize("cut", [A, AB])
def test_a_lock_survives_splits_and_its_release_finds_the_end_again(cut):
    rig = UnifiedRig(("swa",), window=6, tiers=1)
    rig.insert([*ABC, 5, 5])
    first = rig.cache.inc_lock_ref(rig.node_of([*ABC, 5, 5]))
    rig.match(cut)
    second = rig.cache.inc_lock_ref(rig.node_of([*ABC, 5, 5]))
    rig.match(ABC)
    rig.check()
    for lock in (first, second):
        rig.cache.release(lock)
    assert locked(rig, "swa") == set()
    rig.check()


def test_two_locks_that_end_at_different_nodes_are_released_in_any_order():
    for order in ((0, 1), (1, 0)):
        rig = UnifiedRig(("swa",), window=3, tiers=1)
        rig.insert(AB)
        rig.insert(ABCD)
        locks = [rig.cache.inc_lock_ref(rig.node_of(ABCD))]
        rig.match(ABC)
        locks.append(rig.cache.inc_lock_ref(rig.node_of(ABCD)))
        rig.cache.release(locks[order[0]])
        assert rig.data(rig.node_of(ABCD), "swa").lock_ref == 1
        rig.cache.release(locks[order[1]])
        assert locked(rig, "swa") == set()
        rig.check()


def test_a_tombstone_is_not_locked_and_what_comes_later_is_not_unlocked():
    rig = filled("mamba")
    (mamba,) = rig.cache.auxiliaries
    node = rig.node_of(AB)
    mamba.free_on_device(node)
    early = rig.cache.inc_lock_ref(node)
    assert early.tickets == ()
    rig.insert(AB)  # brings the state back
    late = rig.cache.inc_lock_ref(node)
    rig.cache.release(early)
    assert rig.data(node, "mamba").lock_ref == 1
    rig.cache.release(late)
    assert rig.data(node, "mamba").lock_ref == 0
    rig.check()


def test_a_node_that_is_not_on_the_device_stands_for_the_kv_above_it():
    rig = filled("mamba")
    rig.cache.host.evict_leaf(rig.node_of(ABCD))
    lock = rig.cache.inc_lock_ref(rig.node_of(ABCD))
    assert (lock.node, lock.tickets) == (rig.node_of(ABC), ())
    load_lock = rig.load_back(rig.match(ABCD))[2]
    rig.cache.release(lock)  # keeps the locks of the load
    assert rig.node_of(ABCD).lock_ref > 0
    rig.settle()
    rig.cache.release(load_lock)
    rig.end_requests()
    assert locked(rig, "full") == locked(rig, "mamba") == set()
    rig.check()


def test_a_release_must_state_what_it_takes_back():
    rig = filled("mamba")
    lock = rig.cache.inc_lock_ref(rig.node_of(AB))
    with pytest.raises(InvalidValueError, match="params"):
        rig.cache.dec_lock_ref(lock.node)
    rig.cache.dec_lock_ref(lock.node, lock.to_dec_params())
    with pytest.raises(CacheStateError, match="lock_ref"):
        rig.cache.dec_lock_ref(lock.node, DecLockRefParams())


def test_a_tree_of_kv_alone_needs_no_word_on_a_release():
    rig = filled()
    node = rig.node_of(AB)
    assert rig.cache.inc_lock_ref(node).delta == -4
    assert rig.cache.dec_lock_ref(node).delta == 4


def test_the_root_can_be_locked():
    rig = filled("mamba", "swa")
    lock = rig.cache.inc_lock_ref(rig.cache.root_node)
    assert (lock.delta, lock.tickets) == (0, ())
    rig.cache.release(lock)
    rig.check()


def test_host_data_that_a_transfer_needs_leave_the_host_lists_across_splits():
    rig = UnifiedRig(("mamba", "swa"), window=8)
    rig.insert(ABCD)
    rig.settle()
    rig.cache.evict(EVERYTHING)
    mamba, swa = rig.cache.auxiliaries
    node = rig.node_of(ABCD)
    release = rig.hold_on_host(node)
    assert [len(each.host_lru_list) for each in (mamba, swa)] == [0, 0]
    rig.match(AB)
    for component in (mamba, swa):
        assert rig.cache.host.leaves.evict_component(component, 100) == 0
    release()
    assert [len(each.host_lru_list) for each in (mamba, swa)] == [1, 2]
    rig.check()
