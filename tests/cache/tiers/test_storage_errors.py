"""Exceptions of stores, pools and engines leave nothing behind, and the next operation works."""

import pytest

from engine_cache import EvictParams, Lane, StoragePolicy
from engine_cache.storage.base import PoolName
from engine_cache.tree.node import iter_nodes
from tests.models.cache_checks import check_cache
from tests.rigs.cache import AB, ABC, ABCD, CPU, FAILED, NOTHING, refuse, rigs
from tests.rigs.cache_steps import archived
from tests.rigs.cache_stores import MemoryStorage

MAMBA, SWA = PoolName.MAMBA, PoolName.SWA


# --- prefetches ---

KINDS: list[tuple[str, dict[str, int]]] = [("hiradix", {}), ("himamba", {}), ("unified+mamba+swa", {})]


@pytest.fixture
def half(rig):
    """AB on the host, ABCD in the store. Returns the free rows of the host pools."""
    archived(rig, AB, ABCD)
    rig.cache.store.io.policy = StoragePolicy(1, stop="wait_complete")
    rig.demoted(AB)
    return rig.used()


def fails(call, *args):
    with pytest.raises(RuntimeError, match=FAILED):
        call(*args)


def assert_nothing_is_held(rig, used):
    cache = rig.cache
    assert rig.used() == used
    assert (cache.ongoing_prefetch, cache.prefetch_tokens_occupied, cache.store.io.prefetches) == ({}, 0, [])
    assert [node for node in iter_nodes(cache.root_node) if node.host_ref_counter] == []
    cache.release_aborted_request("r")
    assert cache.check_prefetch_progress("r")
    check_cache(cache)


def assert_the_next_one_works(rig):
    rig.prefetch(ABCD)
    assert rig.fetched() == 4
    assert len(rig.held(CPU)) == 4


@pytest.mark.parametrize("where", ["submit", "alloc", "evict_host", "extras"])
@rigs(*KINDS)
def test_a_prefetch_that_cannot_begin_leaves_nothing_behind(rig, half, monkeypatch, where):
    hogged = rig.host.alloc(rig.host.available_size()) if where == "evict_host" else NOTHING
    target = {
        "submit": (rig.engine, "submit"),
        "alloc": (rig.host, "alloc"),
        "evict_host": (rig.cache.host.leaves, "evict"),
        "extras": (rig.cache.store, "_prefetch_extras"),
    }[where]
    with monkeypatch.context() as patch:
        patch.setattr(*target, refuse)
        fails(rig.prefetch, ABCD)
    rig.host.free(hogged)
    assert_nothing_is_held(rig, half)
    assert_the_next_one_works(rig)


@pytest.mark.parametrize("where", ["_wait_for_backup", "_add_leaf", "store"])
@rigs(*KINDS)
def test_what_has_arrived_and_cannot_be_put_into_the_tree_is_freed(rig, half, monkeypatch, where):
    rig.prefetch(ABCD)
    rig.run(Lane.PREFETCH)
    with monkeypatch.context() as patch:
        patch.setattr(rig.cache.events if where == "store" else rig.cache.store, where, refuse)
        fails(rig.cache.check_prefetch_progress, "r")
    rig.cache.check_hicache_events()
    assert_nothing_is_held(rig, half)
    assert rig.events() == []
    assert_the_next_one_works(rig)


@rigs(*KINDS)
def test_what_the_tree_has_taken_before_it_failed_is_the_trees(rig, half, monkeypatch):
    rig.prefetch(ABCD)
    rig.turns(ABC)  # now on the device and on the host
    before = rig.used()["kv"]
    with monkeypatch.context() as patch:
        patch.setattr(rig.cache.store, "_add_leaf", refuse)
        fails(rig.cache.check_prefetch_progress, "r")
    rig.cache.check_hicache_events()
    assert (rig.used()["kv"], rig.cache.prefetch_tokens_occupied) == (before - 4, 0)


@pytest.mark.parametrize("lane", [Lane.PREFETCH, Lane.ARCHIVE])
@rigs(*KINDS)
def test_an_operation_that_the_engine_takes_no_further_ends(rig, half, monkeypatch, lane):
    rig.cache.store.io.policy = StoragePolicy(1, batch_pages=1, stop="wait_complete")
    if lane is Lane.PREFETCH:
        rig.prefetch(ABCD)
    else:
        rig.insert([7, 7, 8, 8])
        rig.engine.step(Lane.WRITE)
        rig.cache.writing_check()
        half = rig.used()
    with monkeypatch.context() as patch:
        patch.setattr(rig.engine, "submit", refuse)
        rig.engine.step(lane)
    assert rig.cache.store.io.num_errors == 1
    rig.fetched()
    assert rig.cache.ongoing_backup == {}
    assert_nothing_is_held(rig, half)


# --- acknowledgements ---


@pytest.fixture
def fail_at(rig, monkeypatch):
    """Makes some calls of the engine fail before they have an effect, while `call` runs."""

    def run(call, *turns):
        calls, submit = [], rig.engine.submit

        def failing(*args):
            calls.append(args)
            if len(calls) in turns:
                raise RuntimeError(f"turn {len(calls)}")
            return submit(*args)

        with monkeypatch.context() as patch:
            patch.setattr(rig.engine, "submit", failing)
            with pytest.raises(RuntimeError, match=f"turn {turns[0]}"):
                call()

    return run


@pytest.mark.parametrize("turns", [(1,), (2,), (3,), (1, 3)])
@rigs("hiradix", "himamba", "unified+mamba+swa")
def test_an_archive_that_cannot_begin_costs_no_other_backup_its_acknowledgement(rig, fail_at, turns, caplog):
    rig.attach(MemoryStorage())
    for token in (1, 3, 5):
        rig.insert([token, token, token + 1, token + 1])
    rig.run(Lane.WRITE)
    fail_at(rig.cache.check_hicache_events, *turns)
    assert tuple(turn for turn in (1, 2, 3) if f"turn {turn}" in caplog.text) == turns
    assert (rig.cache.ongoing_write_through, rig.cache.protected_size()) == ({}, 0)
    assert len(rig.cache.ongoing_backup) == 3 - len(turns)
    assert len(rig.held(CPU)) == 6, "all are on the host and reported"
    rig.settle()
    rig.cache.evict(EvictParams(100))
    assert rig.cache.evict_host(100) == 12, "no page is locked"
