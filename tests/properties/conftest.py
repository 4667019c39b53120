import pytest


@pytest.fixture(autouse=True, scope="package")
def _watched_pools():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSIGHT_DEBUG_POOLS", "1")
        yield
