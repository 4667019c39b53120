"""Archives: from the host to a store, their bound, and stores that are attached and detached."""

import threading

import pytest

from engine_cache import (
    BytelessHostPool,
    EvictParams,
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
from engine_cache.storage.directory import DirectoryStorage
from engine_cache.tree.node import iter_nodes
from kv_events.errors import InvalidValueError
from tests.rigs.cache import AB, ABCD, CPU, DISK, GPU, A, CacheRig, removed, rigs, stored
from tests.rigs.cache_stores import MemoryStorage, page_hashes

CLASSES = ("hiradix", "himamba", "unified+mamba")


@pytest.fixture
def store(rig):
    store = MemoryStorage()
    rig.attach(store, batch_pages=3, emit_storage_events=True)
    return store


@rigs("hiradix")
def test_what_is_acknowledged_on_the_host_is_archived_in_batches(rig, store):
    rig.insert(ABCD)
    rig.engine.step(Lane.WRITE)
    assert rig.engine.num_queued(Lane.ARCHIVE) == 0
    rig.cache.writing_check()
    node = rig.node_of(ABCD)
    assert node.host_ref_counter == 1
    rig.run(Lane.ARCHIVE)
    assert store.batches == [("set", PoolName.KV, 3), ("set", PoolName.KV, 1)]
    assert store.keys_of(PoolName.KV) == page_hashes(ABCD)
    rig.cache.store.check_events()
    assert node.host_ref_counter == 0


@pytest.mark.parametrize(("fault", "value"), [("broken", True), ("full", {PoolName.KV})])
@rigs("hiradix")
def test_an_archive_that_fails_is_acknowledged(rig, store, fault, value):
    setattr(store, fault, value)
    rig.insert(A)
    rig.settle()
    assert (rig.cache.ongoing_backup, rig.cache.store.io.num_errors) == ({}, fault == "broken")
    assert rig.events() == stored(GPU, [1, 1]) + stored(CPU, [1, 1])


@rigs("hiradix")
def test_what_a_store_lost_is_withdrawn_although_announcing_was_switched_off_concurrently(rig, store):
    rig.turns(A)
    assert rig.cache.attach_storage_backend(store, StoragePolicy(emit_storage_events=False))[0]
    store.lose(page_hashes(A)[0])
    rig.cache.check_hicache_events()
    assert rig.events() == removed(DISK)


@rigs("hiradix")
def test_a_store_is_asked_what_it_lost_although_nothing_is_announced(rig, tmp_path):
    store = DirectoryStorage(tmp_path, rig.identity, capacity_bytes=10**6)
    rig.attach(store)
    rig.turns(A)
    for file in tmp_path.rglob("*"):
        if file.is_file():
            file.unlink()
    store.batch_exists(page_hashes(A))
    rig.cache.check_hicache_events()
    assert store.take_removed() == []


@rigs("hiradix")
def test_a_store_that_was_closed_can_still_be_detached(rig, store):
    rig.turns(A)
    store.close()
    assert rig.cache.detach_storage_backend() == (True, "detached")
    assert rig.events() == removed(DISK)


@rigs("himamba", "unified+mamba")
def test_a_state_that_is_backed_up_after_its_pages_is_archived_alone(rig, store):
    rig.insert(AB)
    rig.match(A)
    rig.settle()
    assert store.keys_of(PoolName.MAMBA) == page_hashes(AB)[-1:]
    num_pages = len(store.keys_of(PoolName.KV))
    rig.insert(A)
    rig.settle()
    assert sorted(store.keys_of(PoolName.MAMBA)) == sorted(page_hashes(AB))
    assert len(store.keys_of(PoolName.KV)) == num_pages


@rigs("hiradix")
def test_a_reset_forgets_what_is_being_archived(rig, store):
    rig.insert(ABCD)
    rig.run(Lane.WRITE)
    rig.cache.writing_check()
    assert len(rig.cache.ongoing_backup) == 1
    rig.reset()
    assert (rig.cache.ongoing_backup, rig.cache.archive_tokens_occupied) == ({}, 0)
    rig.turns(A)
    assert (rig.cache.ongoing_backup, rig.cache.archive_tokens_occupied) == ({}, 0)


# --- a slow or blocked store occupies only a limited part of the host ---


@pytest.fixture
def bounded(rig):
    """A rig that may use a quarter of its 40 host rows for pages that are archived."""
    rig.attach(MemoryStorage(), archive_share=0.25)
    yield rig
    rig.settle()


def insert(rig, turns):
    """Insert one page per turn while the store makes no progress."""
    for turn in turns:
        assert rig.insert([100 + turn, 100 + turn]) is not None
        rig.run(Lane.WRITE)
        rig.cache.check_hicache_events()


bounded_rigs = rigs(*CLASSES, host_pages=20, slots=9, host_slots=21)


@bounded_rigs
def test_a_store_that_does_not_move_never_fills_the_host(bounded):
    insert(bounded, range(60))
    cache = bounded.cache
    assert cache.archive_tokens_occupied == 10
    held = [node for node in iter_nodes(cache.root_node) if node.host_ref_counter]
    assert len(cache.ongoing_backup) == len(held) == 5
    assert (cache.num_skipped_archives, cache.num_refused_backups) == (55, 0)
    cache.evict(EvictParams(100))
    assert cache.evict_host(100) >= 20


@bounded_rigs
def test_a_node_that_is_longer_than_the_share_is_archived_when_nothing_else_waits(bounded):
    bounded.insert([9] * 12)
    bounded.engine.step(Lane.WRITE)
    bounded.cache.check_hicache_events()
    assert (bounded.cache.archive_tokens_occupied, bounded.cache.num_skipped_archives) == (12, 0)
    insert(bounded, [1])
    assert bounded.cache.num_skipped_archives == 1


@bounded_rigs
def test_a_concurrent_split_does_not_change_what_is_counted(bounded):
    bounded.insert(AB)
    bounded.engine.step(Lane.WRITE)
    bounded.cache.check_hicache_events()
    bounded.match(A)
    assert bounded.cache.archive_tokens_occupied == 4
    bounded.settle()
    assert bounded.cache.archive_tokens_occupied == 0


# --- attach and detach ---


@rigs("hiradix")
def test_one_store_at_a_time_whose_policy_can_be_changed(rig):
    store, kept = MemoryStorage(), StoragePolicy(2, stop="wait_complete", emit_storage_events=True)
    assert rig.cache.attach_storage_backend(store, kept)[0]
    assert rig.cache.attach_storage_backend(MemoryStorage())[0] is False
    assert rig.cache.attach_storage_backend(store) == (True, "attached already")
    assert rig.cache.store.io.policy == kept
    told = rig.cache.attach_storage_backend(store, StoragePolicy(stop="timeout"))
    assert (told, rig.cache.store.io.policy.stop) == ((True, "attached already, policy updated"), "timeout")


@rigs("hiradix")
def test_a_store_has_one_cache_at_a_time(rig, store):
    """With a second cache, the store would write its pages under the keys of the first one."""
    second = CacheRig("hiradix")
    ok, message = second.cache.attach_storage_backend(store)
    assert not ok
    assert "expected that of the cache that has the store" in message
    rig.turns(ABCD)
    assert rig.cache.detach_storage_backend()[0]
    second.attach(store).prefetch(ABCD)
    assert second.fetched() == 8
    second.check()


def test_a_pool_without_bytes_takes_no_store():
    pool = PagedTokenToKVPoolAllocator(8, 2)
    entry = PoolEntry(PoolName.KV, BytelessHostPool(12, 2), None, pool)
    cache = HiRadixCache(page_size=2, allocator=pool, controller=HiCacheController(entry, ManualCopyEngine()))
    ok, message = cache.attach_storage_backend(MemoryStorage())
    assert not ok
    assert "BytelessHostPool" in message


def test_a_store_that_hangs_is_not_detached(monkeypatch):
    monkeypatch.setattr("engine_cache.tiers.storage._DETACH_TIMEOUT_S", 0.02)
    rig = CacheRig("hiradix", engine=ThreadCopyEngine()).attach(MemoryStorage())
    gate = threading.Event()
    rig.engine.submit(Lane.ARCHIVE, [gate.wait])
    ok, message = rig.cache.detach_storage_backend()
    assert not ok
    assert "0.02" in message
    gate.set()
    assert rig.cache.detach_storage_backend()[0]
    rig.engine.close()


@pytest.mark.parametrize("error", [InvalidValueError("pool", "kv", "another"), RuntimeError("answered -600")])
@rigs("hiradix")
def test_a_store_that_does_not_take_the_pools_is_refused_and_the_cache_works_without_it(
    rig, monkeypatch, caplog, error
):
    def refuse(pool):
        raise error

    store = MemoryStorage()
    monkeypatch.setattr(store, "register_mem_pool_host", refuse)
    ok, message = rig.cache.attach_storage_backend(store)
    assert not ok
    assert str(error) in message
    assert "refuses the pools" in caplog.text
    with pytest.raises(type(error)) as raised:
        rig.cache.attach_store(store)
    assert (raised.value, rig.cache.store) == (error, None)
    rig.turns(ABCD)
    rig.attach(MemoryStorage())
    with pytest.raises(InvalidValueError, match="store: got 'MemoryStorage', expected a cache without one"):
        rig.cache.attach_store(MemoryStorage())


@rigs("unified+mamba")
def test_a_store_that_refuses_one_pool_knows_none(rig, monkeypatch):
    def refuse(pool, name):
        raise RuntimeError("answered -600")

    store = MemoryStorage()
    monkeypatch.setattr(store, "register_mem_host_pool_v2", refuse)
    assert not rig.cache.attach_storage_backend(store)[0]
    with pytest.raises(InvalidValueError, match="none yet"):
        store.batch_exists(["00" * 32])
    monkeypatch.undo()
    assert rig.cache.attach_storage_backend(store)[0]


@pytest.mark.parametrize(("host_pages", "is_told"), [(9, True), (10, False)])
def test_a_host_too_small_for_any_prefetch_is_reported_once_with_its_size(caplog, host_pages, is_told):
    store = MemoryStorage()
    rig = CacheRig("hiradix", page_size=1, host_pages=host_pages).attach(store)
    assert rig.cache.attach_storage_backend(store)[0]
    expected = "nothing can be prefetched: the host has 9 rows, the device 8, too few to spare"
    assert [record.getMessage() for record in caplog.records] == [expected] * is_told
