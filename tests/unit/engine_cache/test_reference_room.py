"""A unified tree evicts only the missing rows to make room for a backup or a load, as in the reference."""

import pytest

from engine_cache import EvictParams
from kv_events.schema import StorageMedium
from tests.support.caches.unified_rig import UnifiedRig

pytestmark = pytest.mark.torch


@pytest.fixture
def rig():
    """A rig with nine host rows. Two are free, and each of the others holds a page that is on the host only."""
    rig = UnifiedRig(page_size=1, device_pages=8, host_pages=9)
    for token in range(7):
        rig.insert([token])
        rig.settle()
    rig.cache.evict(EvictParams(7))
    rig.events()
    yield rig
    rig.check()


def test_a_backup_evicts_what_is_missing_on_the_host(rig):
    rig.insert([20, 21, 22])
    rig.settle()
    removed = ("BlockRemoved", StorageMedium.CPU, None)
    assert rig.events().count(removed) == 1
    assert rig.host.available_size() == 0


def test_a_load_evicts_what_is_missing_on_the_device(rig):
    for token in (1, 2):
        rig.insert([1, token])
    rig.settle()
    rig.cache.evict(EvictParams(8))
    for token in range(30, 37):
        rig.insert([token], chunked=True)
    rig.load_back(rig.match([1, 2]))
    assert len(rig.held(StorageMedium.GPU)) == 8
