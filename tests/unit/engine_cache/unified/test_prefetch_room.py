"""Data that must not be evicted when a prefetch makes room on the host."""

import pytest

from engine_cache import EvictParams, StoragePolicy
from tests.support.caches.tier_rig import MemoryStorage
from tests.support.caches.unified_rig import UnifiedRig

pytestmark = pytest.mark.torch

OTHER, ANCHOR, PROMPT = [9, 9], [1, 1], [1, 1, 2, 2, 3, 3]
WINDOW = 6


def attached(store, kinds=("swa",), **params):
    rig = UnifiedRig(kinds, window=WINDOW, **params)
    assert rig.cache.attach_storage_backend(store, StoragePolicy(2, "wait_complete"))[0]
    return rig


@pytest.fixture
def store():
    """A store with the prompt, including its window."""
    store = MemoryStorage()
    writer = attached(store, swa_pages=8)
    for end in (2, 4, 6):
        writer.insert(PROMPT[:end])
        writer.settle()
    assert writer.cache.detach_storage_backend()[0]
    return store


def usable(rig):
    match = rig.match(PROMPT)
    return len(match.device_indices) + match.host_hit_length


@pytest.mark.parametrize(("swa_host_pages", "is_begun"), [(3, False), (4, True)])
def test_the_window_of_the_anchor_stays(store, swa_host_pages, is_begun):
    """A prompt that was used later has one page of SWA rows, which cannot go; the anchor, used before, another."""
    rig = attached(store, swa_pages=2, swa_host_pages=swa_host_pages, host_pages=14)
    rig.insert(OTHER)
    rig.insert(ANCHOR)
    rig.settle()
    rig.cache.evict(EvictParams(8, 8))
    anchor = rig.match(PROMPT).last_host_node
    other = rig.match(OTHER).best_match_node
    release = rig.hold_on_host(other)
    rig.cache.prefetch_from_storage("r", anchor, PROMPT[2:])
    assert ("r" in rig.cache.ongoing_prefetch) == is_begun
    rig.settle()
    assert rig.cache.check_prefetch_progress("r")
    rig.settle()
    assert usable(rig) == (len(PROMPT) if is_begun else len(ANCHOR))
    release()
    rig.check()
