"""A slow or blocked store occupies only a limited part of the host. Archives that are skipped for this are counted."""

from collections.abc import Callable
from typing import Any

import pytest

from engine_cache import EvictParams, Lane, StoragePolicy
from engine_cache.tree.node import iter_nodes
from kv_events.errors import InvalidValueError
from tests.support.caches.hybrid_rig import HybridRig
from tests.support.caches.tier_rig import MemoryStorage, Rig
from tests.support.caches.unified_rig import UnifiedRig

pytestmark = pytest.mark.torch
KINDS: dict[str, Callable[[], Any]] = {
    "hiradix": lambda: Rig(host_pages=20),
    "himamba": lambda: HybridRig(host_pages=20, slots=9, host_slots=21),
    "unified": lambda: UnifiedRig(("mamba",), host_pages=20, slots=9, host_slots=21),
}


@pytest.fixture(params=KINDS)
def rig(request):
    rig = KINDS[request.param]()
    rig.store = MemoryStorage()
    rig.cache.attach_storage_backend(rig.store, StoragePolicy(1, archive_share=0.25))
    yield rig
    rig.settle()
    rig.check()


def insert(rig, turns):
    """Insert one page per turn while the store makes no progress."""
    for turn in turns:
        assert rig.insert([100 + turn, 100 + turn]) is not None
        while rig.engine.step(Lane.WRITE):
            pass
        rig.cache.check_hicache_events()


def held(rig):
    return [node for node in iter_nodes(rig.cache.root_node) if node.host_ref_counter]


def test_a_store_that_does_not_move_never_fills_the_host(rig):
    insert(rig, range(60))
    assert rig.cache.archive_tokens_occupied == 10, "a quarter of 40 rows"
    assert len(rig.cache.ongoing_backup) == len(held(rig)) == 5
    assert rig.cache.num_skipped_archives == 55
    assert rig.cache.num_refused_backups == 0
    rig.cache.evict(EvictParams(100))
    assert rig.cache.evict_host(100) >= 20


def test_what_is_stored_makes_room_for_more(rig):
    insert(rig, range(8))
    rig.settle()
    assert rig.cache.archive_tokens_occupied == 0
    assert rig.cache.ongoing_backup == {}
    skipped = rig.cache.num_skipped_archives
    insert(rig, range(8, 12))
    assert rig.cache.num_skipped_archives == skipped
    assert rig.cache.archive_tokens_occupied == 8


def test_a_node_that_is_longer_than_the_share_is_archived_when_nothing_else_waits(rig):
    tokens = [9] * 12
    rig.insert(tokens)
    rig.engine.step(Lane.WRITE)
    rig.cache.check_hicache_events()
    assert (rig.cache.archive_tokens_occupied, rig.cache.num_skipped_archives) == (12, 0)
    insert(rig, [1])
    assert rig.cache.num_skipped_archives == 1


def test_a_concurrent_split_does_not_change_what_is_counted(rig):
    rig.insert([1, 1, 2, 2])
    rig.engine.step(Lane.WRITE)
    rig.cache.check_hicache_events()
    rig.match([1, 1])
    assert rig.cache.archive_tokens_occupied == 4
    rig.settle()
    assert rig.cache.archive_tokens_occupied == 0


def test_backups_without_room_are_counted(rig):
    hogged = rig.host.alloc(rig.host.available_size())
    insert(rig, range(3))
    assert rig.cache.num_refused_backups == 3
    assert rig.cache.num_failed_backups == 0
    rig.host.free(hogged)
    insert(rig, range(3))
    assert rig.cache.num_refused_backups == 3


@pytest.mark.parametrize("share", [0, -1, 1.1])
def test_a_share_is_a_share(share):
    with pytest.raises(InvalidValueError, match="archive_share"):
        StoragePolicy(archive_share=share)
