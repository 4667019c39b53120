import pytest

from tests.rigs.cache import CacheRig
from tests.rigs.mooncake_double import DoubleMaster


@pytest.fixture(autouse=True)
def _watched_pools(monkeypatch):
    monkeypatch.setattr("engine_cache.settings.CHECK_FREES", True)


@pytest.fixture
def rig(request):
    """A rig, see `rigs`, of which everything is recounted at the end."""
    name, options = request.param
    rig = CacheRig(name, **options)
    rig.cache.take_events()
    yield rig
    rig.check()


@pytest.fixture
def master(monkeypatch):
    """A Mooncake master whose clients are test doubles."""
    double = DoubleMaster()
    monkeypatch.setattr("engine_cache.storage.mooncake_client.MooncakeDistributedStore", double.make_native)
    yield double
    double.close()
