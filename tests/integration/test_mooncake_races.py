"""Announcements of a page while several threads of one engine use it: each call is interrupted."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="stores need torch: pip install kvsight[engine]")
pytest.importorskip("mooncake", reason="pip install kvsight[mooncake]")

from engine_cache.storage import page_keys
from engine_cache.storage.mooncake import MooncakeStorage
from tests.rigs.mooncake import own_identity
from tests.support.caches.page_pools import PagePool

pytestmark = [pytest.mark.timing("threads must meet within seconds"), pytest.mark.torch]
KEYS = page_keys([f"{page:064x}" for page in range(2)])


@pytest.fixture
def store(mooncake_master):
    opened: Any = MooncakeStorage(mooncake_master.shared_client(), own_identity(), mooncake_master.settings())
    opened.kv = PagePool(num_runs=2)
    opened.register_mem_pool_host(opened.kv)
    yield opened
    opened.close()


def put(store):
    return store.batch_set_v1(KEYS, store.kv.indices(0, 1))


def test_pages_that_are_written_after_a_clear_are_held_though_their_writing_began_before(store, monkeypatch):
    write = store._client.put
    monkeypatch.setattr(store._client, "put", lambda *objects: store.clear() or write(*objects), raising=False)
    assert put(store) == [True, True]
    assert store.batch_exists(KEYS) == 2
    assert [store.is_held(key) for key in KEYS] == [True, True]


def test_pages_that_are_written_before_a_clear_returns_are_held(store, monkeypatch):
    remove = store._client.remove_matching
    monkeypatch.setattr(store._client, "remove_matching", lambda pattern: remove(pattern) or put(store), raising=False)
    store.clear()
    assert store.batch_exists(KEYS) == 2
    assert [store.is_held(key) for key in KEYS] == [True, True]


def test_pages_are_looked_for_again_when_the_store_was_cleared_concurrently(store, monkeypatch):
    assert put(store) == [True, True]
    look = store._client.exist
    looks = []

    def overtaken(names):
        there = look(names)
        looks.append(names)
        if len(looks) == 2:  # after the writing
            store._held.forget_all()
        return there

    store._client.remove(store._names("kv", KEYS))
    monkeypatch.setattr(store._client, "exist", overtaken, raising=False)
    assert put(store) == [True, True]
    assert [store.is_held(key) for key in KEYS] == [True, True]


def test_pages_that_are_written_while_they_are_missed_are_held(store, monkeypatch):
    look = store._client.exist

    def overtaken(names):
        there = look(names)
        monkeypatch.setattr(store._client, "exist", look)
        assert put(store) == [True, True]
        return there

    monkeypatch.setattr(store._client, "exist", overtaken, raising=False)
    assert store.batch_exists(KEYS) == 0
    assert [store.is_held(key) for key in KEYS] == [True, True]
    assert store.take_removed() == []
