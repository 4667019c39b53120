"""An engine whose Mooncake master is paused and continues."""

import time
from typing import Any

import pytest

pytest.importorskip("torch", reason="stores need torch: pip install kvsight[engine]")
pytest.importorskip("mooncake", reason="pip install kvsight[mooncake]")

from engine_cache.storage import page_keys
from engine_cache.storage.mooncake import MooncakeStorage
from tests.rigs.mooncake import own_identity
from tests.support.caches.page_pools import PagePool
from tests.support.waiting import wait_until

pytestmark = pytest.mark.torch
KEYS = page_keys([f"{page:064x}" for page in range(4)])


@pytest.fixture
def store(own_mooncake_master):
    """Holds four pages."""
    store: Any = MooncakeStorage.connect(own_identity(), own_mooncake_master.settings())
    store.kv = PagePool(num_runs=2)
    store.register_mem_pool_host(store.kv)
    assert put(store) == [True] * 4
    yield store
    store.close()


def put(store):
    return store.batch_set_v1(KEYS, store.kv.indices(0, 1, 2, 3))


def test_a_master_that_stands_still_is_waited_for_once_and_used_again_when_it_continues(own_mooncake_master, store):
    own_mooncake_master.stop()
    began = time.monotonic()
    assert store.batch_exists(KEYS) == 0
    assert time.monotonic() - began < 40  # the first client of the process has set 5 s, and may try twice
    began = time.monotonic()
    for _ in range(100):
        assert (store.batch_exists(KEYS), put(store)) == (0, [False] * 4)
    assert time.monotonic() - began < 40
    assert sorted(store.take_removed()) == sorted(KEYS)
    own_mooncake_master.resume()
    wait_until(lambda: store.batch_exists(KEYS) == 4, 30, "the pages are there again")
    assert not any(store.is_held(key) for key in KEYS)
    assert put(store) == [True] * 4
    assert all(store.is_held(key) for key in KEYS)
