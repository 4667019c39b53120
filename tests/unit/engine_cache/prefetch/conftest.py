import pytest

from tests.support.caches.prefetch_steps import PROMPT, attach
from tests.support.caches.tier_rig import MemoryStorage, Rig


@pytest.fixture
def store():
    """A store to which another cache has archived the pages of `PROMPT`."""
    store = MemoryStorage()
    writer = attach(Rig(), store)
    writer.insert(PROMPT)
    writer.settle()
    assert writer.cache.detach_storage_backend()[0]
    assert len(store.pages) == 4
    store.batches.clear()
    return store


@pytest.fixture
def rig(store):
    rig = attach(Rig(), store)
    rig.cache.take_events()
    yield rig
    rig.check()
