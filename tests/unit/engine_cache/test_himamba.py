import numpy as np
import pytest
from hybrid_rig import HybridRig
from tier_rig import MemoryStorage
from waiting import wait_until

from engine_cache import (
    BytelessHostPool,
    CacheStateError,
    EvictParams,
    HiCacheController,
    HiMambaRadixCache,
    InitLoadBackParams,
    InsertParams,
    KVCacheEventMixin,
    Lane,
    MambaSlotAllocator,
    ManualCopyEngine,
    MatchPrefixParams,
    PagedTokenToKVPoolAllocator,
    PoolEntry,
    RadixKey,
    Request,
    StoragePolicy,
    ThreadCopyEngine,
    TransferError,
    events,
)
from engine_cache.storage.base import PoolName
from engine_cache.storage.directory import DirectoryStorage
from engine_cache.storage.object_names import PageLayout, StorageIdentity
from kv_events.errors import InvalidValueError
from kv_events.schema import StorageMedium

pytestmark = pytest.mark.torch
GPU, CPU = StorageMedium.GPU, StorageMedium.CPU
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


def stored(medium, *pages):
    return [("BlockStored", medium, list(page)) for page in pages]


def removed(medium, count=1):
    return count * [("BlockRemoved", medium, None)]


def node_of(rig, tokens):
    """The node that ends where `tokens` end."""
    ((node, _),) = [(node, raw) for node, _, raw in rig.walk() if raw[-1] == tuple(tokens)]
    return node


def two_turns(rig):
    """[1, 2] and [1, 2, 3, 4] with a state each; the inner node and the leaf."""
    rig.insert([1, 2])
    rig.insert([1, 2, 3, 4])
    rig.settle()
    rig.cache.take_events()
    return node_of(rig, [1, 2]), node_of(rig, [1, 2, 3, 4])


def tombstone_and_leaf(rig):
    """[1, 2] without a state above [3, 4] with one."""
    rig.insert([1, 2, 3, 4])
    rig.match([1, 2])
    rig.settle()
    rig.cache.take_events()
    return node_of(rig, [1, 2]), node_of(rig, [1, 2, 3, 4])


def demoted(rig, tokens):
    rig.insert(tokens)
    rig.settle()
    rig.cache.evict(EvictParams(100))
    rig.cache.take_events()


@pytest.fixture
def rig():
    rig = HybridRig()
    assert rig.events() == [("AllBlocksCleared", None, None)]
    yield rig
    rig.check()


@pytest.fixture
def full_host(rig):
    """A rig whose host has no page left."""
    rig.host.alloc(rig.host.size)
    yield rig
    rig.host.clear()


def test_events_come_from_the_mixin_that_all_caches_share():
    assert HiMambaRadixCache.take_events is KVCacheEventMixin.take_events


# --- backups ---


def test_pages_are_told_on_the_device_at_once_and_on_the_host_when_acknowledged(rig):
    rig.insert([1, 2, 3, 4])
    assert rig.events() == stored(GPU, [1, 2], [3, 4])
    rig.cache.writing_check()
    rig.engine.step(Lane.WRITE)
    assert rig.events() == []
    rig.cache.writing_check()
    assert rig.events() == stored(CPU, [1, 2], [3, 4])
    rig.cache.writing_check()
    assert rig.events() == []


def test_a_state_is_copied_along_with_its_kv(rig):
    rig.insert([1, 2])
    node = node_of(rig, [1, 2])
    assert len(node.mamba_host_value) == 1
    assert rig.engine.num_queued(Lane.WRITE) == 1
    rig.settle()  # and the fixture compares the bytes


def test_kv_and_state_are_kept_on_both_tiers_while_they_are_copied(rig):
    rig.insert([1, 2])
    node = node_of(rig, [1, 2])
    assert rig.cache.evict(EvictParams(2, mamba_num=1)) == (0, 0)
    assert rig.cache.evict_mamba_host(1) == 0
    rig.settle()
    assert node.host_mamba_ref_counter == 0
    assert rig.cache.evict_mamba_host(1) == 1


def test_all_parts_of_a_node_that_was_split_while_pending_are_told_and_archived_parents_first(rig):
    store = MemoryStorage()
    rig.cache.attach_storage_backend(store, StoragePolicy())
    rig.insert([1, 2, 3, 4, 5, 6])
    rig.match([1, 2])
    rig.cache.take_events()
    rig.engine.step(Lane.WRITE)
    rig.cache.writing_check()
    assert rig.events() == stored(CPU, [1, 2], [3, 4], [5, 6])
    rig.settle()
    assert [name for name, _ in store.pages] == [PoolName.KV, PoolName.MAMBA, PoolName.KV, PoolName.KV]


def test_without_room_for_the_state_nothing_is_taken_and_nothing_said(rig):
    held = rig.host_states.alloc(rig.host_states.size)
    rig.insert([1, 2])
    node = node_of(rig, [1, 2])
    assert (node.host_value, node.mamba_host_value, node.lock_ref) == (None, None, 0)
    assert rig.host.available_size() == rig.host.size
    rig.settle()
    assert rig.events() == stored(GPU, [1, 2])
    rig.host_states.free(held)
    assert rig.cache.write_backup(node) == 2


def test_a_backup_without_room_for_kv_takes_no_slot(full_host):
    full_host.insert([1, 2])
    assert full_host.host_states.available_size() == full_host.host_states.size
    assert full_host.events() == stored(GPU, [1, 2])


def test_a_backup_takes_the_slot_of_the_least_recent_state():
    rig = HybridRig(slots=3, host_slots=4)
    for token in (1, 2, 3, 4):
        demoted(rig, [token, token])
    rig.match([1, 1])
    rig.insert([5, 5])
    assert rig.events() == stored(GPU, [5, 5]) + removed(CPU)
    assert rig.match([2, 2]).host_hit_length == 0
    assert rig.match([1, 1]).host_hit_length == 2
    rig.settle()
    rig.check()


@pytest.mark.parametrize("pool", ["host", "host_states"])
def test_a_copy_that_fails_says_nothing_frees_all_it_took_and_heals(rig, pool):
    rig.insert([1, 2, 3, 4])
    rig.match([1, 2])
    getattr(rig, pool).write_faults = 2
    rig.settle()
    assert rig.events() == stored(GPU, [1, 2], [3, 4])
    assert rig.cache.num_failed_backups == 1
    assert rig.host.available_size() == rig.host.size
    assert rig.host_states.available_size() == rig.host_states.size
    rig.insert([1, 2, 3, 4])
    rig.settle()
    assert rig.events() == stored(CPU, [1, 2], [3, 4])


def test_states_below_a_failed_copy_are_dropped_once_they_are_written(rig):
    rig.insert([1, 2])
    rig.insert([1, 2, 3, 4])
    rig.host.write_faults = 2
    rig.engine.step(Lane.WRITE)
    rig.cache.writing_check()
    below = node_of(rig, [1, 2, 3, 4])
    assert (below.host_value, below.mamba_host_value, below.host_mamba_ref_counter) == (None, None, 0)
    assert rig.host_states.available_size() == rig.host_states.size - 1
    rig.settle()
    assert rig.host_states.available_size() == rig.host_states.size


# --- evictions ---


def test_a_backed_up_node_leaves_the_device_with_its_state_and_stays_on_the_host(rig):
    rig.insert([1, 2, 3, 4])
    rig.settle()
    rig.cache.take_events()
    assert rig.cache.evict(EvictParams(4)) == (4, 1)
    assert rig.events() == removed(GPU, 2)
    match = rig.match([1, 2, 3, 4])
    assert (len(match.device_indices), match.host_hit_length, match.mamba_host_hit_length) == (0, 4, 1)
    assert match.last_host_node is match.best_match_node is node_of(rig, [1, 2, 3, 4])


def test_a_node_whose_state_has_no_host_copy_is_no_end_of_a_match_once_it_is_evicted(rig):
    two_turns(rig)
    rig.cache.evict_mamba_host(2)
    rig.cache.evict(EvictParams(2))
    match = rig.match([1, 2, 3, 4])
    assert (len(match.device_indices), match.host_hit_length) == (2, 0)
    assert match.mamba_branching_seqlen == 4


def test_a_node_that_was_never_backed_up_is_deleted_with_its_tombstones_children_first(full_host):
    full_host.insert([1, 2, 3, 4])
    full_host.match([1, 2])
    full_host.cache.take_events()
    assert full_host.cache.evict(EvictParams(1)) == (4, 1)
    assert full_host.events() == removed(GPU, 2)
    assert list(full_host.walk()) == []


def test_host_eviction_deletes_the_node_with_its_state(rig):
    demoted(rig, [1, 2])
    assert rig.cache.evict_host(1) == 2
    assert rig.events() == removed(CPU)
    assert rig.host_states.available_size() == rig.host_states.size
    assert rig.match([1, 2]).host_hit_length == 0


def test_a_tombstone_that_lost_its_last_child_goes_from_both_tiers(rig):
    tombstone_and_leaf(rig)
    rig.cache.evict(EvictParams(2))
    assert rig.events() == removed(GPU)
    assert rig.cache.evict_host(1) == 4
    assert rig.events() == removed(CPU) + removed(GPU) + removed(CPU)
    assert list(rig.walk()) == []


@pytest.mark.parametrize("hold", ["lock_ref", "host_ref_counter"])
def test_a_tombstone_that_somebody_needs_stays(rig, hold):
    upper, _ = tombstone_and_leaf(rig)
    rig.cache.evict(EvictParams(2))
    if hold == "lock_ref":
        rig.cache.inc_lock_ref(upper)
    else:
        upper.host_ref_counter += 1
    assert rig.cache.evict_host(1) == 2
    assert rig.events() == removed(GPU) + removed(CPU)
    assert [node for node, _, _ in rig.walk()] == [upper]
    if hold == "lock_ref":
        rig.cache.dec_lock_ref(upper)
    else:
        upper.host_ref_counter -= 1


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_cascade_ends_at_a_state_on_either_tier(rig, tier):
    upper, _ = two_turns(rig)
    rig.cache.evict(EvictParams(2))
    rig.cache.evict_mamba(1) if tier == "host" else rig.cache.evict_mamba_host(1)
    rig.cache.take_events()
    rig.cache.evict_host(1)
    assert [node for node, _, _ in rig.walk()] == [upper]


def test_losing_the_state_of_an_inner_node_is_silent_on_either_tier(rig):
    upper, _ = two_turns(rig)
    assert rig.cache.evict(EvictParams(0, mamba_num=1)) == (0, 1)
    assert rig.cache.evict_mamba_host(1) == 1
    assert rig.events() == []
    assert (upper.mamba_value, upper.mamba_host_value) == (None, None)
    match = rig.match([1, 2, 3, 4])
    assert (len(match.device_indices), rig.match([1, 2]).host_hit_length) == (4, 0)


def test_losing_the_state_of_a_leaf_demotes_it(rig):
    two_turns(rig)
    assert rig.cache.evict(EvictParams(0, mamba_num=2)) == (2, 2)
    assert rig.events() == removed(GPU)
    assert node_of(rig, [1, 2, 3, 4]).mamba_host_value is not None


def test_a_node_whose_children_are_on_the_host_only_is_a_leaf_of_the_device(rig):
    upper, _ = two_turns(rig)
    rig.cache.evict(EvictParams(2))
    rig.cache.take_events()
    assert rig.cache.evict(EvictParams(0, mamba_num=1)) == (2, 1)
    assert rig.events() == removed(GPU)
    assert upper.mamba_host_value is not None


def test_a_host_state_of_a_node_on_the_host_only_goes_with_all_it_has(rig):
    two_turns(rig)
    rig.cache.evict(EvictParams(4))
    rig.cache.take_events()
    assert rig.cache.evict_mamba_host(2) == 2
    assert rig.events() == removed(CPU, 2)  # the leaf, and above it what was a tombstone by then
    assert list(rig.walk()) == []


def test_states_on_the_host_go_in_the_order_of_their_use(rig):
    for token in (1, 2, 3):
        demoted(rig, [token, token])
    rig.match([1, 1])
    rig.cache.evict_mamba_host(1)
    assert [rig.match([token, token]).host_hit_length for token in (1, 2, 3)] == [2, 0, 2]


def test_write_back_tells_of_the_host_before_it_leaves_the_device():
    rig = HybridRig(write_policy="write_back")
    rig.insert([1, 2])
    rig.insert([1, 2, 3, 4])
    rig.cache.take_events()
    assert rig.cache.evict(EvictParams(4)) == (4, 2)
    assert rig.events() == stored(CPU, [3, 4]) + stored(CPU, [1, 2]) + removed(GPU, 2)
    rig.check()
    assert rig.match([1, 2, 3, 4]).host_hit_length == 4


def test_write_back_of_a_leaf_for_its_state_keeps_the_leaf_if_its_copy_fails():
    rig = HybridRig(write_policy="write_back")
    rig.insert([1, 2])
    rig.cache.take_events()
    rig.host_states.write_faults = 2
    assert rig.cache.evict(EvictParams(0, mamba_num=1)) == (0, 0)
    assert rig.events() == []
    assert rig.cache.evict(EvictParams(0, mamba_num=1)) == (2, 1)
    assert rig.events() == stored(CPU, [1, 2]) + removed(GPU)
    rig.check()


def test_room_for_a_write_back_does_not_take_the_tombstone_that_is_written():
    rig = HybridRig(write_policy="write_back", device_pages=4, host_pages=5)
    upper, _ = tombstone_and_leaf(rig)
    rig.cache.evict(EvictParams(2))
    held = rig.host.alloc(rig.host.available_size())
    assert rig.cache.evict(EvictParams(2)) == (2, 0)
    assert rig.events() == stored(CPU, [3, 4]) + removed(GPU) + removed(CPU) + stored(CPU, [1, 2]) + removed(GPU)
    assert [node for node, _, _ in rig.walk()] == [upper]
    rig.host.free(held)
    rig.check()


# --- load backs ---


def test_a_load_back_tells_of_the_device_top_down_and_keeps_the_host(rig):
    two_turns(rig)
    rig.cache.evict(EvictParams(4))
    rig.cache.take_events()
    rows, node = rig.load_back([1, 2, 3, 4])
    assert rig.events() == stored(GPU, [1, 2], [3, 4])
    assert (len(rows), node) == (4, node_of(rig, [1, 2, 3, 4]))
    rig.settle()
    assert rig.events() == []
    assert node.mamba_value is not None
    assert node_of(rig, [1, 2]).mamba_value is None


def test_a_load_that_only_restores_the_state_is_silent(rig):
    upper, _ = two_turns(rig)
    rig.cache.evict(EvictParams(0, mamba_num=1))
    match = rig.match([1, 2])
    assert (len(match.device_indices), match.host_hit_length, match.mamba_host_hit_length) == (2, 0, 1)
    rows, node = rig.load_back([1, 2])
    assert (len(rows), node) == (0, upper)
    rig.settle()
    assert rig.events() == []
    assert rig.match([1, 2]).mamba_host_hit_length == 0


def test_a_request_gets_a_copy_of_the_state_that_is_loaded(rig):
    demoted(rig, [1, 2])
    rig.load_back([1, 2], with_request=True)
    (req,) = rig.loaded
    assert rig.slots.available_size() == rig.slots.size - 2
    rig.settle()
    rig.check()  # compares the request's state, too
    rig.end_request()
    assert req.mamba_cow_src_index is None


def test_a_request_keeps_the_slot_it_has_for_the_state_that_is_loaded(rig):
    demoted(rig, [1, 2])
    slot = rig.slots.alloc(1)
    req = Request("r", [], 0, mamba_pool_idx=slot)
    match = rig.match([1, 2])
    rig.cache.init_load_back(InitLoadBackParams(match.best_match_node, match.host_hit_length, req=req))
    assert req.mamba_pool_idx is slot
    assert rig.slots.available_size() == rig.slots.size - 2
    rig.slots.free(slot)


def test_neither_threshold_nor_quota_hold_a_state_back():
    rig = HybridRig(load_back_threshold=100)
    demoted(rig, [1, 2])
    rows, _ = rig.load_back([1, 2], mem_quota=0)
    assert len(rows) == 2


def test_kv_without_a_state_is_held_to_threshold_and_quota(rig):
    tombstone_and_leaf(rig)
    rig.cache.evict(EvictParams(4))
    node = node_of(rig, [1, 2])
    assert rig.cache.load_back(node, mem_quota=1) is None
    rig.cache.load_back_threshold = 3
    assert rig.cache.load_back(node) is None
    rig.cache.load_back_threshold = 2
    assert len(rig.cache.load_back(node, mem_quota=2)) == 2


def test_a_load_without_room_changes_nothing_and_ends_at_the_deepest_state_on_the_device(rig):
    upper, lower = two_turns(rig)
    rig.cache.evict(EvictParams(2))
    rig.cache.inc_lock_ref(upper)
    held = rig.slots.alloc(rig.slots.available_size())
    rig.cache.take_events()
    free = rig.pool.available_size()
    assert rig.load_back([1, 2, 3, 4])[1] is upper
    assert rig.events() == []
    assert rig.pool.available_size() == free
    assert (lower.host_ref_counter, lower.host_mamba_ref_counter) == (0, 0)
    rig.cache.dec_lock_ref(upper)
    rig.slots.free(held)


def test_a_load_makes_room_for_kv_and_state():
    rig = HybridRig(device_pages=2, slots=1, host_slots=3)
    demoted(rig, [1, 2, 3, 4])
    rig.insert([5, 6, 7, 8])
    rig.settle()
    rig.cache.take_events()
    rig.load_back([1, 2, 3, 4])
    assert rig.events() == removed(GPU, 2) + stored(GPU, [1, 2], [3, 4])
    rig.settle()
    rig.check()


def test_a_load_is_a_use(rig):
    demoted(rig, [1, 2])
    rig.insert([3, 4])
    rig.settle()
    rig.cache.load_back(node_of(rig, [1, 2]))
    rig.settle()
    assert rig.cache.evict(EvictParams(0, mamba_num=1)) == (2, 1)
    assert rig.match([3, 4]).host_hit_length == 2
    rig.check()


def test_the_host_state_stays_while_it_is_loaded(rig):
    demoted(rig, [1, 2])
    rig.load_back([1, 2])
    assert rig.cache.evict_mamba_host(1) == 0
    rig.settle()
    assert rig.cache.evict_mamba_host(1) == 1


def test_a_load_that_fails_is_an_error_until_the_cache_is_reset(rig):
    demoted(rig, [1, 2])
    rig.load_back([1, 2])
    rig.host.load_faults = 2
    with pytest.raises(TransferError, match="injected load fault"):
        rig.settle()
    rig.cache.reset()
    rig.pool.clear()
    rig.slots.clear()
    assert rig.insert([1, 2]) is not None


# --- insert and match ---


def test_a_prompt_that_is_computed_again_is_told_again_and_its_pages_and_state_are_taken(rig):
    demoted(rig, [1, 2, 3, 4])
    free = rig.pool.available_size()
    result = rig.insert([1, 2, 3, 4])
    assert (result.prefix_len, result.total_len, result.mamba_exist) == (0, 4, False)
    assert rig.events() == stored(GPU, [1, 2], [3, 4])
    assert rig.pool.available_size() == free - 4


def test_what_is_on_the_device_counts_and_its_duplicates_are_freed(rig):
    two_turns(rig)
    rig.cache.evict(EvictParams(2))
    free = rig.pool.available_size()
    result = rig.insert([1, 2, 3, 4, 5, 6])
    assert (result.prefix_len, result.total_len) == (2, 6)
    assert rig.pool.available_size() == free - 4


@pytest.mark.parametrize("is_evicted", [False, True])
def test_a_split_is_silent_and_leaves_the_states_below(rig, is_evicted):
    rig.insert(PROMPT)
    rig.settle()
    if is_evicted:
        rig.cache.evict(EvictParams(8))
    before = [page.block_hash for page in rig.cache.iter_resident(CPU)]
    rig.cache.take_events()
    rig.match([1, 2, 3, 4])
    assert rig.events() == []
    assert [page.block_hash for page in rig.cache.iter_resident(CPU)] == before
    upper, lower = node_of(rig, [1, 2, 3, 4]), node_of(rig, PROMPT)
    assert [len(node.hash_value) for node in (upper, lower)] == [2, 2]
    assert (upper.mamba_value, upper.mamba_host_value) == (None, None)
    assert lower.mamba_host_value is not None


def test_a_node_on_no_tier_ends_a_match(rig):
    upper, _ = two_turns(rig)
    rig.cache.evict(EvictParams(4))
    kept, upper.host_value = upper.host_value, None
    assert rig.match([1, 2, 3, 4]).best_match_node is rig.cache.root_node
    upper.host_value = kept


def test_the_anchor_on_the_host_is_above_what_was_not_backed_up():
    rig = HybridRig(write_policy="write_through_selective")
    rig.insert([1, 2])
    rig.insert([1, 2, 3, 4])
    match = rig.match([1, 2, 3, 4])
    assert match.last_device_node is node_of(rig, [1, 2, 3, 4])
    assert match.last_host_node is node_of(rig, [1, 2])
    assert match.mamba_host_hit_length == 0


def test_locking_what_is_not_on_the_device_locks_the_way_to_it(rig):
    upper, lower = two_turns(rig)
    rig.cache.evict(EvictParams(2))
    rig.cache.inc_lock_ref(lower)
    assert (upper.lock_ref, lower.lock_ref) == (1, 0)
    assert rig.cache.evict(EvictParams(2)) == (0, 0)
    rig.cache.dec_lock_ref(lower)
    assert upper.lock_ref == 0
    rig.cache.evict_host(2)
    with pytest.raises(CacheStateError, match="does not hang below a node on the device"):
        rig.cache.inc_lock_ref(lower)


@pytest.mark.parametrize("is_eagle", [False, True])
@pytest.mark.parametrize("page_size", [1, 2])
def test_requests_of_a_hybrid_model_run_through_both_tiers(is_eagle, page_size):
    rig = HybridRig(is_eagle=is_eagle, page_size=page_size, device_pages=12, host_pages=20)
    tokens = [*PROMPT, 9]
    first, whole = (len(rig.prefixes(turn)) * page_size for turn in (tokens[:5], tokens))
    assert rig.serve(tokens[:5]) == 0
    rig.settle()
    assert rig.serve(tokens) == first
    rig.settle()
    assert rig.cache.evict(EvictParams(100)) == (whole, 2)
    assert rig.serve(tokens) == whole
    rig.settle()
    rig.check()


def test_events_off_cost_no_hash(monkeypatch):
    calls = []
    monkeypatch.setattr(events, "compute_node_hash_values", lambda *args: calls.append(args))
    rig = HybridRig(enable_kv_cache_events=False)
    two_turns(rig)
    rig.cache.evict(EvictParams(4))
    rig.load_back([1, 2, 3, 4])
    rig.settle()
    assert calls == []
    assert rig.cache.take_events() == []
    assert all(node.hash_value is None for node, _, _ in rig.walk())


def test_after_a_reset_nothing_that_began_before_is_told(rig):
    rig.insert([1, 2])
    rig.cache.take_events()
    rig.cache.reset()
    rig.pool.clear()
    rig.slots.clear()
    rig.settle()
    assert rig.events() == [("AllBlocksCleared", None, None)]
    assert rig.host_states.available_size() == rig.host_states.size


def test_copies_on_threads_end_as_those_by_hand_do():
    rig = HybridRig(engine=ThreadCopyEngine())
    rig.insert([1, 2, 3, 4])
    rig.settle()
    rig.cache.evict(EvictParams(4))
    rig.load_back([1, 2, 3, 4])
    rig.settle()
    rig.check()
    rig.engine.close()


# --- storage ---


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


def test_fetched_pages_are_told_before_any_request_uses_them_and_are_gone_on_from(store, rig):
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
    other = attach(HybridRig(), store)
    prefetch(other)
    other.settle()
    assert other.cache.ongoing_prefetch == {}
    other.cache.prefetch_from_storage("r", other.cache.root_node, PROMPT, extra_key="tenant")
    assert finish(other) == 8
    assert other.match(PROMPT, "tenant").mamba_host_hit_length == 1


def test_what_one_cache_archives_in_a_folder_another_goes_on_from(tmp_path):
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
        wait_until(lambda n=n: reader.cache.check_prefetch_progress(str(n)))
    for prompt in prompts:
        assert len(reader.load_back(prompt)[0]) == 6
    reader.settle()
    assert reader.held(GPU) == reader.held(CPU) == writer.held(CPU)
    assert reader.state_ends() == writer.state_ends()
    for rig in (writer, reader):
        rig.check()
        rig.engine.close()


# --- configuration ---


def cache_of(**changes):
    pool, slots = PagedTokenToKVPoolAllocator(8, 2), MambaSlotAllocator(2)
    entries = {
        "kv": PoolEntry(PoolName.KV, BytelessHostPool(12, 2), None, pool),
        "sidecars": [PoolEntry(PoolName.MAMBA, BytelessHostPool(4, 1), None, slots)],
    }
    options = {"page_size": 2, "allocator": pool, "mamba_allocator": slots, "enable_mamba_extra_buffer": True}
    entries |= {name: changes.pop(name) for name in ("sidecars",) if name in changes}
    return HiMambaRadixCache(controller=HiCacheController(engine=ManualCopyEngine(), **entries), **options | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"page_size": 0}, "page_size.*0"),
        ({"write_policy": "later"}, "write_policy.*later"),
        ({"load_back_threshold": -1}, "load_back_threshold.*-1"),
        ({"mamba_allocator": MambaSlotAllocator(2)}, "mamba_allocator"),
        ({"sidecars": []}, "pool.*mamba.*one of kv"),
        ({"enable_mamba_extra_buffer": False}, "page_size.*2"),
    ],
)
def test_a_bad_configuration_is_refused_with_its_numbers(changes, words):
    with pytest.raises(InvalidValueError, match=words):
        cache_of(**changes)


def test_states_have_pages_of_one_row():
    slots = MambaSlotAllocator(2)
    sidecars = [PoolEntry(PoolName.MAMBA, BytelessHostPool(4, 2), None, slots)]
    with pytest.raises(InvalidValueError, match=r"page size of the host pool of states.*2"):
        cache_of(sidecars=sidecars, mamba_allocator=slots)


def test_a_disabled_cache_keeps_nothing():
    cache = cache_of(disable=True)
    key = RadixKey([1, 2])
    assert cache.insert(InsertParams(key, np.array([2, 3]), mamba_value=np.array([1]))).mamba_exist
    assert len(cache.match_prefix(MatchPrefixParams(key)).device_indices) == 0
