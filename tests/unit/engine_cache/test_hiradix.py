import threading

import numpy as np
import pytest

from engine_cache import (
    WRITE_POLICIES,
    BytelessHostPool,
    CacheStateError,
    EvictParams,
    HiCacheController,
    HiRadixCache,
    InitLoadBackParams,
    InsertParams,
    Lane,
    ManualCopyEngine,
    MatchPrefixParams,
    PagedTokenToKVPoolAllocator,
    PoolEntry,
    RadixKey,
    ReqToTokenPool,
    Request,
    ThreadCopyEngine,
    TransferError,
)
from engine_cache.storage.base import PoolName
from kv_events.errors import InvalidValueError
from kv_events.schema import StorageMedium
from tests.support.caches.tier_rig import Rig

pytestmark = pytest.mark.torch
GPU, CPU = StorageMedium.GPU, StorageMedium.CPU


def stored(medium, *pages):
    return [("BlockStored", medium, list(page)) for page in pages]


def removed(medium, count):
    return count * [("BlockRemoved", medium, None)]


def load_back(rig, tokens, **params):
    match = rig.match(tokens)
    return rig.cache.init_load_back(InitLoadBackParams(match.best_match_node, match.host_hit_length, **params))


def demoted(rig, tokens):
    """Insert a prompt, back it up and evict it from the device."""
    rig.insert(tokens)
    rig.settle()
    rig.cache.evict(EvictParams(100))
    rig.cache.take_events()


@pytest.fixture
def rig():
    rig = Rig()
    assert rig.events() == [("AllBlocksCleared", None, None)]
    yield rig
    rig.check()


# --- backups ---


def test_a_page_is_on_the_host_when_its_copy_is_acknowledged_and_not_before(rig):
    rig.insert([1, 2, 3, 4])
    assert rig.events() == stored(GPU, [1, 2], [3, 4])
    rig.cache.writing_check()
    assert rig.events() == []
    rig.engine.step(Lane.WRITE)
    assert rig.events() == []
    rig.cache.flush_write_through_acks()
    assert rig.events() == stored(CPU, [1, 2], [3, 4])
    rig.cache.writing_check()
    assert rig.events() == []


def test_a_node_is_locked_while_it_is_copied(rig):
    rig.insert([1, 2, 3, 4])
    assert rig.cache.evict(EvictParams(4)).num_tokens_evicted == 0
    rig.settle()
    assert rig.cache.evict(EvictParams(4)).num_tokens_evicted == 4


def test_a_pending_copy_is_not_resident_yet(rig):
    rig.insert([1, 2])
    assert list(rig.cache.iter_resident(CPU)) == []
    rig.settle()
    assert [page.token_ids for page in rig.cache.iter_resident(CPU)] == [[1, 2]]


def test_all_parts_of_a_node_that_was_split_while_pending_are_reported_parents_first(rig):
    rig.insert([1, 2, 3, 4, 5, 6])
    rig.match([1, 2, 3, 4])
    rig.match([1, 2])
    rig.cache.take_events()
    rig.engine.step(Lane.WRITE)
    rig.cache.writing_check()
    assert rig.events() == stored(CPU, [1, 2], [3, 4], [5, 6])
    assert rig.cache.protected_size() == 0


def test_a_backup_without_room_emits_nothing_and_takes_nothing():
    rig = Rig(device_pages=4, host_pages=5)
    held = rig.host.alloc(10)
    rig.insert([1, 2, 3, 4])
    (node,) = rig.cache.root_node.children.values()
    rig.cache.take_events()
    assert rig.cache.write_backup(node) == 0
    assert rig.events() == []
    assert (node.host_value, node.lock_ref, node.write_through_pending_id) == (None, 0, None)
    rig.host.free(held)
    assert rig.cache.write_backup(node) == 4


def test_a_backup_makes_room_by_evicting_from_the_host_once():
    rig = Rig(device_pages=2, host_pages=3)
    demoted(rig, [1, 2, 3, 4])
    rig.insert([5, 6, 7, 8])
    assert rig.events() == stored(GPU, [5, 6], [7, 8]) + removed(CPU, 2)
    rig.settle()
    assert rig.events() == stored(CPU, [5, 6], [7, 8])
    rig.check()


def test_a_child_is_not_backed_up_before_its_parent(rig):
    held = rig.host.alloc(rig.host.size)
    rig.insert([1, 2])
    rig.host.free(held)
    rig.insert([1, 2, 3, 4], chunked=True)
    parent = rig.match([1, 2]).last_device_node
    (child,) = parent.children.values()
    assert rig.cache.write_backup(child) == 0
    assert rig.cache.write_backup(parent) == 2
    assert rig.cache.write_backup(child) == 2


def test_the_selective_policy_waits_for_the_second_hit():
    rig = Rig(write_policy="write_through_selective")
    rig.insert([1, 2])
    assert rig.engine.num_queued(Lane.WRITE) == 0
    rig.insert([1, 2], chunked=True)
    assert rig.engine.num_queued(Lane.WRITE) == 0
    rig.insert([1, 2])
    assert rig.engine.num_queued(Lane.WRITE) == 1


def test_acknowledgements_come_in_order(rig):
    rig.insert([1, 2])
    rig.insert([3, 4])
    rig.cache.take_events()
    rig.engine.step(Lane.WRITE, 1)
    rig.cache.writing_check()
    assert rig.events() == []
    rig.engine.step(Lane.WRITE)
    rig.cache.writing_check()
    assert rig.events() == stored(CPU, [1, 2], [3, 4])


# --- failing copies ---


def test_a_copy_that_fails_once_is_repeated_and_reported(rig):
    rig.host.write_faults = 1
    rig.insert([1, 2])
    rig.settle()
    assert rig.cache.num_failed_backups == 0
    assert rig.events() == stored(GPU, [1, 2]) + stored(CPU, [1, 2])


def test_a_copy_that_fails_emits_nothing_frees_its_pages_and_heals(rig):
    rig.host.write_faults = 2
    rig.insert([1, 2])
    rig.cache.take_events()
    rig.settle()
    assert rig.cache.num_failed_backups == 1
    assert rig.events() == []
    assert rig.host.available_size() == rig.host.size
    assert rig.cache.protected_size() == 0
    rig.insert([1, 2])
    rig.settle()
    assert rig.events() == stored(CPU, [1, 2])


def test_copies_below_a_failed_one_are_dropped_once_they_are_written(rig):
    rig.insert([1, 2])
    rig.insert([1, 2, 3, 4])
    rig.cache.take_events()
    rig.host.write_faults = 2
    rig.engine.step(Lane.WRITE)
    rig.cache.writing_check()
    assert rig.host.available_size() == rig.host.size - 2
    rig.check()
    rig.settle()
    assert rig.host.available_size() == rig.host.size
    assert rig.events() == []
    assert rig.cache.protected_size() == 0


def test_all_parts_of_a_failed_copy_lose_it(rig):
    rig.host.write_faults = 2
    rig.insert([1, 2, 3, 4])
    rig.match([1, 2])
    rig.settle()
    assert rig.held(CPU) == set()
    assert rig.host.available_size() == rig.host.size


def test_a_load_that_fails_is_an_error_until_the_cache_is_reset(rig):
    demoted(rig, [1, 2, 3, 4])
    load_back(rig, [1, 2, 3, 4])
    rig.host.load_faults = 2
    rig.cache.ready_to_load_host_cache()
    rig.engine.drain()
    with pytest.raises(TransferError):
        rig.cache.loading_check()
    rig.cache.reset()
    rig.pool.clear()
    assert rig.cache.ongoing_load_back == {}


# --- eviction ---


def test_a_backed_up_node_leaves_the_device_and_stays_on_the_host(rig):
    rig.insert([1, 2, 3, 4])
    rig.settle()
    rig.cache.take_events()
    assert rig.cache.evict(EvictParams(1)).num_tokens_evicted == 4
    assert rig.events() == removed(GPU, 2)
    match = rig.match([1, 2, 3, 4])
    assert (len(match.device_indices), match.host_hit_length) == (0, 4)
    assert match.last_device_node is rig.cache.root_node
    assert match.last_host_node is match.best_match_node is not rig.cache.root_node


def test_a_node_that_was_never_backed_up_is_deleted(rig):
    rig.insert([1, 2], chunked=True)
    rig.cache.take_events()
    rig.cache.evict(EvictParams(1))
    assert rig.events() == removed(GPU, 1)
    assert rig.cache.root_node.children == {}


def test_host_eviction_deletes_the_node(rig):
    demoted(rig, [1, 2, 3, 4])
    assert rig.cache.evict_host(1) == 4
    assert rig.events() == removed(CPU, 2)
    assert rig.match([1, 2, 3, 4]).host_hit_length == 0
    assert rig.host.available_size() == rig.host.size


def test_host_eviction_spares_what_is_on_the_device_or_referenced(rig):
    rig.insert([1, 2])
    rig.settle()
    assert rig.cache.evict_host(2) == 0
    rig.cache.evict(EvictParams(2))
    node = rig.match([1, 2]).last_host_node
    rig.cache.host.leaves.hold(node)
    assert rig.cache.evict_host(2) == 0
    rig.cache.host.leaves.release(node)
    assert rig.cache.evict_host(2) == 2


def test_write_back_reports_the_host_before_it_leaves_the_device():
    rig = Rig(write_policy="write_back")
    rig.insert([1, 2])
    rig.insert([1, 2, 3, 4])
    assert rig.engine.num_queued(Lane.WRITE) == 0
    rig.cache.take_events()
    assert rig.cache.evict(EvictParams(4)).num_tokens_evicted == 4
    assert rig.events() == stored(CPU, [3, 4], [1, 2]) + removed(GPU, 2)
    assert rig.match([1, 2, 3, 4]).host_hit_length == 4
    rig.check()


def test_write_back_reports_less_when_a_copy_fails():
    rig = Rig(write_policy="write_back")
    rig.insert([1, 2])
    rig.insert([1, 2, 3, 4])
    rig.host.write_faults = 2
    assert rig.cache.evict(EvictParams(4)).num_tokens_evicted == 0
    assert rig.held(GPU) == {(None, (1, 2)), (None, (1, 2, 3, 4))}
    rig.check()


def test_write_back_keeps_what_finds_no_room_on_the_host():
    rig = Rig(write_policy="write_back", device_pages=4, host_pages=5)
    held = rig.host.alloc(8)
    rig.insert([1, 2, 3, 4])
    assert rig.cache.evict(EvictParams(4)).num_tokens_evicted == 0
    rig.host.free(held)
    assert rig.cache.evict(EvictParams(4)).num_tokens_evicted == 4


def test_a_copy_that_is_under_way_is_waited_for_before_its_node_leaves_the_device():
    rig = Rig(write_policy="write_back")
    rig.insert([1, 2])
    (node,) = rig.cache.root_node.children.values()
    rig.cache.write_backup(node, write_back=True)
    rig.cache.take_events()
    assert rig.cache.evict(EvictParams(2)).num_tokens_evicted == 2
    assert rig.events() == stored(CPU, [1, 2]) + removed(GPU, 1)
    rig.check()


# --- load-backs ---


def test_a_load_back_reports_the_device_top_down_and_keeps_the_host(rig):
    rig.insert([1, 2])
    rig.insert([1, 2, 3, 4])
    rig.settle()
    rig.cache.evict(EvictParams(4))
    rig.cache.take_events()
    rows, node = load_back(rig, [1, 2, 3, 4])
    assert len(rows) == 4
    assert rig.events() == stored(GPU, [1, 2], [3, 4])
    assert rig.match([1, 2, 3, 4]).device_indices.tolist() == rows.tolist()
    assert rig.match([1, 2, 3, 4]).last_device_node is node
    assert rig.cache.protected_size() == 4
    rig.settle()
    assert rig.cache.protected_size() == 0
    assert rig.events() == []
    assert rig.held(CPU) == rig.held(GPU)


@pytest.mark.parametrize("quota", [0, 3])
def test_a_load_back_over_the_quota_changes_nothing(rig, quota):
    demoted(rig, [1, 2, 3, 4])
    rows, node = load_back(rig, [1, 2, 3, 4], mem_quota=quota)
    assert (len(rows), node) == (0, rig.cache.root_node)
    assert rig.events() == []
    assert rig.cache.protected_size() == 0


def test_what_the_load_newly_protects_counts_against_the_quota(rig):
    rig.insert([1, 2])
    rig.insert([1, 2, 3, 4])
    rig.settle()
    rig.cache.evict(EvictParams(2))
    assert len(load_back(rig, [1, 2, 3, 4], mem_quota=3)[0]) == 0
    assert len(load_back(rig, [1, 2, 3, 4], mem_quota=4)[0]) == 2


def test_a_load_back_below_the_threshold_is_not_worth_it():
    rig = Rig(load_back_threshold=5)
    demoted(rig, [1, 2, 3, 4])
    assert len(load_back(rig, [1, 2, 3, 4])[0]) == 0


def test_a_load_back_makes_room_on_the_device():
    rig = Rig(device_pages=3, host_pages=6)
    demoted(rig, [1, 2, 3, 4])
    rig.insert([5, 6, 7, 8])
    rig.settle()
    rig.cache.take_events()
    assert len(load_back(rig, [1, 2, 3, 4])[0]) == 4
    assert rig.events() == removed(GPU, 2) + stored(GPU, [1, 2], [3, 4])
    rig.settle()
    rig.check()


def test_a_load_back_without_room_changes_nothing():
    rig = Rig(device_pages=3, host_pages=6)
    demoted(rig, [1, 2, 3, 4])
    rig.insert([5, 6, 7, 8])
    rig.cache.take_events()
    rows, node = load_back(rig, [1, 2, 3, 4])
    assert (len(rows), node) == (0, rig.cache.root_node)
    assert rig.events() == []


def test_a_prompt_that_is_computed_again_is_reported_again_and_its_pages_are_taken(rig):
    demoted(rig, [1, 2, 3, 4])
    result = rig.insert([1, 2, 3, 4, 5, 6])
    assert result.prefix_len == 0
    assert rig.events() == stored(GPU, [1, 2], [3, 4], [5, 6])
    assert rig.held(GPU) == {(None, (1, 2)), (None, (1, 2, 3, 4)), (None, (1, 2, 3, 4, 5, 6))}


def test_an_evicted_node_that_is_split_keeps_its_hashes(rig):
    demoted(rig, [1, 2, 3, 4])
    (node,) = rig.cache.root_node.children.values()
    whole = list(node.hash_value)
    upper = rig.match([1, 2]).best_match_node
    assert (upper.hash_value, node.hash_value) == (whole[:1], whole[1:])
    assert rig.events() == []
    assert rig.match([1, 2, 3, 4]).host_hit_length == 4


# --- all operations ---


def test_an_evicted_node_can_be_neither_locked_nor_unlocked(rig):
    demoted(rig, [1, 2])
    node = rig.match([1, 2]).best_match_node
    with pytest.raises(CacheStateError, match="not on the device"):
        rig.cache.inc_lock_ref(node)
    with pytest.raises(CacheStateError, match="not on the device"):
        rig.cache.dec_lock_ref(node)


def test_a_node_on_no_tier_ends_a_match(rig):
    rig.insert([1, 2], chunked=True)
    rig.insert([1, 2, 3, 4], chunked=True)
    dead = rig.match([1, 2, 3, 4]).last_device_node
    rows, dead.value = dead.value, None
    match = rig.match([1, 2, 3, 4])
    assert match.last_device_node is dead.parent
    assert len(match.device_indices) == 2
    dead.value = rows


def test_after_a_reset_nothing_that_began_before_is_reported(rig):
    rig.insert([1, 2])
    rig.settle()
    rig.insert([3, 4])
    rig.cache.take_events()
    rig.cache.reset()
    rig.pool.clear()
    rig.settle()
    assert rig.events() == [("AllBlocksCleared", None, None)]
    assert rig.host.available_size() == rig.host.size


def test_events_off_computes_no_hash():
    rig = Rig(enable_kv_cache_events=False)
    demoted(rig, [1, 2, 3, 4])
    load_back(rig, [1, 2, 3, 4])
    assert rig.cache.take_events() == []
    assert all(node.hash_value is None for node, _, _ in rig.walk())


def test_requests_run_through_both_tiers(rig):
    requests = ReqToTokenPool(2, 32)
    rig.cache.req_to_token_pool = requests
    for tokens in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7, 8]):
        match = rig.match(tokens)
        rows, node = match.device_indices, match.last_device_node
        if match.host_hit_length:
            loaded, node = load_back(rig, tokens)
            rows = np.concatenate((rows, loaded))
        rig.cache.inc_lock_ref(node)
        own = rig.pool.alloc(2 * ((len(tokens) - len(rows) + 1) // 2))
        line = requests.alloc()
        requests.write(line, 0, np.concatenate((rows, own))[: len(tokens)])
        request = Request("r", tokens, line, last_node=node, cache_protected_len=len(rows))
        for start in range(len(rows), len(tokens), 2):  # content of the pages that were computed
            page = rig.prefixes(tokens)[start // 2 : start // 2 + 1]
            if page:
                rig.compute(own[start - len(rows) : start - len(rows) + 2], None, page)
        rig.cache.cache_unfinished_req(request)
        rig.cache.cache_finished_req(request)
        rig.settle()
        rig.check()
        rig.cache.evict(EvictParams(100))
    assert rig.match([1, 2, 3, 4, 6, 7]).host_hit_length == 6


def test_copies_on_threads_end_as_those_by_hand_do():
    rig = Rig(engine=ThreadCopyEngine())
    for turn in range(40):
        rig.insert([turn % 7, 1, turn % 3, 2, 3, 4])
        rig.cache.check_hicache_events()
        load_back(rig, [turn % 5, 1, turn % 3, 2])
        rig.cache.ready_to_load_host_cache()
    rig.settle()
    rig.check()
    assert rig.held(CPU)
    rig.engine.close()


def test_the_thread_of_the_cache_does_not_wait_for_copies():
    rig = Rig(engine=ThreadCopyEngine())
    gate = threading.Event()
    rig.engine.submit(Lane.WRITE, [gate.wait])  # type: ignore[list-item]
    rig.insert([1, 2])
    rig.cache.check_hicache_events()
    assert rig.held(CPU) == set()
    gate.set()
    rig.settle()
    assert rig.held(CPU) == {(None, (1, 2))}
    rig.engine.close()


# --- configuration ---


def cache(page_size=2, host_page_size=2, **options):
    pool = PagedTokenToKVPoolAllocator(8, 2)
    controller = HiCacheController(
        PoolEntry(PoolName.KV, BytelessHostPool(12, host_page_size), None, pool), ManualCopyEngine()
    )
    return HiRadixCache(**({"page_size": page_size, "allocator": pool, "controller": controller} | options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"page_size": 0}, "page_size: got 0"),
        ({"host_page_size": 4}, "page_size: got 2, expected the host pool's, 4"),
        ({"write_policy": "write_around"}, f"write_around.*{', '.join(WRITE_POLICIES)}"),
        ({"load_back_threshold": -1}, "load_back_threshold: got -1"),
        ({"eviction_policy": "random"}, "random"),
        ({"allocator": PagedTokenToKVPoolAllocator(8, 2)}, "the controller's own"),
    ],
)
def test_a_bad_configuration_is_refused_with_its_numbers(options, words):
    with pytest.raises(InvalidValueError, match=words):
        cache(**options)


def test_a_disabled_cache_keeps_nothing():
    disabled = cache(disable=True)
    assert disabled.insert(InsertParams(RadixKey([1, 2]), np.arange(2))).total_len == 0
    assert disabled.match_prefix(MatchPrefixParams(RadixKey([1, 2]))).best_match_node is disabled.root_node
