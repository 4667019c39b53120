"""Exceptions at the start or end of a prefetch leave nothing behind, and the next prefetch works."""

from collections.abc import Callable
from typing import Any

import pytest

from engine_cache import EvictParams, Lane, StoragePolicy
from engine_cache.storage.base import PoolName
from engine_cache.tree.node import iter_nodes
from kv_events.schema import StorageMedium
from tests.support.caches.checks import check_cache
from tests.support.caches.hybrid_rig import HybridRig
from tests.support.caches.tier_rig import MemoryStorage, Rig
from tests.support.caches.unified_rig import UnifiedRig

pytestmark = pytest.mark.torch
CPU = StorageMedium.CPU
AB, ABCD = [1, 1, 2, 2], [1, 1, 2, 2, 3, 3, 4, 4]
KINDS: dict[str, Callable[[], Any]] = {
    "hiradix": Rig,
    "himamba": HybridRig,
    "unified": lambda: UnifiedRig(("mamba", "swa")),
}


def attached(kind, store):
    rig = KINDS[kind]()
    assert rig.cache.attach_storage_backend(store, StoragePolicy(1, stop="wait_complete"))[0]
    return rig


@pytest.fixture(params=KINDS)
def rig(request):
    """A rig with the first half of a prompt on the host and the whole prompt in the store."""
    store = MemoryStorage()
    writer = attached(request.param, store)
    writer.insert(AB)
    writer.insert(ABCD)
    writer.settle()
    assert writer.cache.detach_storage_backend()[0]
    rig = attached(request.param, store)
    rig.insert(AB)
    rig.settle()
    rig.cache.evict(EvictParams(100))
    rig.cache.take_events()
    yield rig
    rig.check()


def begin(rig):
    rig.cache.prefetch_from_storage("r", rig.match(AB).last_host_node, ABCD[4:])


def finish(rig):
    while rig.engine.step(Lane.PREFETCH):
        pass
    rig.cache.check_hicache_events()
    assert rig.cache.check_prefetch_progress("r")
    rig.cache.check_hicache_events()


def free(rig):
    return {name: entry.host_pool.available_size() for name, entry in rig.controller.entries.items()}


def assert_nothing_is_held(rig, free_before):
    cache = rig.cache
    assert free(rig) == free_before
    assert (cache.ongoing_prefetch, cache.prefetch_tokens_occupied, cache.store.io.prefetches) == ({}, 0, [])
    assert [node for node in iter_nodes(cache.root_node) if node.host_ref_counter] == []
    cache.release_aborted_request("r")
    assert cache.check_prefetch_progress("r")
    check_cache(cache)


def assert_the_next_one_works(rig):
    begin(rig)
    finish(rig)
    assert rig.cache.pop_prefetch_loaded_tokens("r") == 4
    assert len(rig.held(CPU)) == 4


def refuse(*args, **kwargs):
    raise RuntimeError("failed on purpose")


def pool_of(rig, name):
    return rig.controller.entries[name].host_pool


@pytest.mark.parametrize("where", ["submit", "alloc", "evict_host", "extras"])
def test_a_prefetch_that_cannot_begin_leaves_nothing_behind(rig, monkeypatch, where):
    before = free(rig)
    hogged = pool_of(rig, PoolName.KV).alloc(before[PoolName.KV]) if where == "evict_host" else None
    target = {
        "submit": (rig.engine, "submit"),
        "alloc": (pool_of(rig, PoolName.KV), "alloc"),
        "evict_host": (rig.cache.host.leaves, "evict"),
        "extras": (rig.cache.store, "_prefetch_extras"),
    }[where]
    with monkeypatch.context() as patch:
        patch.setattr(*target, refuse)
        with pytest.raises(RuntimeError, match="failed on purpose"):
            begin(rig)
    if hogged is not None:
        rig.host.free(hogged)
    assert_nothing_is_held(rig, before)
    assert_the_next_one_works(rig)


@pytest.mark.parametrize(
    ("rig", "kind"),
    [("himamba", PoolName.MAMBA), ("unified", PoolName.MAMBA), ("unified", PoolName.SWA)],
    indirect=["rig"],
)
def test_a_sidecar_whose_room_cannot_be_made_costs_the_others_nothing(rig, monkeypatch, kind):
    before = free(rig)
    with monkeypatch.context() as patch:
        patch.setattr(pool_of(rig, kind), "alloc", refuse)
        with pytest.raises(RuntimeError, match="failed on purpose"):
            begin(rig)
    assert_nothing_is_held(rig, before)
    assert_the_next_one_works(rig)


@pytest.mark.parametrize("where", ["_wait_for_backup", "_add_leaf", "store"])
def test_what_has_arrived_and_cannot_be_put_into_the_tree_is_freed(rig, monkeypatch, where):
    before = free(rig)
    begin(rig)
    while rig.engine.step(Lane.PREFETCH):
        pass
    with monkeypatch.context() as patch:
        patch.setattr(rig.cache.events if where == "store" else rig.cache.store, where, refuse)
        with pytest.raises(RuntimeError, match="failed on purpose"):
            rig.cache.check_prefetch_progress("r")
    rig.cache.check_hicache_events()
    assert_nothing_is_held(rig, before)
    assert rig.events() == []
    assert_the_next_one_works(rig)


def test_what_the_tree_has_taken_before_it_failed_is_the_trees(rig, monkeypatch):
    begin(rig)
    rig.insert([*AB, 3, 3])  # now on the device and on the host
    rig.settle()
    rig.cache.take_events()
    before = free(rig)
    with monkeypatch.context() as patch:
        patch.setattr(rig.cache.store, "_add_leaf", refuse)
        with pytest.raises(RuntimeError, match="failed on purpose"):
            rig.cache.check_prefetch_progress("r")
    rig.cache.check_hicache_events()
    assert free(rig)[PoolName.KV] == before[PoolName.KV] + 4
    assert rig.cache.prefetch_tokens_occupied == 0


@pytest.mark.parametrize("lane", [Lane.PREFETCH, Lane.ARCHIVE])
def test_an_operation_that_the_engine_takes_no_further_ends(rig, monkeypatch, lane):
    before = free(rig)
    rig.cache.store.io.policy = StoragePolicy(1, batch_pages=1, stop="wait_complete")
    if lane is Lane.PREFETCH:
        begin(rig)
    else:
        rig.insert([7, 7, 8, 8])
        rig.engine.step(Lane.WRITE)
        rig.cache.writing_check()
        before = free(rig)
    with monkeypatch.context() as patch:
        patch.setattr(rig.engine, "submit", refuse)
        rig.engine.step(lane)
    assert rig.cache.store.io.num_errors == 1
    if lane is Lane.PREFETCH:
        finish(rig)
    rig.cache.check_hicache_events()
    assert rig.cache.ongoing_backup == {}
    assert_nothing_is_held(rig, before)


def test_the_archive_of_a_node_that_cannot_begin_holds_nothing(rig, monkeypatch):
    rig.insert([7, 7, 8, 8])
    rig.engine.step(Lane.WRITE)
    with monkeypatch.context() as patch:
        patch.setattr(rig.engine, "submit", refuse)
        with pytest.raises(RuntimeError, match="failed on purpose"):
            rig.cache.check_hicache_events()
    assert (rig.cache.ongoing_backup, rig.cache.archive_tokens_occupied) == ({}, 0)
    rig.cache.evict(EvictParams(100))
    assert rig.cache.evict_host(100) == 8
