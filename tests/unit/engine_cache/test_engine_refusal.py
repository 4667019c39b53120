"""A copy engine that refuses jobs, because it is closed or cannot start a thread, leaks no rows."""

import pytest

from engine_cache import EvictParams
from tests.support.caches.hybrid_rig import HybridRig
from tests.support.caches.hybrid_steps import CPU, GPU, demoted, node_of, stored
from tests.support.caches.tier_rig import Rig

pytestmark = pytest.mark.torch


@pytest.fixture(params=[Rig, HybridRig])
def rig(request):
    rig = request.param(write_policy="write_through_selective")
    rig.cache.take_events()
    yield rig
    rig.check()


@pytest.fixture
def refuse(rig, monkeypatch):
    """Make the engine refuse jobs while `call` runs, which fails for this reason."""

    def submit(lane, steps):
        raise RuntimeError("no thread available")

    def run(call, *args, **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr(rig.engine, "submit", submit)
            with pytest.raises(RuntimeError, match="no thread available"):
                call(*args, **kwargs)

    return run


def num_free(rig):
    pools = [rig.host, rig.pool]
    if isinstance(rig, HybridRig):
        pools += [rig.host_states, rig.slots]
    return [pool.available_size() for pool in pools]


def test_a_backup_that_cannot_begin_leaves_the_node_as_it_was_and_heals(rig, refuse):
    rig.insert([1, 2])
    node = node_of(rig, [1, 2])
    free = num_free(rig)
    refuse(rig.cache.write_backup, node)
    assert num_free(rig) == free
    assert (node.host_value, node.write_through_pending_id) == (None, None)
    assert (node.lock_ref, node.host_ref_counter) == (0, 0)
    assert rig.cache.ongoing_write_through == {}
    rig.insert([1, 2])
    rig.settle()
    assert rig.events() == stored(GPU, [1, 2]) + stored(CPU, [1, 2])


def test_a_load_that_cannot_begin_stays_queued(rig, refuse):
    rig.insert([1, 2])
    demoted(rig, [1, 2])
    match = rig.match([1, 2])
    assert len(rig.cache.load_back(match.best_match_node)) == 2
    refuse(rig.cache.ready_to_load_host_cache)
    assert rig.cache.ready_to_load_host_cache() == 0
    rig.settle()  # the fixture then compares the bytes
    assert rig.match([1, 2]).last_device_node.lock_ref == 0
    assert rig.cache.evict(EvictParams(2)).num_tokens_evicted == 2


def test_a_write_back_that_cannot_begin_keeps_the_node(rig, refuse):
    rig.cache.host.backups.write_policy = "write_back"
    rig.insert([1, 2])
    free = num_free(rig)
    refuse(rig.cache.evict, EvictParams(2))
    assert num_free(rig) == free
    assert node_of(rig, [1, 2]).host_ref_counter == 0
    assert rig.cache.evict(EvictParams(2)).num_tokens_evicted == 2
