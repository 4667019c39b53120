import pytest

from engine_cache import EvictParams, Lane, StoragePolicy
from engine_cache.storage.base import PoolName
from engine_cache.storage.directory import DirectoryStorage
from engine_cache.storage.object_names import PageLayout, StorageIdentity
from kv_events.schema import StorageMedium
from tests.support.caches.prefetch_steps import PROMPT, attach, nothing_is_left, page_hashes, run
from tests.support.caches.tier_rig import MemoryStorage, Rig

pytestmark = pytest.mark.torch
GPU, CPU, DISK = StorageMedium.GPU, StorageMedium.CPU, StorageMedium.DISK


def test_what_is_acknowledged_on_the_host_is_archived():
    store = MemoryStorage()
    rig = attach(Rig(), store, batch_pages=3)
    rig.insert(PROMPT)
    rig.engine.step(Lane.WRITE)
    assert rig.engine.num_queued(Lane.ARCHIVE) == 0
    rig.cache.writing_check()
    (node,) = rig.cache.root_node.children.values()
    assert node.host_ref_counter == 1
    run(rig, Lane.ARCHIVE)
    assert store.batches == [("set", PoolName.KV, 3), ("set", PoolName.KV, 1)]
    assert [key for _, key in store.pages] == page_hashes(PROMPT)
    rig.cache.store.check_events()
    assert node.host_ref_counter == 0


def test_a_page_being_archived_stays_on_the_host():
    rig = attach(Rig(), MemoryStorage())
    rig.insert([1, 2])
    rig.engine.step(Lane.WRITE)
    rig.cache.writing_check()
    rig.cache.evict(EvictParams(2))
    assert rig.cache.evict_host(2) == 0
    rig.settle()
    assert rig.cache.evict_host(2) == 2


@pytest.mark.parametrize(("fault", "value"), [("broken", True), ("full", {PoolName.KV})])
def test_an_archive_that_fails_is_acknowledged(fault, value):
    store = MemoryStorage()
    rig = attach(Rig(), store, emit_storage_events=True)
    setattr(store, fault, value)
    rig.insert([1, 2])
    rig.settle()
    assert nothing_is_left(rig)
    assert rig.cache.store.io.num_errors == (fault == "broken")
    assert ("BlockStored", DISK, [1, 2]) not in rig.events()


def test_namespaces_do_not_share_pages(store, rig):
    rig.cache.prefetch_from_storage("r", rig.cache.root_node, PROMPT, extra_key="tenant")
    rig.settle()
    assert rig.cache.check_prefetch_progress("r")
    assert rig.held(CPU) == set()


def test_the_store_is_announced_only_when_asked_for():
    rig = attach(Rig(), MemoryStorage())
    rig.insert([1, 2])
    rig.settle()
    assert {medium for _, medium, _ in rig.events()} == {None, GPU, CPU}


def test_an_archived_page_is_announced_once_and_withdrawn_when_it_was_removed():
    store = MemoryStorage()
    rig = attach(Rig(), store, emit_storage_events=True)
    rig.insert([1, 2, 3, 4])
    rig.settle()
    on_disk = [event for event in rig.events() if event[1] is DISK]
    assert on_disk == [("BlockStored", DISK, [1, 2]), ("BlockStored", DISK, [3, 4])]
    store.lose(page_hashes([1, 2, 3, 4])[1])
    rig.cache.store.check_events()
    assert rig.events() == [("BlockRemoved", DISK, None)]
    rig.cache.clear_storage_backend()
    assert rig.events() == [("BlockRemoved", DISK, None)]
    assert store.pages == {}


def test_what_a_store_lost_is_withdrawn_although_announcing_was_switched_off_concurrently():
    store = MemoryStorage()
    rig = attach(Rig(), store, emit_storage_events=True)
    rig.insert([1, 2])
    rig.settle()
    rig.cache.take_events()
    assert rig.cache.attach_storage_backend(store, StoragePolicy(emit_storage_events=False))[0]
    store.lose(page_hashes([1, 2])[0])
    rig.cache.check_hicache_events()
    assert rig.events() == [("BlockRemoved", DISK, None)]


def test_a_store_is_asked_what_it_lost_although_nothing_is_announced(tmp_path):
    identity = StorageIdentity("m", PageLayout("float32", 2, (3, 1, 2), "layer_first"))
    store = DirectoryStorage(tmp_path, identity, capacity_bytes=10**6)
    rig = attach(Rig(), store)
    rig.insert([1, 2])
    rig.settle()
    for file in tmp_path.rglob("*"):
        if file.is_file():
            file.unlink()
    store.batch_exists(page_hashes([1, 2]))
    rig.cache.check_hicache_events()
    assert store.take_removed() == []


def test_a_store_that_was_closed_can_still_be_detached():
    store = MemoryStorage()
    rig = attach(Rig(), store, emit_storage_events=True)
    rig.insert([1, 2])
    rig.settle()
    rig.cache.take_events()
    store.close()
    assert rig.cache.detach_storage_backend() == (True, "detached")
    assert rig.events() == [("BlockRemoved", DISK, None)]
    rig.check()
