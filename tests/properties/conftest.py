import pytest


@pytest.fixture(autouse=True, scope="package")
def _watched_pools():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine_cache.settings.CHECK_FREES", True)
        yield
