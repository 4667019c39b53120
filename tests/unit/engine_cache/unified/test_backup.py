"""Backups of a unified tree: parents first, all kinds in one operation, and later data separately."""

import numpy as np
import pytest

from engine_cache import EvictParams, Lane, StoragePolicy
from engine_cache.storage.base import PoolName
from tests.support.caches.tier_rig import MemoryStorage
from tests.support.caches.unified_rig import UnifiedRig

pytestmark = pytest.mark.torch

A, AB, ABC = [1, 1], [1, 1, 2, 2], [1, 1, 2, 2, 3, 3]


def on_host(rig, tokens):
    """Return the kinds that the node at the end has on the host."""
    node = rig.node_of(tokens)
    return [kind for kind in ("full", "swa", "mamba") if rig.data(node, kind).host_value is not None]


def stored(rig):
    return [event[2] for event in rig.events() if event[:2] == ("BlockStored", "CPU_PINNED")]


def test_one_operation_carries_all_kinds_and_is_reported_once_it_has_ended():
    rig = UnifiedRig(("swa", "mamba"))
    rig.insert(A)
    assert on_host(rig, A) == ["full", "swa", "mamba"]
    assert stored(rig) == []
    assert rig.engine.num_queued(Lane.WRITE) == 1
    rig.settle()
    assert stored(rig) == [[1, 1]]
    rig.check()


def test_parents_without_a_copy_go_first():
    rig = UnifiedRig(("mamba",), write_policy="write_through_selective")
    rig.insert(A)
    rig.insert(AB)
    rig.insert(ABC, chunked=True)
    rig.match([1, 1, 2, 2, 3, 3])
    assert rig.cache.ongoing_write_through.keys() == {0}  # A was hit twice
    assert rig.cache.write_backup(rig.node_of(ABC)) == 2
    assert [operation.node for operation in rig.cache.ongoing_write_through.values()] == [
        rig.node_of(tokens) for tokens in (A, AB, ABC)
    ]
    rig.settle()
    assert stored(rig) == [[1, 1], [2, 2], [3, 3]]
    rig.check()


def test_without_room_for_a_parent_nothing_below_it_goes():
    rig = UnifiedRig(write_policy="write_through_selective", host_pages=9)
    rig.insert(AB)
    rig.match(A)
    taken = rig.host.alloc(18)
    assert rig.cache.write_backup(rig.node_of(AB)) == 0
    assert on_host(rig, A) == on_host(rig, AB) == []
    rig.host.free(taken)
    rig.check()


@pytest.mark.parametrize("pool", [PoolName.MAMBA, PoolName.SWA])
def test_without_room_for_one_kind_none_is_copied(pool):
    rig = UnifiedRig(("mamba", "swa"))
    taken = rig.host_pools[pool].alloc(rig.host_pools[pool].size)
    rig.insert(A)
    assert on_host(rig, A) == []
    assert rig.node_of(A).lock_ref == 0
    assert stored(rig) == []
    rig.host_pools[pool].free(taken)
    rig.check()
    rig.insert(A)  # heals
    assert on_host(rig, A) == ["full", "swa", "mamba"]


def test_a_failed_copy_takes_everything_back_and_heals():
    rig = UnifiedRig(("mamba", "swa"))
    rig.host_pools[PoolName.SWA].write_faults = 2
    rig.insert(A)
    rig.settle()
    assert on_host(rig, A) == []
    assert (stored(rig), rig.cache.num_failed_backups) == ([], 1)
    rig.check()
    rig.insert(A)
    rig.settle()
    assert on_host(rig, A) == ["full", "swa", "mamba"]
    rig.check()


@pytest.mark.parametrize(("kind", "pool"), [("mamba", PoolName.MAMBA), ("swa", PoolName.SWA)])
def test_host_rows_of_a_dropped_copy_are_nobodys_until_the_copy_has_ended(kind, pool):
    rig = UnifiedRig((kind,))
    rig.insert(A)
    rig.insert(AB)
    dropped, host = set(rig.data(rig.node_of(AB), kind).host_value), rig.host_pools[pool]
    rig.host.write_faults = 2
    rig.engine.step(Lane.WRITE)  # the backup of A, which the one below depends on
    rig.cache.check_hicache_events()
    assert on_host(rig, A) == on_host(rig, AB) == []
    taken = host.alloc(host.available_size())
    assert not dropped & set(taken)
    rig.engine.step(Lane.WRITE)
    assert host.available_size() == 0  # the cache does not know yet that the copy has ended
    rig.cache.check_hicache_events()
    assert set(host.alloc(host.available_size())) == dropped
    host.free(taken)
    host.free(np.array(sorted(dropped)))
    rig.check()


def test_all_parts_of_a_node_that_is_split_concurrently_are_reported_parents_first():
    rig = UnifiedRig(("mamba", "swa"), window=6)
    rig.insert(ABC)
    rig.match(A)
    assert (on_host(rig, A), on_host(rig, ABC)) == (["full", "swa"], ["full", "swa", "mamba"])
    rig.settle()
    assert stored(rig) == [[1, 1], [2, 2], [3, 3]]
    rig.check()


def test_a_state_that_comes_after_kv_went_follows_silently():
    rig = UnifiedRig(("mamba",))
    rig.insert(AB)
    rig.match(A)
    rig.settle()
    rig.events()
    rig.insert(A)
    assert rig.engine.num_queued(Lane.WRITE) == 1
    rig.settle()
    assert on_host(rig, A) == ["full", "mamba"]
    assert rig.events() == []
    rig.check()


def test_swa_rows_that_come_back_follow_even_if_their_node_is_split_concurrently():
    rig = UnifiedRig(("swa",), window=6, device_pages=12, swa_pages=10, swa_host_pages=11, host_pages=13)
    rig.insert(ABC, evicted=2)
    rig.match(ABC)
    rig.insert([*ABC, 4, 4])
    rig.settle()
    assert on_host(rig, AB) == ["full"]
    rig.insert([*ABC, 4, 4])
    assert rig.engine.num_queued(Lane.WRITE) == 1
    rig.match(A)
    assert on_host(rig, A) == on_host(rig, AB) == ["full", "swa"]
    rig.check()
    rig.settle()
    assert rig.data(rig.node_of(A), "swa").pending_id is None
    rig.check()


def test_a_copy_of_one_kind_alone_that_fails_leaves_kv_where_it_is():
    rig = UnifiedRig(("mamba",))
    rig.insert(AB)
    rig.match(A)
    rig.settle()
    rig.events()
    rig.insert(A)
    rig.host_pools[PoolName.MAMBA].write_faults = 2
    rig.settle()
    assert (on_host(rig, A), rig.events()) == (["full"], [])
    assert rig.node_of(A).lock_ref == 0
    rig.check()
    rig.insert(A)
    rig.settle()
    assert on_host(rig, A) == ["full", "mamba"]


def test_what_is_acknowledged_is_archived_with_all_its_kinds():
    rig, store = UnifiedRig(("mamba", "swa")), MemoryStorage()
    assert rig.cache.attach_storage_backend(store, StoragePolicy(1))[0]
    rig.insert(AB)
    rig.settle()
    count = {name: sum(pool is name for pool, _ in store.pages) for name in (PoolName.KV, PoolName.SWA, PoolName.MAMBA)}
    assert count == {PoolName.KV: 2, PoolName.SWA: 2, PoolName.MAMBA: 1}
    rig.match(A)
    rig.insert(A)  # a state alone
    rig.settle()
    assert sum(pool is PoolName.MAMBA for pool, _ in store.pages) == 2
    rig.check()


def test_what_is_being_archived_stays_on_the_host_across_a_split():
    rig, store = UnifiedRig(("mamba", "swa"), window=6), MemoryStorage()
    rig.cache.attach_storage_backend(store, StoragePolicy(1))
    rig.insert(ABC)
    rig.engine.step(Lane.WRITE)
    rig.cache.check_hicache_events()
    rig.cache.evict(EvictParams(100))
    rig.match(AB)
    assert rig.cache.evict_host(100) == 0
    assert [rig.cache.host.leaves.evict_component(each, 100) for each in rig.cache.auxiliaries] == [0, 0]
    rig.settle()
    assert len(store.pages) == 7
    assert rig.cache.evict_host(100) == 6
    rig.check()


def test_without_a_host_tier_nothing_is_backed_up_and_no_store_is_taken():
    rig = UnifiedRig(("mamba",), tiers=1)
    rig.insert(A)
    rig.insert(A)
    rig.cache.check_hicache_events()
    assert rig.cache.cache_controller is None
    assert on_host(rig, A) == []
    assert rig.cache.attach_storage_backend(MemoryStorage()) == (
        False,
        "the cache has no host tier",
    )
