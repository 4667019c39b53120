"""Fetched pages are added to the tree after the backups of nodes on their path, and wait for no other backups."""

import pytest

from engine_cache import Lane
from tests.support.caches.hybrid_rig import HybridRig
from tests.support.caches.prefetch_steps import PROMPT, attach, prefetch, run
from tests.support.caches.tier_rig import MemoryStorage, Rig
from tests.support.caches.unified_rig import UnifiedRig

pytestmark = pytest.mark.torch

RIGS = {
    "hiradix": Rig,
    "himamba": HybridRig,
    "unified": UnifiedRig,
}


def archived(make):
    """Return a store that holds the prompt."""
    rig, store = make(), MemoryStorage()
    attach(rig, store)
    rig.insert(PROMPT)
    rig.settle()
    rig.cache.detach_storage_backend()
    return store


@pytest.fixture(params=RIGS)
def rig(request):
    """A cache with an empty tree and such a store."""
    make = RIGS[request.param]
    return attach(make(), archived(make))


def test_unrelated_backups_are_not_waited_for(rig):
    assert prefetch(rig) is not None
    run(rig)
    rig.insert([9, 9])
    assert rig.cache.check_prefetch_progress("r")
    assert rig.engine.num_queued(Lane.WRITE) == len(rig.cache.ongoing_write_through) == 1
    rig.settle()
    rig.check()


def test_the_backup_of_a_node_on_the_path_is_waited_for_and_later_ones_are_not(rig):
    assert prefetch(rig) is not None
    run(rig)
    rig.events()
    rig.insert(PROMPT[:2])
    rig.insert([9, 9])
    assert rig.cache.check_prefetch_progress("r")
    assert rig.engine.num_queued(Lane.WRITE) == len(rig.cache.ongoing_write_through) == 1
    told = [tokens for kind, medium, tokens in rig.events() if (kind, medium) == ("BlockStored", "CPU_PINNED")]
    assert told == [PROMPT[start : start + 2] for start in range(0, 8, 2)]
    rig.settle()
    rig.check()


def test_a_backup_that_overtook_an_older_one_is_waited_for_with_it(rig):
    assert prefetch(rig) is not None
    run(rig)
    rig.insert([9, 9])
    rig.insert(PROMPT[:2])
    rig.engine.step(Lane.WRITE, 1)
    assert rig.cache.check_prefetch_progress("r")
    assert rig.cache.ongoing_write_through == {}
    rig.settle()
    rig.check()
