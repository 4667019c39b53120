from functools import partial

import numpy as np
import pytest

from engine_cache import InitLoadBackParams, Lane, ThreadCopyEngine
from engine_cache.storage.base import PoolName
from engine_cache.storage.directory import DirectoryStorage
from engine_cache.storage.object_names import PageLayout, StorageIdentity
from kv_events.schema import StorageMedium
from tests.support.caches.prefetch_steps import PROMPT, attach, nothing_is_left, page_hashes, prefetch, run
from tests.support.caches.tier_rig import Rig
from tests.support.waiting import wait_until

pytestmark = pytest.mark.torch
GPU, CPU, DISK = StorageMedium.GPU, StorageMedium.CPU, StorageMedium.DISK


def test_fetched_pages_are_reported_before_any_request_uses_them_and_load_back_equals(rig):
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


def test_a_prefetch_continues_where_the_anchor_ends(rig):
    rig.insert(PROMPT[:4])
    rig.settle()
    operation = prefetch(rig)
    assert list(operation.key) == PROMPT[4:]
    assert operation.start_node.host_ref_counter == 1
    run(rig)
    rig.cache.check_prefetch_progress("r")
    assert rig.cache.pop_prefetch_loaded_tokens("r") == 4
    assert rig.held(CPU) == {(None, tuple(PROMPT[:end])) for end in (2, 4, 6, 8)}
    assert nothing_is_left(rig)


def test_pages_that_came_concurrently_are_freed_or_adopted(rig):
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


def test_nothing_is_reported_below_a_copy_that_is_not_acknowledged(rig):
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
    rig.cache.store.check_events()
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
    assert rig.cache.store.io.num_errors == 1
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
        wait_until(partial(reader.cache.check_prefetch_progress, str(n)))
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
