import pytest


@pytest.fixture(autouse=True)
def _watched_pools(monkeypatch):
    monkeypatch.setenv("KVSIGHT_DEBUG_POOLS", "1")
