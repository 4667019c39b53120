"""A failure while acknowledgements are processed does not affect the others, and leaks no lock and no row."""

import pytest

from engine_cache import EvictParams, Lane, StoragePolicy
from engine_cache.tree.node import iter_nodes
from kv_events.schema import StorageMedium
from tests.support.caches.hybrid_rig import HybridRig
from tests.support.caches.tier_rig import MemoryStorage, Rig
from tests.support.caches.unified_rig import UnifiedRig

pytestmark = pytest.mark.torch
CPU = StorageMedium.CPU
A, B, C = [1, 1, 2, 2], [3, 3, 4, 4], [5, 5, 6, 6]


@pytest.fixture(params=[Rig, HybridRig, lambda: UnifiedRig(("mamba", "swa"))], ids=["hiradix", "himamba", "unified"])
def rig(request):
    rig = request.param()
    rig.cache.attach_storage_backend(MemoryStorage(), StoragePolicy(1))
    yield rig
    rig.check()


def fail_at(monkeypatch, owner, name, *turns):
    """Make some calls of a method fail before they have an effect."""
    calls, method = [], getattr(owner, name)

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) in turns:
            raise RuntimeError(f"turn {len(calls)} of {name}")
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)


def pending(rig):
    return [node for node in iter_nodes(rig.cache.root_node) if node.write_through_pending_id is not None]


@pytest.mark.parametrize("turn", [1, 2, 3])
def test_an_archive_that_cannot_begin_costs_no_other_backup_its_acknowledgement(rig, monkeypatch, turn):
    for tokens in (A, B, C):
        rig.insert(tokens)
    while rig.engine.step(Lane.WRITE):
        pass
    with monkeypatch.context() as patch:
        fail_at(patch, rig.engine, "submit", turn)
        with pytest.raises(RuntimeError, match=f"turn {turn}"):
            rig.cache.check_hicache_events()
    assert rig.cache.ongoing_write_through == {}
    assert len(rig.cache.ongoing_backup) == 2
    assert rig.cache.protected_size() == 0
    assert len(rig.held(CPU)) == 6, "all are on the host and reported"
    rig.settle()
    rig.cache.evict(EvictParams(100))
    assert rig.cache.evict_host(100) == 12, "no page is locked"


def test_one_part_of_a_backup_that_fails_costs_the_others_nothing(rig, monkeypatch):
    rig.insert(A)
    rig.match(A[:2])  # splits the node that is being copied
    rig.engine.step(Lane.WRITE)
    with monkeypatch.context() as patch:
        fail_at(patch, rig.engine, "submit", 1)
        with pytest.raises(RuntimeError, match="turn 1"):
            rig.cache.writing_check()
    assert (pending(rig), len(rig.cache.ongoing_backup), rig.cache.protected_size()) == ([], 1, 0)
    rig.settle()


def test_several_failures_are_all_reported(rig, monkeypatch, caplog):
    for tokens in (A, B, C):
        rig.insert(tokens)
    while rig.engine.step(Lane.WRITE):
        pass
    with monkeypatch.context() as patch:
        fail_at(patch, rig.engine, "submit", 1, 3)
        with pytest.raises(RuntimeError, match="turn 1"):
            rig.cache.writing_check()
    assert "turn 1 of submit" in caplog.text
    assert "turn 3 of submit" in caplog.text
    assert rig.cache.ongoing_write_through == {}
    rig.settle()


def test_a_load_whose_end_fails_is_released_like_the_others(rig, monkeypatch):
    for tokens in (A, B):
        rig.insert(tokens)
        rig.settle()
    rig.cache.evict(EvictParams(100))
    for tokens in (A, B):
        rig.cache.load_back(rig.match(tokens).best_match_node)
    rig.cache.ready_to_load_host_cache()
    rig.engine.drain()
    end = rig.cache.host.loads._end

    def failing(*args):
        end(*args)
        raise RuntimeError("failed on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(rig.cache.host.loads, "_end", failing)
        with pytest.raises(RuntimeError, match="failed on purpose"):
            rig.cache.loading_check()
    assert (rig.cache.ongoing_load_back, rig.cache.protected_size()) == ({}, 0)
    rig.settle()
