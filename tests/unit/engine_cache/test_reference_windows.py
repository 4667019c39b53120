"""The part of a sliding window with gaps that a lock in a unified tree holds, as in the reference."""

import pytest

from engine_cache import ComponentType
from tests.support.caches.unified_rig import UnifiedRig

pytestmark = pytest.mark.torch

A, AB, ABC, ABCD = [1, 1], [1, 1, 2, 2], [1, 1, 2, 2, 3, 3], [1, 1, 2, 2, 3, 3, 4, 4]


@pytest.fixture(params=["lock_ref", "host_lock_ref"])
def tier(request):
    return request.param


def with_a_gap(*gaps):
    """Return a rig with four turns on both tiers and a window of two turns. The nodes in `gaps` have no SWA rows."""
    rig = UnifiedRig(("swa",), window=4, device_pages=10, swa_pages=10)
    for tokens in (A, AB, ABC, ABCD):
        rig.insert(tokens)
        rig.settle()
    for gap in gaps:
        swa(rig).free_on_device(rig.node_of(gap))
        swa(rig).free_on_host(rig.node_of(gap))
    return rig


def swa(rig):
    return rig.cache.component(ComponentType.SWA)


def acquire(rig, tokens, tier):
    """Lock the window that ends with these tokens. Returns the function that releases it."""
    component, node = swa(rig), rig.node_of(tokens)
    if tier == "lock_ref":
        lock = rig.cache.inc_lock_ref(node)
        return lambda: rig.cache.release(lock)
    ticket = component.acquire_host(node)
    return lambda: component.release_host(node, ticket)


def locked(rig, tier):
    return {place.prefixes[-1] for place in rig.walk() if getattr(rig.data(place.node, "swa"), tier)}


def test_a_lock_continues_behind_a_gap(tier):
    rig = with_a_gap(ABC)
    release = acquire(rig, ABCD, tier)
    assert locked(rig, tier) == {tuple(AB), tuple(ABCD)}
    release()
    assert locked(rig, tier) == set()
    rig.check()


def test_a_lock_of_a_tombstone_holds_the_window_above_it(tier):
    rig = with_a_gap(ABCD)
    release = acquire(rig, ABCD, tier)
    assert locked(rig, tier) == {tuple(AB), tuple(ABC)}
    release()
    assert locked(rig, tier) == set()
    rig.check()


def test_a_release_leaves_locks_that_came_to_a_gap_after_it_was_filled():
    rig = with_a_gap(ABC)
    first = acquire(rig, ABCD, "lock_ref")
    rig.insert(ABCD)
    rig.settle()
    second = acquire(rig, ABCD, "lock_ref")
    first()
    assert locked(rig, "lock_ref") == {tuple(ABC), tuple(ABCD)}
    second()
    assert locked(rig, "lock_ref") == set()
    rig.check()


def test_both_parts_of_a_gap_that_is_split_stay_gaps_of_the_lock():
    rig = UnifiedRig(("swa",), page_size=1, window=3, device_pages=20, swa_pages=20, host_pages=30, swa_host_pages=30)
    for tokens in ([1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5]):
        rig.insert(tokens)
        rig.settle()
    gap = rig.node_of([1, 2, 3, 4])
    swa(rig).free_on_device(gap)
    swa(rig).free_on_host(gap)
    first = acquire(rig, [1, 2, 3, 4, 5], "lock_ref")
    rig.match([1, 2, 3])
    rig.insert([1, 2, 3, 4, 5])
    rig.settle()
    second = acquire(rig, [1, 2, 3, 4, 5], "lock_ref")
    first()
    assert locked(rig, "lock_ref") == {(1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4, 5)}
    second()
    assert locked(rig, "lock_ref") == set()
    rig.check()
