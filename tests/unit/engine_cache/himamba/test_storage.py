from functools import partial

import pytest

from engine_cache import Lane, StoragePolicy, ThreadCopyEngine
from engine_cache.storage.base import PoolName
from engine_cache.storage.directory import DirectoryStorage
from engine_cache.storage.object_names import PageLayout, StorageIdentity
from tests.support.caches.hybrid_rig import HybridRig
from tests.support.caches.hybrid_steps import CPU, GPU, PROMPT, demoted, node_of, removed, stored
from tests.support.caches.tier_rig import MemoryStorage
from tests.support.waiting import wait_until

pytestmark = pytest.mark.torch


def attach(rig, store, **policy):
    policy = {"prefetch_threshold": 2, "batch_pages": 2} | policy
    assert rig.cache.attach_storage_backend(store, StoragePolicy(**policy)) == (True, "attached")
    rig.cache.take_events()
    return rig


@pytest.fixture
def store():
    """A store with the pages of `PROMPT` and the states after its second and its last page."""
    store = MemoryStorage()
    writer = attach(HybridRig(), store)
    writer.insert(PROMPT[:4])
    writer.insert(PROMPT)
    writer.settle()
    assert writer.cache.detach_storage_backend()[0]
    assert sorted(name.value for name, _ in store.pages) == 4 * ["kv"] + 2 * ["mamba"]
    return store


def prefetch(rig, tokens=PROMPT, req_id="r"):
    rig.cache.prefetch_from_storage(req_id, rig.cache.root_node, tokens)
    return rig.cache.ongoing_prefetch.get(req_id)


def finish(rig):
    while rig.engine.step(Lane.PREFETCH):
        pass
    assert rig.cache.check_prefetch_progress("r")
    loaded = rig.cache.pop_prefetch_loaded_tokens("r")
    rig.settle()
    assert rig.cache.prefetch_tokens_occupied == 0
    assert rig.cache.root_node.host_ref_counter == rig.cache.root_node.host_mamba_ref_counter == 0
    return loaded


def test_fetched_pages_are_reported_before_any_request_uses_them_and_are_continued_from(store, rig):
    attach(rig, store)
    prefetch(rig)
    assert finish(rig) == 8
    assert rig.events() == stored(CPU, [1, 2], [3, 4], [5, 6], [7, 8])
    rig.check()
    assert rig.match(PROMPT).mamba_host_hit_length == 1
    assert rig.load_back(PROMPT)[1].mamba_value is not None
    rig.settle()
    rig.check()


def test_a_hit_ends_at_the_last_page_with_a_state(store, rig):
    name, last = [page for page in store.pages if page[0] is PoolName.MAMBA][-1]
    store.lose(last, name)
    attach(rig, store)
    prefetch(rig)
    assert finish(rig) == 4
    assert rig.match(PROMPT).host_hit_length == 4


def test_a_state_for_pages_that_are_there_already_is_freed(store, rig):
    attach(rig, store)
    prefetch(rig)
    rig.insert(PROMPT)
    assert finish(rig) == 0
    assert rig.host_states.available_size() == rig.host_states.size - 1


def test_without_the_state_the_pages_are_kept_and_the_slot_is_freed(store, rig):
    attach(rig, store)
    prefetch(rig)
    rig.engine.step(Lane.PREFETCH)
    for page in [page for page in store.pages if page[0] is PoolName.MAMBA]:
        store.lose(page[1], page[0])
    assert finish(rig) == 8
    assert rig.host_states.available_size() == rig.host_states.size
    assert rig.match(PROMPT).host_hit_length == 0


@pytest.mark.parametrize("steps", range(5))
def test_an_aborted_prefetch_leaves_nothing(store, rig, steps):
    attach(rig, store)
    prefetch(rig)
    for _ in range(steps):
        rig.engine.step(Lane.PREFETCH)
    rig.cache.release_aborted_request("r")
    rig.settle()
    assert rig.host.available_size() == rig.host.size
    assert rig.host_states.available_size() == rig.host_states.size
    assert rig.cache.root_node.host_mamba_ref_counter == 0


def test_a_revoked_prefetch_leaves_nothing(rig):
    attach(rig, MemoryStorage())
    prefetch(rig)
    rig.settle()
    assert rig.cache.ongoing_prefetch == {}
    assert rig.host_states.available_size() == rig.host_states.size


def test_without_a_slot_the_pages_of_a_prefetch_are_given_back(store, rig):
    attach(rig, store)
    held = rig.host_states.alloc(rig.host_states.size)
    assert prefetch(rig) is None
    assert rig.host.available_size() == rig.host.size
    assert (rig.cache.root_node.host_ref_counter, rig.cache.root_node.host_mamba_ref_counter) == (0, 0)
    rig.host_states.free(held)


def test_a_prefetch_takes_the_slot_of_the_least_recent_state_but_not_of_its_anchor(store):
    rig = attach(HybridRig(slots=1, host_slots=2), store)
    demoted(rig, [9, 9])
    demoted(rig, [1, 2])
    rig.cache.prefetch_from_storage("r", node_of(rig, [1, 2]), PROMPT[2:])
    assert rig.events() == removed(CPU)
    anchor = node_of(rig, [1, 2])
    assert (anchor.host_ref_counter, anchor.host_mamba_ref_counter) == (1, 1)
    assert rig.cache.evict_mamba_host(2) == 0
    rig.settle()
    assert rig.cache.check_prefetch_progress("r")
    rig.settle()
    rig.check()


def test_a_prefetch_may_take_the_slot_of_its_anchor_but_not_the_anchor(store):
    rig = attach(HybridRig(slots=1, host_slots=2), store)
    demoted(rig, [1, 2])
    held = rig.host_states.alloc(1)
    anchor = node_of(rig, [1, 2])
    rig.cache.prefetch_from_storage("r", anchor, PROMPT[2:])
    assert rig.events() == []
    assert (anchor.mamba_host_value, len(anchor.host_value)) == (None, 2)
    assert finish(rig) == 6
    rig.host_states.free(held)
    rig.check()


def test_a_truncated_prefetch_takes_one_slot_and_ends_at_a_state(store):
    rig = attach(HybridRig(), store)
    held = rig.host.alloc(rig.host.size - 6)
    operation = prefetch(rig)
    assert len(operation.key) == 6
    assert rig.cache.prefetch_tokens_occupied == 6
    assert rig.host_states.available_size() == rig.host_states.size - 1
    assert finish(rig) == 4
    assert rig.events() == stored(CPU, [1, 2], [3, 4])
    rig.host.free(held)
    rig.check()


def test_a_state_being_archived_stays_on_the_host(rig):
    attach(rig, MemoryStorage())
    rig.insert([1, 2])
    rig.engine.step(Lane.WRITE)
    rig.cache.writing_check()
    node = node_of(rig, [1, 2])
    assert (node.host_ref_counter, node.host_mamba_ref_counter) == (1, 1)
    assert rig.cache.evict_mamba_host(1) == 0
    rig.settle()
    assert (node.host_ref_counter, node.host_mamba_ref_counter) == (0, 0)


def test_the_state_of_a_namespace_is_found_in_it_only(rig):
    store = MemoryStorage()
    attach(rig, store)
    rig.insert(PROMPT, "tenant")
    rig.settle()
    assert rig.cache.detach_storage_backend()[0]
    other = attach(HybridRig(), store)
    prefetch(other)
    other.settle()
    assert other.cache.ongoing_prefetch == {}
    other.cache.prefetch_from_storage("r", other.cache.root_node, PROMPT, extra_key="tenant")
    assert finish(other) == 8
    assert other.match(PROMPT, "tenant").mamba_host_hit_length == 1


def test_what_one_cache_archives_in_a_folder_another_continues_from(tmp_path):
    identity = StorageIdentity("m", PageLayout("int64", 2, (2, 1, 1), "layer_first"))
    options = {"device_pages": 20, "host_pages": 60, "host_slots": 8}
    writer, reader = (HybridRig(engine=ThreadCopyEngine(), **options) for _ in range(2))
    for rig in (writer, reader):
        attach(rig, DirectoryStorage(tmp_path, identity, capacity_bytes=10**6), stop="wait_complete")
    prompts = [[n, 1, n, 2, n, 3] for n in range(4)]
    for prompt in prompts:
        writer.insert(prompt)
    writer.settle()
    for n, prompt in enumerate(prompts):
        prefetch(reader, prompt, str(n))
    for n in range(len(prompts)):
        wait_until(partial(reader.cache.check_prefetch_progress, str(n)))
    for prompt in prompts:
        assert len(reader.load_back(prompt)[0]) == 6
    reader.settle()
    assert reader.held(GPU) == reader.held(CPU) == writer.held(CPU)
    assert reader.state_ends() == writer.state_ends()
    for rig in (writer, reader):
        rig.check()
        rig.engine.close()
