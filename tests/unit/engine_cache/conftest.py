import pytest


@pytest.fixture(autouse=True)
def _watched_pools(monkeypatch):
    monkeypatch.setattr("engine_cache.settings.CHECK_FREES", True)
