import pytest

from tests.support.caches.checks import check_cache
from tests.support.caches.mamba_rig import NOTHING, Rig


@pytest.fixture
def rig():
    rig = Rig(enable_kv_cache_events=True)
    rig.cache.take_events()
    yield rig
    check_cache(rig.cache, NOTHING, NOTHING)
