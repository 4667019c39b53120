import numpy as np
import pytest

from engine_cache import InsertParams, MambaRadixCache, MambaSlotAllocator, RadixKey
from tests.support.caches.checks import check_cache
from tests.support.caches.mamba_rig import NOTHING, Rig


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
    rig.cache.dec_lock_ref(lower)


def test_a_match_uses_the_way_to_the_state_and_beyond_it_only_what_it_splits(rig):
    rig.insert([1, 2])
    rig.insert([1, 2, 3, 4])
    rig.insert([5])
    rig.match([1, 2, 3])
    order = [rig.node(tokens) for tokens in ([5], [1, 2, 3], [1, 2, 3, 4], [1, 2])]
    times = [node.last_access_time for node in order]
    assert times == sorted(times)
    assert list(rig.cache.states.device_lru_list) == [order[0], *order[2:]]


@pytest.mark.parametrize("option", [{"page_size": 2}, {"page_size": 1, "is_eagle": True}])
def test_pages_and_pairs_need_the_extra_buffer(option):
    slots = MambaSlotAllocator(1)
    with pytest.raises(ValueError, match="enable_mamba_extra_buffer"):
        MambaRadixCache(**option, mamba_allocator=slots)
    check_cache(MambaRadixCache(**option, mamba_allocator=slots, enable_mamba_extra_buffer=True))


def test_a_chunk_has_a_token():
    with pytest.raises(ValueError, match="mamba_cache_chunk_size: got 0"):
        MambaRadixCache(page_size=1, mamba_allocator=MambaSlotAllocator(1), mamba_cache_chunk_size=0)
