import threading

import numpy as np
import pytest
from page_names import block_hash
from tier_rig import MemoryStorage, Rig
from waiting import wait_until

from engine_cache import (
    BytelessHostPool,
    EvictParams,
    HiCacheController,
    HiRadixCache,
    InitLoadBackParams,
    Lane,
    ManualCopyEngine,
    PagedTokenToKVPoolAllocator,
    PoolEntry,
    RadixKey,
    StoragePolicy,
    ThreadCopyEngine,
)
from engine_cache.storage.base import PoolHitPolicy, PoolName, PoolTransfer
from engine_cache.storage.directory import DirectoryStorage
from engine_cache.storage.object_names import PageLayout, StorageIdentity
from engine_cache.storage_io import StorageIO
from engine_cache.storage_operations import ArchiveOperation, PrefetchOperation
from kv_events.errors import InvalidValueError
from kv_events.schema import StorageMedium

pytestmark = pytest.mark.torch
GPU, CPU, DISK = StorageMedium.GPU, StorageMedium.CPU, StorageMedium.DISK
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


def page_hashes(tokens):
    return [block_hash(tuple(tokens[:end]), 2, False).hex() for end in range(2, len(tokens) + 1, 2)]


def attach(rig, store, **policy):
    policy = {"prefetch_threshold": 2, "batch_pages": 2} | policy
    assert rig.cache.attach_storage_backend(store, StoragePolicy(**policy)) == (True, "attached")
    return rig


@pytest.fixture
def store():
    """A store in which another cache has left the pages of `PROMPT`."""
    store = MemoryStorage()
    writer = attach(Rig(), store)
    writer.insert(PROMPT)
    writer.settle()
    assert len(store.pages) == 4
    store.batches.clear()
    return store


@pytest.fixture
def rig(store):
    rig = attach(Rig(), store)
    rig.cache.take_events()
    yield rig
    rig.check()


def prefetch(rig, tokens=PROMPT, req_id="r", **params):
    match = rig.match(tokens)
    anchor, start = match.last_host_node, 0
    node = anchor
    while node is not rig.cache.root_node:
        start, node = start + len(node.key), node.parent
    rig.cache.prefetch_from_storage(req_id, anchor, tokens[start:], **params)
    return rig.cache.ongoing_prefetch.get(req_id)


def run(rig, lane=Lane.PREFETCH):
    while rig.engine.step(lane):
        pass


def nothing_is_left(rig):
    rig.cache.check_hicache_events()
    nodes = [node for node, _, _ in rig.walk()]
    return (
        rig.cache.prefetch_tokens_occupied == 0
        and not rig.cache.ongoing_prefetch
        and not rig.cache.storage.prefetches
        and all(node.host_ref_counter == 0 for node in [rig.cache.root_node, *nodes])
    )


# --- archive ---


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
    rig.cache.check_storage_events()
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


@pytest.mark.parametrize("fault", ["broken", "full"])
def test_an_archive_that_fails_is_acknowledged(fault):
    store = MemoryStorage()
    rig = attach(Rig(), store, emit_storage_events=True)
    setattr(store, fault, True)
    rig.insert([1, 2])
    rig.settle()
    assert nothing_is_left(rig)
    assert rig.cache.storage.num_errors == (fault == "broken")
    assert ("BlockStored", DISK, [1, 2]) not in rig.events()


def test_namespaces_do_not_share_pages(store, rig):
    rig.cache.prefetch_from_storage("r", rig.cache.root_node, PROMPT, extra_key="tenant")
    rig.settle()
    assert rig.cache.check_prefetch_progress("r")
    assert rig.held(CPU) == set()


# --- what is announced of the store ---


def test_the_store_is_announced_only_when_asked_for():
    rig = attach(Rig(), MemoryStorage())
    rig.insert([1, 2])
    rig.settle()
    assert {medium for _, medium, _ in rig.events()} == {None, GPU, CPU}


def test_an_archived_page_is_announced_once_and_withdrawn_when_it_is_gone():
    store = MemoryStorage()
    rig = attach(Rig(), store, emit_storage_events=True)
    rig.insert([1, 2, 3, 4])
    rig.settle()
    on_disk = [event for event in rig.events() if event[1] is DISK]
    assert on_disk == [("BlockStored", DISK, [1, 2]), ("BlockStored", DISK, [3, 4])]
    store.lose(page_hashes([1, 2, 3, 4])[1])
    rig.cache.check_storage_events()
    assert rig.events() == [("BlockRemoved", DISK, None)]
    rig.cache.clear_storage_backend()
    assert rig.events() == [("BlockRemoved", DISK, None)]
    assert store.pages == {}


# --- prefetch ---


def test_fetched_pages_are_told_before_any_request_uses_them_and_load_back_equals(rig):
    prefetch(rig)
    assert rig.cache.prefetch_tokens_occupied == 8
    run(rig)
    assert rig.events() == []
    assert rig.cache.check_prefetch_progress("r")
    assert rig.events() == [("BlockStored", CPU, PROMPT[i : i + 2]) for i in (0, 2, 4, 6)]
    assert rig.cache.pop_prefetch_loaded_tokens("r") == 8
    assert rig.cache.pop_prefetch_loaded_tokens("r") == 0
    match = rig.match(PROMPT)
    rows, _ = rig.cache.init_load_back(InitLoadBackParams(match.best_match_node, match.host_hit_length))
    assert len(rows) == match.host_hit_length == 8
    rig.settle()
    assert nothing_is_left(rig)


def test_the_store_is_asked_in_batches(store, rig):
    prefetch(rig)
    run(rig)
    assert store.batches == [("exists", PoolName.KV, 4), ("get", PoolName.KV, 2), ("get", PoolName.KV, 2)]


def test_a_prefetch_goes_on_where_the_anchor_ends(rig):
    rig.insert(PROMPT[:4])
    rig.settle()
    operation = prefetch(rig)
    assert list(operation.key) == PROMPT[4:]
    assert operation.anchor.host_ref_counter == 1
    run(rig)
    rig.cache.check_prefetch_progress("r")
    assert rig.cache.pop_prefetch_loaded_tokens("r") == 4
    assert rig.held(CPU) == {(None, tuple(PROMPT[:end])) for end in (2, 4, 6, 8)}
    assert nothing_is_left(rig)


def test_pages_that_came_meanwhile_are_freed_or_adopted(rig):
    prefetch(rig)
    run(rig)
    rig.insert(PROMPT[:2], chunked=True)  # on the device only
    rig.cache.take_events()
    rig.cache.check_prefetch_progress("r")
    assert rig.events() == [("BlockStored", CPU, PROMPT[i : i + 2]) for i in (0, 2, 4, 6)]
    assert rig.cache.pop_prefetch_loaded_tokens("r") == 6
    prefetch(rig, PROMPT[:2], "too late")
    assert rig.cache.ongoing_prefetch == {}


def test_a_node_in_the_way_is_split(rig):
    prefetch(rig)
    run(rig)
    rig.insert([*PROMPT[:4], 9, 9], chunked=True)
    rig.cache.check_prefetch_progress("r")
    assert rig.cache.pop_prefetch_loaded_tokens("r") == 4
    assert rig.held(CPU) == {(None, tuple(PROMPT[:end])) for end in (2, 4, 6, 8)}


def test_nothing_is_told_below_a_copy_that_is_not_acknowledged(rig):
    prefetch(rig)
    run(rig)
    rig.insert(PROMPT[:4])
    rig.cache.take_events()
    rig.cache.check_prefetch_progress("r")
    assert rig.events() == [("BlockStored", CPU, PROMPT[i : i + 2]) for i in (0, 2, 4, 6)]
    assert rig.cache.pop_prefetch_loaded_tokens("r") == 4


def test_an_anchor_that_lost_its_copy_gets_nothing(rig):
    rig.insert(PROMPT[:4])
    rig.host.write_faults = 2
    prefetch(rig)
    run(rig)
    rig.cache.check_prefetch_progress("r")
    assert rig.cache.pop_prefetch_loaded_tokens("r") == 0
    assert rig.held(CPU) == set()
    assert nothing_is_left(rig)
    assert rig.host.available_size() == rig.host.size


def test_a_hit_that_is_shorter_gives_its_tail_back_at_once(store, rig):
    store.lose(page_hashes(PROMPT)[2])
    prefetch(rig)
    rig.engine.step(Lane.PREFETCH)
    rig.cache.check_storage_events()
    assert rig.host.available_size() == rig.host.size - 4
    run(rig)
    rig.cache.check_prefetch_progress("r")
    assert rig.cache.pop_prefetch_loaded_tokens("r") == 4


def test_a_hit_below_the_threshold_is_revoked(store):
    rig = attach(Rig(), store, prefetch_threshold=6)
    store.lose(page_hashes(PROMPT)[2])
    prefetch(rig)
    run(rig)
    assert nothing_is_left(rig)
    assert rig.host.available_size() == rig.host.size
    assert rig.cache.check_prefetch_progress("r")


def test_a_page_that_went_between_query_and_read_ends_the_prefix(store, rig):
    prefetch(rig)
    rig.engine.step(Lane.PREFETCH)
    store.lose(page_hashes(PROMPT)[1])
    run(rig)
    rig.cache.check_prefetch_progress("r")
    assert rig.cache.pop_prefetch_loaded_tokens("r") == 2
    assert nothing_is_left(rig)
    assert rig.host.available_size() == rig.host.size - 2


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_store_that_breaks_costs_the_rest_of_the_prefetch_only(store, rig, steps):
    prefetch(rig)
    for _ in range(steps):
        rig.engine.step(Lane.PREFETCH)
    store.broken = True
    run(rig)
    rig.cache.check_prefetch_progress("r")
    assert rig.cache.storage.num_errors == 1
    assert rig.cache.pop_prefetch_loaded_tokens("r") == (4 if steps == 2 else 0)
    assert nothing_is_left(rig)


@pytest.mark.parametrize("steps", range(5))
def test_an_aborted_prefetch_leaves_nothing(rig, steps):
    prefetch(rig)
    for _ in range(steps):
        rig.engine.step(Lane.PREFETCH)
        rig.check()
    rig.cache.release_aborted_request("r")
    rig.check()
    run(rig)
    assert nothing_is_left(rig)
    assert rig.host.available_size() == rig.host.size
    assert rig.held(CPU) == set()


def test_after_a_reset_no_prefetch_is_left(rig):
    prefetch(rig)
    rig.engine.step(Lane.PREFETCH)
    rig.cache.reset()
    assert rig.cache.check_prefetch_progress("r")
    assert nothing_is_left(rig)
    assert rig.host.available_size() == rig.host.size


# --- refusals and truncation ---


def test_nothing_is_begun_without_a_store_or_for_too_little(rig):
    assert prefetch(Rig()) is None
    assert prefetch(rig, [1]) is None
    rig.cache.storage.policy = StoragePolicy()
    assert prefetch(rig) is None
    assert rig.cache.root_node.host_ref_counter == 0


def test_a_request_prefetches_once_at_a_time(rig):
    prefetch(rig)
    with pytest.raises(InvalidValueError, match="'r'"):
        prefetch(rig)


def test_a_wrong_last_hash_is_told_in_debug_mode(rig):
    with pytest.raises(InvalidValueError, match="last_hash"):
        rig.cache.prefetch_from_storage("r", rig.cache.root_node, PROMPT, last_hash="00" * 32)


def test_prefetches_are_limited_by_what_the_host_has_beyond_the_device(store):
    rig = attach(Rig(device_pages=8, host_pages=12), store)
    assert prefetch(rig, [9, 9, 8, 8, 7, 7], "a") is not None  # 6 of int(0.8 * 8) units
    assert rig.cache.prefetch_tokens_occupied == 6
    assert prefetch(rig, PROMPT, "b") is None
    rig.cache.release_aborted_request("a")
    assert prefetch(rig, PROMPT, "b") is not None


def test_a_prefetch_evicts_from_the_host_but_not_its_anchor(store):
    rig = attach(Rig(device_pages=2, host_pages=5), store)
    rig.insert(PROMPT[:4])
    rig.settle()
    rig.cache.evict(EvictParams(4))
    rig.cache.storage.policy = StoragePolicy(prefetch_threshold=2, batch_pages=2)
    held = rig.host.alloc(rig.host.available_size())
    assert prefetch(rig) is None
    assert len(rig.held(CPU)) == 2
    rig.host.free(held)


def test_a_prefetch_is_cut_to_the_pages_that_are_free_without_evicting_twice(store, monkeypatch):
    rig = attach(Rig(), store)
    held = rig.host.alloc(rig.host.size - 6)
    evictions = []
    monkeypatch.setattr(rig.cache, "evict_host", lambda units: evictions.append(units) or 0)
    operation = prefetch(rig)
    assert (len(operation.key), evictions) == (6, [8])
    assert rig.cache.prefetch_tokens_occupied == 6
    rig.settle()
    rig.cache.check_prefetch_progress("r")
    assert rig.cache.pop_prefetch_loaded_tokens("r") == 6
    assert rig.held(CPU) == {(None, tuple(PROMPT[:end])) for end in (2, 4, 6)}
    assert nothing_is_left(rig)
    rig.host.free(held)


def test_a_prefetch_that_would_be_cut_below_the_threshold_is_given_up(store):
    rig = attach(Rig(), store, prefetch_threshold=6)
    held = rig.host.alloc(rig.host.size - 4)
    assert prefetch(rig) is None
    assert rig.cache.root_node.host_ref_counter == 0
    assert rig.host.available_size() == 4
    rig.host.free(held)


# --- stop policies ---


def test_best_effort_takes_what_is_there(rig):
    prefetch(rig)
    for _ in range(2):
        rig.engine.step(Lane.PREFETCH)
    assert rig.cache.check_prefetch_progress("r")
    assert rig.cache.pop_prefetch_loaded_tokens("r") == 4
    rig.check()
    run(rig)
    assert nothing_is_left(rig)
    assert rig.host.available_size() == rig.host.size - 4


def test_wait_complete_waits_for_all_of_the_hit(store):
    rig = attach(Rig(), store, stop="wait_complete")
    prefetch(rig)
    while rig.engine.num_queued(Lane.PREFETCH):
        assert not rig.cache.check_prefetch_progress("r")
        rig.engine.step(Lane.PREFETCH)
    assert rig.cache.check_prefetch_progress("r")
    assert rig.cache.pop_prefetch_loaded_tokens("r") == 8


def test_timeout_waits_for_its_time(store):
    rig = attach(Rig(), store, stop="timeout", timeout_base_s=1000)
    prefetch(rig)
    rig.engine.step(Lane.PREFETCH)
    assert not rig.cache.check_prefetch_progress("r")
    rig.cache.storage.policy = StoragePolicy(stop="timeout", timeout_base_s=0, timeout_per_1024_s=0)
    assert rig.cache.check_prefetch_progress("r")
    run(rig)
    assert nothing_is_left(rig)


def test_the_timeout_grows_with_the_hit_up_to_its_cap():
    policy = StoragePolicy()
    assert policy.timeout_s(0) == 2.0
    assert policy.timeout_s(10 * 1024) == pytest.approx(3.0)
    assert policy.timeout_s(10**9) == 30.0


@pytest.mark.parametrize(
    ("field", "value"),
    [("stop", "never"), ("prefetch_threshold", 0), ("batch_pages", 0), ("timeout_base_s", -1), ("timeout_cap_s", -1)],
)
def test_a_bad_policy_is_refused(field, value):
    with pytest.raises(InvalidValueError, match=f"{field}: got {value!r}"):
        StoragePolicy(**{field: value})


# --- sidecars on the I/O side ---


@pytest.fixture
def hybrid():
    """A store with two pools, the I/O side before it, and the pools."""
    kv, state = Rig().host, Rig(page_size=1).host
    kv.kv_buffer.random_(0, 1000)
    state.kv_buffer.random_(0, 1000)
    store, engine = MemoryStorage(), ManualCopyEngine()
    store.register_mem_pool_host(kv)
    store.register_mem_host_pool_v2(state, PoolName.MAMBA)
    return StorageIO(store, engine, 2, StoragePolicy(prefetch_threshold=2, batch_pages=2)), engine, store, kv, state


def archive(hybrid, policy=PoolHitPolicy.TRAILING_PAGES, slots=1):
    io, engine, _, kv, state = hybrid
    keys = page_hashes(PROMPT)
    extra = PoolTransfer(PoolName.MAMBA, host_indices=state.alloc(slots), keys=keys[4 - slots :], hit_policy=policy)
    operation = ArchiveOperation(None, keys, kv.alloc(8), [extra])
    io.archive(operation)
    engine.drain()
    assert list(io.archived) == [operation]
    return operation, extra


def test_state_is_archived_first_and_fetched_last(hybrid):
    io, engine, store, kv, state = hybrid
    stored, extra = archive(hybrid)
    assert store.batches[0] == ("set", PoolName.MAMBA, 1)
    slot = state.alloc(1)
    fetched = PrefetchOperation(
        "r",
        None,
        RadixKey(PROMPT),
        None,
        kv.alloc(8),
        [PoolTransfer(PoolName.MAMBA, host_indices=slot, hit_policy=PoolHitPolicy.TRAILING_PAGES)],
    )
    io.prefetch(fetched)
    for _ in range(3):
        engine.step(Lane.PREFETCH)
    assert not fetched.may_finish(io.policy)  # all KV is there, the state is not
    engine.drain()
    assert fetched.extra_pool_hit_pages == {PoolName.MAMBA: 1}
    rows = fetched.take()
    assert fetched.is_over
    assert all(
        (kv.get_data_page(a) == kv.get_data_page(b)).all()
        for a, b in zip(rows[::2].tolist(), stored.host_indices[::2].tolist(), strict=True)
    )
    assert (state.get_data_page(int(slot[0])) == state.get_data_page(int(extra.host_indices[0]))).all()


def test_kv_without_the_state_it_needs_on_every_page_is_not_written(hybrid):
    store = hybrid[2]
    keep = store._write

    def write(name, pool, keys, rows):
        return [True, True, False, True] if name is PoolName.MAMBA else keep(name, pool, keys, rows)

    store._write = write
    operation, _ = archive(hybrid, PoolHitPolicy.ALL_PAGES, slots=4)
    assert operation.completed_pages == 2
    assert len(store.pages) == 2


def test_state_is_not_read_when_kv_is_cut_short(hybrid):
    io, engine, store, kv, state = hybrid
    archive(hybrid)
    extra = PoolTransfer(PoolName.MAMBA, host_indices=state.alloc(1), hit_policy=PoolHitPolicy.TRAILING_PAGES)
    operation = PrefetchOperation("r", None, RadixKey(PROMPT), None, kv.alloc(8), [extra])
    io.prefetch(operation)
    engine.step(Lane.PREFETCH)
    store.lose(page_hashes(PROMPT)[3])
    engine.drain()
    assert len(operation.take()) == 6
    assert operation.extra_pool_hit_pages == {}


# --- attach and detach ---


def test_one_store_at_a_time(store, rig):
    assert rig.cache.attach_storage_backend(MemoryStorage())[0] is False
    ok, word = rig.cache.attach_storage_backend(store, StoragePolicy(stop="wait_complete"))
    assert (ok, word) == (True, "attached already, policy updated")
    assert rig.cache.storage.policy.stop == "wait_complete"


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
    monkeypatch.setattr("engine_cache.prefetch._DETACH_TIMEOUT_S", 0.02)
    rig = attach(Rig(engine=ThreadCopyEngine()), MemoryStorage())
    gate = threading.Event()
    rig.engine.submit(Lane.ARCHIVE, [gate.wait])
    ok, word = rig.cache.detach_storage_backend()
    assert not ok
    assert "0.02" in word
    gate.set()
    assert rig.cache.detach_storage_backend()[0]
    rig.engine.close()


# --- the whole way, with threads and files ---


def test_what_one_cache_archives_in_a_folder_another_prefetches(tmp_path):
    identity = StorageIdentity("m", PageLayout("int64", 2, (2, 1, 1), "layer_first"))
    prompts = [[n, 1, n, 2, n, 3] for n in range(5)]
    writer = Rig(engine=ThreadCopyEngine(), device_pages=20, host_pages=30)
    attach(writer, DirectoryStorage(tmp_path, identity, capacity_bytes=10**6), emit_storage_events=True)
    for prompt in prompts:
        writer.insert(prompt)
    writer.settle()
    on_disk = [event for event in writer.events() if event[1] is DISK]
    assert len(on_disk) == 15
    reader = Rig(engine=ThreadCopyEngine(), device_pages=20, host_pages=60)
    attach(reader, DirectoryStorage(tmp_path, identity, capacity_bytes=10**6), stop="wait_complete")
    for n, prompt in enumerate(prompts):
        prefetch(reader, prompt, str(n))
    for n in range(len(prompts)):
        wait_until(lambda n=n: reader.cache.check_prefetch_progress(str(n)))
        assert reader.cache.pop_prefetch_loaded_tokens(str(n)) == 6
    for prompt in prompts:
        match = reader.match(prompt)
        rows, _ = reader.cache.init_load_back(InitLoadBackParams(match.best_match_node, match.host_hit_length))
        assert len(rows) == 6
    reader.settle()
    assert nothing_is_left(reader)
    assert reader.held(GPU) == reader.held(CPU) == writer.held(CPU)
    assert np.array_equal(reader.cache.evictable_size(), 30)
    reader.check()
    for rig in (writer, reader):
        rig.engine.close()


# --- a store that loses, closes or is told to be silent ---


def test_what_a_store_lost_is_withdrawn_although_announcing_was_switched_off_meanwhile():
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
