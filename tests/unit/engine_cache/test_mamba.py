import numpy as np
import pytest

from engine_cache import (
    CacheStateError,
    EvictParams,
    InsertParams,
    KVCacheEventMixin,
    MambaRadixCache,
    MambaSlotAllocator,
    MatchPrefixParams,
    PagedTokenToKVPoolAllocator,
    PoolExhaustedError,
    RadixCache,
    RadixKey,
    ReqToTokenPool,
    Request,
    events,
)
from kv_events.schema import AllBlocksCleared, BlockRemoved, BlockStored, StorageMedium

NOTHING = np.empty(0, np.int64)
# page names of tokens 1..4 and then 5..12, page size 4, as first computed elsewhere
V1 = -3488128144981237669
V2 = [5674439469042975057, -1307369107475853156]


class Rig:
    """A cache with its pools; page size 1 unless said."""

    def __init__(self, page_size=1, slots=8, **options):
        self.pool = PagedTokenToKVPoolAllocator(64 * page_size, page_size)
        self.slots = MambaSlotAllocator(slots)
        self.lines = ReqToTokenPool(4, 128)
        self.cache = MambaRadixCache(
            page_size=page_size,
            mamba_allocator=self.slots,
            allocator=self.pool,
            req_to_token_pool=self.lines,
            enable_mamba_extra_buffer=page_size > 1,
            mamba_cache_chunk_size=2,
            **options,
        )

    def insert(self, tokens, **params):
        """Fresh rows and a fresh slot; the slot is freed again if the tree does not want it."""
        slot = self.slots.alloc(1)
        rows = self.pool.alloc(len(tokens))
        result = self.cache.insert(InsertParams(RadixKey(tokens), rows, mamba_value=slot, **params))
        if result.mamba_exist:
            self.slots.free(slot)
        return result

    def match(self, tokens, **params):
        return self.cache.match_prefix(MatchPrefixParams(RadixKey(tokens), **params))

    def node(self, tokens):
        """The node that ends where `tokens` end, with a state or without."""
        node = self.cache.root_node
        while tokens:
            node = node.children[RadixKey(tokens).page_key(self.cache.page_size)]
            tokens = tokens[len(node.key) :]
        return node

    def lock(self, tokens):
        node = self.match(tokens).last_device_node
        self.cache.inc_lock_ref(node)
        return node


@pytest.fixture
def rig():
    rig = Rig(enable_kv_cache_events=True)
    rig.cache.take_events()
    yield rig
    rig.cache.check(NOTHING, NOTHING)


def tokens_of(recorded):
    return [(type(event), event.token_ids) if isinstance(event, BlockStored) else type(event) for event in recorded]


# --- match and insert -------------------------------------------------------------------------------------------------


def test_a_match_ends_at_the_deepest_node_with_a_state(rig):
    rig.insert([1, 2])
    rig.insert([1, 2, 3, 4])
    result = rig.match([1, 2, 3, 4, 5])
    assert len(result.device_indices) == 4
    assert result.last_device_node is result.last_host_node is result.best_match_node is rig.node([1, 2, 3, 4])
    assert len(rig.match([1, 2, 3]).device_indices) == 2


def test_a_prompt_that_leaves_a_node_in_its_middle_starts_over(rig):
    rig.insert([1, 2, 3, 4])
    result = rig.match([1, 2, 3, 9])
    assert result.device_indices.tolist() == []
    assert result.last_device_node is rig.cache.root_node
    assert rig.node([1, 2, 3]).mamba_value is None
    assert rig.node([1, 2, 3, 4]).mamba_value is not None


@pytest.mark.parametrize(
    ("tokens", "length"),
    [([1, 2], None), ([1, 2, 7], None), ([1, 2, 3, 4, 9], 4), ([1, 2, 3, 4, 5, 9], 4), ([8], None)],
)
def test_the_branching_length_is_the_kv_beyond_the_state_in_whole_chunks(rig, tokens, length):
    rig.insert([1, 2])
    rig.insert([1, 2, 3, 4, 5, 6])
    assert rig.match(tokens).mamba_branching_seqlen == length


def test_a_branch_shorter_than_a_chunk_has_no_branching_length(rig):
    rig.insert([1, 2, 3, 4])
    assert rig.match([1, 9]).mamba_branching_seqlen is None


def test_a_state_at_a_tombstone_revives_it_silently(rig):
    rig.insert([1, 2, 3, 4])
    rig.match([1, 2])
    rig.cache.take_events()
    assert rig.insert([1, 2]) == (2, 2, False)
    assert len(rig.match([1, 2, 9]).device_indices) == 2
    assert rig.cache.take_events() == []


def test_a_second_state_for_the_same_end_is_not_taken(rig):
    assert rig.insert([1, 2]) == (0, 2, False)
    (held,) = rig.node([1, 2]).mamba_value
    assert rig.insert([1, 2]) == (2, 2, True)
    assert rig.node([1, 2]).mamba_value.tolist() == [held]
    assert rig.slots.available_size() == 7


def test_the_tree_frees_the_duplicates_behind_what_was_its_own(rig):
    rig.insert([1, 2, 3, 4])
    own = rig.match([1, 2, 3, 4]).device_indices[:2]
    value, slot = np.concatenate((own, rig.pool.alloc(4))), rig.slots.alloc(1)
    key = RadixKey([1, 2, 3, 4, 5, 6])
    assert rig.cache.insert(InsertParams(key, value, mamba_value=slot, prev_prefix_len=2)) == (4, 6, False)
    assert rig.pool.available_size() == 64 - 6


def test_a_key_without_a_unit_takes_nothing(rig):
    assert rig.cache.insert(InsertParams(RadixKey([]), NOTHING)) == (0, 0, True)


def test_a_key_that_is_not_whole_pages_with_a_row_each_is_refused():
    cache = Rig(page_size=4).cache
    slot = np.array([1])
    for units, rows in ((6, 6), (8, 7), (8, 9), (4, 5)):
        with pytest.raises(ValueError, match=rf"value: got '{rows} rows'"):
            cache.insert(InsertParams(RadixKey(range(units)), np.arange(4, 4 + rows), mamba_value=slot))
    with pytest.raises(ValueError, match="value: got '0 rows'"):
        cache.insert(InsertParams(RadixKey(range(4)), mamba_value=slot))
    assert cache.root_node.children == {}


@pytest.mark.parametrize("mamba_value", [None, np.array([1, 2])])
def test_an_insert_needs_one_state(rig, mamba_value):
    with pytest.raises(ValueError, match="mamba_value"):
        rig.cache.insert(InsertParams(RadixKey([1]), np.array([5]), mamba_value=mamba_value))


def test_a_split_leaves_state_and_state_lock_below_and_copies_the_kv_lock(rig):
    rig.insert([1, 2, 3, 4])
    lower = rig.lock([1, 2, 3, 4])
    rig.match([1, 2])
    upper = lower.parent
    assert (upper.mamba_value, upper.mamba_lock_ref, upper.lock_ref) == (None, 0, 1)
    assert (len(lower.mamba_value), lower.mamba_lock_ref, lower.lock_ref) == (1, 1, 1)
    assert list(rig.cache.full_lru_list) == [upper, lower]
    rig.cache.dec_lock_ref(lower)


def test_a_match_uses_the_way_to_the_state_and_nothing_beyond(rig):
    rig.insert([1, 2])
    rig.insert([1, 2, 3, 4])
    rig.insert([5])
    rig.match([1, 2, 3])
    order = [rig.node(tokens) for tokens in ([1, 2, 3], [1, 2, 3, 4], [5], [1, 2])]
    assert list(rig.cache.full_lru_list) == order
    assert list(rig.cache.mamba_lru_list) == order[1:]


@pytest.mark.parametrize("option", [{"page_size": 2}, {"page_size": 1, "is_eagle": True}])
def test_pages_and_pairs_need_the_extra_buffer(option):
    slots = MambaSlotAllocator(1)
    with pytest.raises(ValueError, match="enable_mamba_extra_buffer"):
        MambaRadixCache(**option, mamba_allocator=slots)
    MambaRadixCache(**option, mamba_allocator=slots, enable_mamba_extra_buffer=True).check()


def test_a_chunk_has_a_token():
    with pytest.raises(ValueError, match="mamba_cache_chunk_size: got 0"):
        MambaRadixCache(page_size=1, mamba_allocator=MambaSlotAllocator(1), mamba_cache_chunk_size=0)


# --- copy on write ----------------------------------------------------------------------------------------------------


def test_a_request_gets_a_slot_of_its_own_and_the_state_to_copy(rig):
    rig.insert([1, 2])
    req = Request("r", [], 0)
    rig.match([1, 2, 3], cow_mamba=True, req=req)
    assert req.mamba_cow_src_index.tolist() == rig.node([1, 2]).mamba_value.tolist()
    assert req.mamba_pool_idx.tolist() != req.mamba_cow_src_index.tolist()
    rig.cache.check(NOTHING, req.mamba_pool_idx)
    rig.slots.free(req.mamba_pool_idx)


def test_a_request_keeps_the_slot_it_has(rig):
    rig.insert([1, 2])
    req = Request("r", [], 0, mamba_pool_idx=rig.slots.alloc(1))
    had = req.mamba_pool_idx
    rig.match([1, 2], cow_mamba=True, req=req)
    assert req.mamba_pool_idx is had
    rig.slots.free(had)


def test_without_a_state_there_is_nothing_to_copy(rig):
    req = Request("r", [], 0, mamba_cow_src_index=np.array([3]))
    rig.match([1, 2], cow_mamba=True, req=req)
    assert (req.mamba_pool_idx, req.mamba_cow_src_index) == (None, None)


def test_a_full_pool_gives_up_another_state_but_not_the_one_to_copy():
    rig = Rig(slots=2)
    rig.insert([1, 2])
    rig.insert([5])
    req = Request("r", [], 0)
    rig.match([5], cow_mamba=True, req=req)
    assert len(rig.match([5]).device_indices) == 1
    assert rig.match([1, 2]).device_indices.tolist() == []
    rig.cache.check(NOTHING, req.mamba_pool_idx)


def test_a_request_that_no_slot_is_left_for_is_told_so_and_leaves_no_lock():
    rig = Rig(slots=1)
    rig.insert([1, 2])
    with pytest.raises(PoolExhaustedError, match="request r needs a state slot: 0 of 1 free"):
        rig.match([1, 2], cow_mamba=True, req=Request("r", [], 0))
    assert (rig.cache.protected_size(), rig.cache.mamba_protected_size()) == (0, 0)
    assert issubclass(PoolExhaustedError, RuntimeError)
    rig.cache.check(NOTHING, NOTHING)


def test_copying_a_state_needs_a_request(rig):
    with pytest.raises(ValueError, match="req: got None"):
        rig.match([1], cow_mamba=True)


# --- eviction ---------------------------------------------------------------------------------------------------------


def test_losing_the_state_of_an_inner_node_is_silent_and_leaves_its_kv(rig):
    rig.insert([1, 2])
    rig.insert([1, 2, 3, 4])
    rig.cache.take_events()
    assert rig.cache.evict(EvictParams(0, mamba_num=1)) == (0, 1)
    assert rig.slots.available_size() == 7
    assert rig.cache.take_events() == []
    assert rig.match([1, 2]).device_indices.tolist() == []
    assert len(rig.match([1, 2, 3, 4]).device_indices) == 4


def test_losing_the_state_of_a_leaf_removes_its_kv(rig):
    rig.insert([1, 2])
    rig.cache.take_events()
    assert rig.cache.evict_mamba(1) == (2, 1)
    assert tokens_of(rig.cache.take_events()) == [BlockRemoved, BlockRemoved]
    assert (rig.slots.available_size(), rig.pool.available_size()) == (8, 64)


def test_tombstones_above_an_evicted_leaf_go_with_it_children_first(rig):
    rig.insert([1])
    rig.insert([1, 2])
    rig.insert([1, 2, 3])
    names = [event.block_hashes for event in rig.cache.take_events()]
    rig.cache.evict_mamba(2)
    assert rig.cache.evict_full(1) == (3, 1)
    assert [event.block_hashes for event in rig.cache.take_events()] == names[::-1]


def test_the_cascade_stops_at_a_state(rig):
    rig.insert([1])
    rig.insert([1, 2, 3])
    rig.match([1, 2])
    assert rig.cache.evict_full(1) == (2, 1)
    assert len(rig.match([1, 2, 3]).device_indices) == 1


def test_the_cascade_stops_at_a_node_with_other_children(rig):
    rig.insert([1, 2])
    rig.insert([1, 3])
    assert rig.cache.evict_full(1) == (1, 1)
    assert len(rig.match([1, 3]).device_indices) == 2


def test_the_oldest_leaf_goes_first_and_then_its_parent_if_that_is_older_still(rig):
    rig.insert([1])
    rig.insert([1, 2])
    rig.insert([5])
    assert rig.cache.evict_full(2) == (2, 2)
    assert len(rig.match([5]).device_indices) == 1


def test_a_parent_that_was_used_later_than_another_leaf_stays_longer(rig):
    rig.insert([1])
    rig.insert([1, 2])
    rig.insert([5])
    rig.match([1])
    assert rig.cache.evict_full(2) == (2, 2)
    assert len(rig.match([1]).device_indices) == 1


def test_states_go_in_the_order_of_their_own_use(rig):
    for tokens in ([1], [1, 2], [5], [5, 6]):
        rig.insert(tokens)
    rig.match([1])
    rig.cache.evict_mamba(2)
    assert [len(rig.match(tokens).device_indices) for tokens in ([1], [1, 2], [5], [5, 6])] == [1, 1, 0, 2]


def test_kv_goes_before_states_and_each_only_if_asked(rig):
    for token in range(4):
        rig.insert([token])
    assert rig.cache.evict(EvictParams(0)) == (0, 0)
    assert rig.cache.evict(EvictParams(1)) == (1, 1)
    assert rig.cache.evict(EvictParams(1, mamba_num=1)) == (2, 2)


def test_locks_keep_the_way_and_the_state_but_not_the_states_on_the_way(rig):
    rig.insert([1])
    rig.insert([1, 2])
    node = rig.lock([1, 2])
    assert (rig.cache.protected_size(), rig.cache.mamba_protected_size()) == (2, 1)
    assert rig.cache.evict(EvictParams(9, mamba_num=9)) == (0, 1)
    assert len(rig.match([1, 2]).device_indices) == 2
    assert rig.match([1]).device_indices.tolist() == []
    rig.cache.dec_lock_ref(node)
    assert (rig.cache.mamba_evictable_size(), rig.cache.mamba_protected_size()) == (1, 0)


def test_a_tombstone_that_loses_its_last_child_under_a_lock_goes_when_unlocked(rig):
    rig.insert([1, 2, 3])
    rig.match([1, 2])
    tombstone = rig.node([1, 2])
    rig.cache.inc_lock_ref(tombstone)
    rig.cache.evict_full(1)
    assert rig.cache.protected_size() == 2
    rig.cache.dec_lock_ref(tombstone)
    assert rig.cache.root_node.children == {}
    assert rig.pool.available_size() == 64


def test_a_state_given_to_a_locked_tombstone_is_locked(rig):
    rig.insert([1, 2, 3])
    rig.match([1, 2])
    tombstone = rig.node([1, 2])
    rig.cache.inc_lock_ref(tombstone)
    rig.insert([1, 2])
    assert rig.cache.mamba_protected_size() == 1
    assert rig.cache.evict_mamba(9).mamba_num_evicted == 1
    rig.cache.dec_lock_ref(tombstone)
    assert rig.cache.mamba_evictable_size() == 1


def test_unlocking_a_node_that_only_a_deeper_lock_holds_raises_and_changes_nothing(rig):
    rig.insert([1])
    rig.insert([1, 2])
    node = rig.lock([1, 2])
    with pytest.raises(CacheStateError, match="mamba_lock_ref 0"):
        rig.cache.dec_lock_ref(node.parent)
    assert node.parent.lock_ref == 1
    rig.cache.dec_lock_ref(node)


def test_the_root_is_locked_and_unlocked_for_free(rig):
    assert rig.cache.inc_lock_ref(rig.cache.root_node).delta == 0
    assert rig.cache.dec_lock_ref(rig.cache.root_node).delta == 0


def test_nodes_of_other_trees_are_refused(rig):
    other = Rig()
    other.insert([1])
    foreign = other.lock([1])
    plain = RadixCache(page_size=1)
    plain.insert(InsertParams(RadixKey([1])))
    for method in (rig.cache.inc_lock_ref, rig.cache.dec_lock_ref):
        for node in (foreign, plain.match_prefix(MatchPrefixParams(RadixKey([1]))).last_device_node):
            with pytest.raises(CacheStateError):
                method(node)


# --- events -----------------------------------------------------------------------------------------------------------


def test_events_come_from_the_mixin_that_all_caches_share():
    assert MambaRadixCache.take_events is KVCacheEventMixin.take_events


def test_inserted_pages_are_announced_in_a_chain():
    rig = Rig(page_size=4, enable_kv_cache_events=True)
    rig.insert([1, 2, 3, 4])
    rig.insert([*range(1, 13)])
    cleared, *stored = rig.cache.take_events()
    assert isinstance(cleared, AllBlocksCleared)
    assert [event.block_hashes for event in stored] == [[V1], [V2[0]], [V2[1]]]
    assert [event.parent_block_hash for event in stored] == [None, V1, V2[0]]
    assert {event.medium for event in stored} == {StorageMedium.GPU}


def test_an_eagle_cache_announces_pairs():
    rig = Rig(page_size=2, is_eagle=True, enable_kv_cache_events=True)
    params = InsertParams(RadixKey([1, 2, 3]), rig.pool.alloc(2), mamba_value=rig.slots.alloc(1))
    assert rig.cache.insert(params) == (0, 2, False)
    assert rig.cache.take_events()[1].token_ids == [(1, 2), (2, 3)]


def test_a_split_is_silent_and_keeps_the_names(rig):
    rig.insert([1, 2, 3])
    (stored,) = [[event.block_hashes for event in rig.cache.take_events()]]
    rig.match([1, 2])
    assert rig.cache.take_events() == []
    rig.cache.evict_full(3)
    assert sorted(event.block_hashes for event in rig.cache.take_events()) == sorted(stored)


def test_events_off_cost_no_hash(monkeypatch):
    monkeypatch.setattr(events, "compute_node_hash_values", lambda *_: pytest.fail("a hash was computed"))
    rig = Rig()
    rig.insert([1, 2, 3])
    rig.match([1, 2])
    rig.cache.evict(EvictParams(3))
    assert rig.cache.take_events() == []


# --- requests ---------------------------------------------------------------------------------------------------------


def start(rig, tokens):
    """A request that has computed `tokens` after whatever the cache had."""
    req = Request("r", [], rig.lines.alloc())
    match = rig.match(tokens, cow_mamba=True, req=req)
    rig.cache.inc_lock_ref(match.last_device_node)
    have = len(match.device_indices)
    req.last_node, req.cache_protected_len, req.token_ids = match.last_device_node, have, tokens
    rig.lines.write(req.req_pool_idx, 0, match.device_indices)
    page = rig.cache.page_size
    rig.lines.write(
        req.req_pool_idx, have, rig.pool.alloc(-(-(len(tokens) - have) // page) * page)[: len(tokens) - have]
    )
    if req.mamba_pool_idx is None:
        req.mamba_pool_idx = rig.slots.alloc(1)
    return req


def track(rig, req, length):
    req.mamba_last_track_seqlen, req.mamba_track_idx = length, rig.slots.alloc(1)


def own(rig, req):
    return rig.lines.read(req.req_pool_idx, len(req.token_ids))[req.cache_protected_len :]


def test_a_running_request_shares_a_copy_of_its_state(rig):
    req = start(rig, [1, 2, 3])
    rig.cache.cache_unfinished_req(req)
    assert (req.cache_protected_len, req.last_node) == (3, rig.node([1, 2, 3]))
    assert req.last_node.mamba_value.tolist() != req.mamba_pool_idx.tolist()
    rig.cache.check(own(rig, req), req.mamba_pool_idx)
    rig.cache.cache_finished_req(req)


def test_a_finished_request_gives_its_state_to_the_tree(rig):
    req = start(rig, [1, 2, 3])
    slot = req.mamba_pool_idx
    rig.cache.cache_finished_req(req)
    assert rig.node([1, 2, 3]).mamba_value.tolist() == slot.tolist()
    assert (req.mamba_pool_idx, req.last_node) == (None, None)
    assert rig.cache.protected_size() == 0


def test_a_finished_request_whose_state_is_there_frees_its_own(rig):
    first, second = start(rig, [1, 2, 3]), start(rig, [1, 2, 3])
    rig.cache.cache_finished_req(first)
    rig.cache.cache_finished_req(second)
    assert (rig.slots.available_size(), rig.pool.available_size()) == (7, 61)


def test_a_request_that_is_not_kept_frees_all_it_owns(rig):
    rig.cache.cache_finished_req(start(rig, [1, 2]))
    rig.cache.cache_finished_req(start(rig, [1, 2, 3, 4]), is_insert=False)
    assert (rig.slots.available_size(), rig.pool.available_size()) == (7, 62)


def test_a_request_without_room_for_a_copy_keeps_its_rows_to_itself():
    rig = Rig(slots=1)
    req = start(rig, [1, 2, 3])
    rig.cache.cache_unfinished_req(req)
    assert req.prefix_indices.tolist() == own(rig, req).tolist()
    assert rig.cache.root_node.children == {}
    rig.cache.cache_finished_req(req)
    assert len(rig.match([1, 2, 3]).device_indices) == 3


def test_the_copy_costs_the_least_recent_state_when_slots_are_out():
    rig = Rig(slots=2)
    rig.insert([5])
    rig.cache.cache_unfinished_req(start(rig, [1, 2]))
    assert rig.match([5]).device_indices.tolist() == []


def test_with_the_extra_buffer_what_was_tracked_is_shared_and_the_rest_stays():
    rig = Rig(page_size=4)
    req = start(rig, [*range(10)])
    rig.cache.cache_unfinished_req(req)
    assert req.cache_protected_len == 0
    track(rig, req, 8)
    rig.cache.cache_unfinished_req(req)
    assert (req.cache_protected_len, len(req.prefix_indices), req.mamba_last_track_seqlen) == (8, 10, None)
    rig.cache.check(own(rig, req), np.concatenate((req.mamba_pool_idx, req.mamba_track_idx)))


def test_with_the_extra_buffer_the_tracked_slot_goes_to_the_tree_and_the_running_one_is_freed():
    rig = Rig(page_size=4)
    req = start(rig, [*range(10)])
    track(rig, req, 8)
    slot = req.mamba_track_idx
    rig.cache.cache_finished_req(req)
    assert rig.node([*range(8)]).mamba_value.tolist() == slot.tolist()
    assert (rig.slots.available_size(), rig.pool.available_size()) == (7, 248)
    rig.cache.check(NOTHING, NOTHING)


def test_an_eagle_request_is_shared_once_the_token_behind_its_state_is_known():
    rig = Rig(page_size=4, is_eagle=True)
    req = start(rig, [*range(8)])
    track(rig, req, 8)
    rig.cache.cache_unfinished_req(req)
    assert req.cache_protected_len == 0
    req.token_ids = [*range(9)]
    rig.lines.write(req.req_pool_idx, 8, rig.pool.alloc(4)[:1])
    rig.cache.cache_unfinished_req(req)
    assert (req.cache_protected_len, len(req.prefix_indices)) == (8, 9)
    rig.cache.cache_finished_req(req)
    rig.cache.check(NOTHING, NOTHING)


@pytest.mark.parametrize("length", [6, 12])
def test_a_tracked_length_is_whole_pages_that_were_computed(length):
    rig = Rig(page_size=4)
    req = start(rig, [*range(10)])
    track(rig, req, length)
    with pytest.raises(ValueError, match=f"mamba_last_track_seqlen: got {length}"):
        rig.cache.cache_finished_req(req)


def test_a_request_without_a_slot_for_its_state_is_refused(rig):
    req = Request("r", [1], rig.lines.alloc())
    with pytest.raises(ValueError, match="mamba_pool_idx: got None"):
        rig.cache.cache_finished_req(req)


def test_a_disabled_cache_gives_every_row_and_slot_back():
    rig = Rig(disable=True)
    assert rig.insert([1, 2]) == (0, 0, True)
    rig.pool.clear()
    req = start(rig, [1, 2, 3])
    rig.cache.cache_unfinished_req(req)
    assert len(req.prefix_indices) == 3
    rig.cache.cache_finished_req(req)
    assert (rig.slots.available_size(), rig.pool.available_size()) == (8, 64)


def test_reset_forgets_states_too(rig):
    rig.insert([1, 2])
    rig.lock([1, 2])
    rig.cache.reset()
    rig.pool.clear()
    rig.slots.clear()
    assert (rig.cache.mamba_evictable_size(), rig.cache.mamba_protected_size()) == (0, 0)
    assert rig.match([1, 2]).device_indices.tolist() == []
    assert isinstance(rig.cache.take_events()[-1], AllBlocksCleared)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda c, n: setattr(c, "_mamba_evictable_size", 3), "evictable states.*3 != 1"),
        (lambda c, n: setattr(c, "_mamba_protected_size", 2), "protected states.*2 != 0"),
        (lambda c, n: setattr(n, "mamba_value", None), "a leaf without a state"),
        (lambda c, n: setattr(n, "mamba_lock_ref", 1), "0 <= mamba_lock_ref <= lock_ref"),
        (lambda c, n: c.full_lru_list.remove(n), "full list: nodes listed"),
        (lambda c, n: c.mamba_lru_list.remove(n), "mamba list: nodes listed"),
        (lambda c, n: c.mamba_allocator.free(n.mamba_value), "distinct pages"),
    ],
)
def test_check_finds_damage_and_says_both_figures(damage, what):
    rig = Rig()
    rig.insert([1, 2])
    damage(rig.cache, rig.node([1, 2]))
    with pytest.raises(CacheStateError, match=what):
        rig.cache.check()


def test_check_finds_a_list_out_of_order():
    rig = Rig()
    rig.insert([1])
    rig.insert([2])
    rig.cache.full_lru_list.move_to_newest(rig.node([1]))
    with pytest.raises(CacheStateError, match="times of use"):
        rig.cache.check()


def test_check_finds_slots_that_nobody_owns():
    rig = Rig()
    rig.slots.alloc(1)
    with pytest.raises(CacheStateError, match="free 7"):
        rig.cache.check(NOTHING, NOTHING)
