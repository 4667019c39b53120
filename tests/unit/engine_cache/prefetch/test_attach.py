import threading

import pytest

from engine_cache import (
    BytelessHostPool,
    HiCacheController,
    HiRadixCache,
    Lane,
    ManualCopyEngine,
    PagedTokenToKVPoolAllocator,
    PoolEntry,
    StoragePolicy,
    ThreadCopyEngine,
)
from engine_cache.storage.base import PoolName
from kv_events.errors import InvalidValueError
from kv_events.schema import StorageMedium
from tests.support.caches.prefetch_steps import PROMPT, attach, prefetch
from tests.support.caches.tier_rig import MemoryStorage, Rig
from tests.support.caches.unified_rig import UnifiedRig

pytestmark = pytest.mark.torch
DISK = StorageMedium.DISK


def test_one_store_at_a_time(store, rig):
    assert rig.cache.attach_storage_backend(MemoryStorage())[0] is False
    ok, word = rig.cache.attach_storage_backend(store, StoragePolicy(stop="wait_complete"))
    assert (ok, word) == (True, "attached already, policy updated")
    assert rig.cache.store.io.policy.stop == "wait_complete"


def test_a_store_has_one_cache_at_a_time(caplog):
    """With a second cache, the store would write its pages under the keys of the first one."""
    store, second = MemoryStorage(), Rig()
    first = attach(Rig(), store)
    ok, word = second.cache.attach_storage_backend(store)
    assert not ok
    assert "expected that of the cache that has the store" in word
    first.insert(PROMPT)
    first.settle()
    assert first.cache.detach_storage_backend()[0]
    attach(second, store)
    prefetch(second)
    second.settle()
    assert second.cache.check_prefetch_progress("r")
    assert second.match(PROMPT).host_hit_length == len(PROMPT)
    second.check()


def test_a_store_that_is_attached_once_more_without_a_policy_keeps_its_own(store):
    rig = Rig()
    policy = StoragePolicy(2, stop="wait_complete", emit_storage_events=True)
    assert rig.cache.attach_storage_backend(store, policy)[0]
    assert rig.cache.attach_storage_backend(store) == (True, "attached already")
    assert rig.cache.store.io.policy == policy


def test_a_pool_without_bytes_takes_no_store():
    pool = PagedTokenToKVPoolAllocator(8, 2)
    entry = PoolEntry(PoolName.KV, BytelessHostPool(12, 2), None, pool)
    cache = HiRadixCache(page_size=2, allocator=pool, controller=HiCacheController(entry, ManualCopyEngine()))
    ok, word = cache.attach_storage_backend(MemoryStorage())
    assert not ok
    assert "BytelessHostPool" in word


def test_detaching_releases_everything(store):
    rig = attach(Rig(), store, emit_storage_events=True)
    rig.insert([9, 9])
    rig.settle()
    prefetch(rig)
    rig.engine.step(Lane.PREFETCH)
    rig.cache.take_events()
    assert rig.cache.detach_storage_backend() == (True, "detached")
    assert rig.events() == [("BlockRemoved", DISK, None)]
    assert rig.host.available_size() == rig.host.size - 2
    assert rig.cache.root_node.host_ref_counter == 0
    assert rig.cache.detach_storage_backend()[0]
    assert len(store.pages) == 5
    rig.check()


def test_a_store_that_hangs_is_not_detached(monkeypatch):
    monkeypatch.setattr("engine_cache.tiers.storage._DETACH_TIMEOUT_S", 0.02)
    rig = attach(Rig(engine=ThreadCopyEngine()), MemoryStorage())
    gate = threading.Event()
    rig.engine.submit(Lane.ARCHIVE, [gate.wait])
    ok, word = rig.cache.detach_storage_backend()
    assert not ok
    assert "0.02" in word
    gate.set()
    assert rig.cache.detach_storage_backend()[0]
    rig.engine.close()


@pytest.mark.parametrize("error", [InvalidValueError("pool", "kv", "another"), RuntimeError("answered -600")])
def test_a_store_that_does_not_take_the_pools_is_refused_and_the_cache_works_without_it(monkeypatch, caplog, error):
    def refuse(pool):
        raise error

    store, rig = MemoryStorage(), Rig()
    monkeypatch.setattr(store, "register_mem_pool_host", refuse)
    ok, word = rig.cache.attach_storage_backend(store)
    assert not ok
    assert str(error) in word
    assert "refuses the pools" in caplog.text
    assert rig.cache.store is None
    rig.insert(PROMPT)
    rig.settle()
    assert attach(rig, MemoryStorage()).cache.store is not None


def test_a_store_that_refuses_one_pool_knows_none(monkeypatch):
    def refuse(pool, name):
        raise RuntimeError("answered -600")

    store, cache = MemoryStorage(), UnifiedRig(("mamba",)).cache
    monkeypatch.setattr(store, "register_mem_host_pool_v2", refuse)
    assert not cache.attach_storage_backend(store)[0]
    with pytest.raises(InvalidValueError, match="none yet"):
        store.batch_exists(["00" * 32])
    monkeypatch.undo()
    assert cache.attach_storage_backend(store)[0]


def test_a_caller_that_requires_the_reason_gets_the_store_s_own_error(monkeypatch, store, rig):
    with pytest.raises(InvalidValueError, match="store: got 'MemoryStorage', expected a cache without one"):
        rig.cache.attach_store(MemoryStorage())
    error, refusing = RuntimeError("answered -600"), MemoryStorage()

    def refuse(pool):
        raise error

    monkeypatch.setattr(refusing, "register_mem_pool_host", refuse)
    with pytest.raises(RuntimeError) as raised:
        Rig().cache.attach_store(refusing)
    assert raised.value is error


@pytest.mark.parametrize(("host_pages", "is_told"), [(9, True), (10, False)])
def test_a_host_too_small_for_any_prefetch_is_reported_once_with_its_size(caplog, host_pages, is_told):
    store = MemoryStorage()
    rig = attach(Rig(page_size=1, device_pages=8, host_pages=host_pages), store)
    assert rig.cache.attach_storage_backend(store)[0]
    expected = "nothing can be prefetched: the host has 9 rows, the device 8, too few to spare"
    assert [record.getMessage() for record in caplog.records] == [expected] * is_told
