import numpy as np
import pytest

from engine_cache import (
    CacheStateError,
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    PagedTokenToKVPoolAllocator,
    RadixCache,
    RadixKey,
)
from tests.support.caches.checks import check_cache


def insert(cache, tokens, rows=None, **params):
    return cache.insert(InsertParams(RadixKey(tokens), None if rows is None else np.asarray(rows), **params))[:2]


def match(cache, tokens, extra_key=None):
    return cache.match_prefix(MatchPrefixParams(RadixKey(tokens, extra_key)))


@pytest.fixture
def cache():
    cache = RadixCache(page_size=2)
    yield cache
    check_cache(cache)


def test_a_new_cache_matches_nothing(cache):
    result = match(cache, [1, 2, 3])
    assert result.device_indices.tolist() == []
    assert result.last_device_node is result.last_host_node is result.best_match_node is cache.root_node
    assert result.host_hit_length == 0


def test_what_was_inserted_is_matched_with_its_rows(cache):
    assert insert(cache, [1, 2, 3, 4], [10, 11, 12, 13]) == (0, 4)
    assert match(cache, [1, 2, 3, 4, 5]).device_indices.tolist() == [10, 11, 12, 13]


def test_only_whole_pages_are_kept(cache):
    assert insert(cache, [1, 2, 3], [10, 11, 12]) == (0, 2)
    assert match(cache, [1, 2, 3]).device_indices.tolist() == [10, 11]
    assert insert(cache, [1], [5]) == (0, 0)
    assert cache.evictable_size() == 2


def test_the_first_rows_stay_when_a_prompt_comes_again(cache):
    insert(cache, [1, 2, 3, 4], [10, 11, 12, 13])
    assert insert(cache, [1, 2, 3, 4, 5, 6], [20, 21, 22, 23, 24, 25]) == (4, 6)
    assert match(cache, [1, 2, 3, 4, 5, 6]).device_indices.tolist() == [10, 11, 12, 13, 24, 25]


def test_a_match_that_ends_inside_a_node_splits_it_between_pages(cache):
    insert(cache, [1, 2, 3, 4, 5, 6], range(10, 16))
    (old,) = cache.root_node.children.values()
    result = match(cache, [1, 2, 3, 4, 5, 9])
    assert result.device_indices.tolist() == [10, 11, 12, 13]
    assert old.parent is result.last_device_node
    assert (list(old.key), old.value.tolist()) == ([5, 6], [14, 15])


def test_a_split_copies_lock_hits_and_priority(cache):
    insert(cache, [1, 2, 3, 4], priority=7)
    (old,) = cache.root_node.children.values()
    cache.inc_lock_ref(old)
    upper = match(cache, [1, 2]).last_device_node
    assert (upper.lock_ref, upper.hit_count, upper.priority) == (1, old.hit_count, 7)
    assert cache.protected_size() == 4
    cache.dec_lock_ref(old)
    assert upper.lock_ref == 0


def test_priority_rises_along_the_path_and_never_falls(cache):
    insert(cache, [1, 2], priority=3)
    insert(cache, [1, 2, 3, 4], priority=5)
    insert(cache, [1, 2], priority=1)
    node = match(cache, [1, 2]).last_device_node
    assert node.priority == 5


def test_hits_count_inserts_unless_chunked(cache):
    insert(cache, [1, 2], chunked=True)
    node = match(cache, [1, 2]).last_device_node
    assert node.hit_count == 0
    insert(cache, [1, 2])
    insert(cache, [1, 2], chunked=True)
    assert node.hit_count == 1


def test_namespaces_share_nothing(cache):
    cache.insert(InsertParams(RadixKey([1, 2], "a"), np.array([10, 11])))
    assert match(cache, [1, 2]).device_indices.tolist() == []
    assert match(cache, [1, 2], "b").device_indices.tolist() == []
    assert match(cache, [1, 2], "a").device_indices.tolist() == [10, 11]


def test_insert_copies_the_rows(cache):
    rows = np.array([10, 11])
    insert(cache, [1, 2], rows)
    rows[:] = 0
    result = match(cache, [1, 2]).device_indices
    result[:] = 0
    assert match(cache, [1, 2]).device_indices.tolist() == [10, 11]


def test_fewer_rows_than_units_are_refused(cache):
    with pytest.raises(ValueError, match=r"value: got '3 rows'.*4 units"):
        insert(cache, [1, 2, 3, 4], [1, 2, 3])


def test_a_bigram_key_does_not_fit_a_plain_cache(cache):
    with pytest.raises(ValueError, match="is_bigram"):
        cache.match_prefix(MatchPrefixParams(RadixKey([1, 2, 3], is_bigram=True)))


def test_an_eagle_cache_counts_pairs():
    cache = RadixCache(page_size=2, is_eagle=True)
    assert insert(cache, [1, 2, 3, 4, 5], [10, 11, 12, 13, 14]) == (0, 4)
    assert match(cache, [1, 2, 3, 9, 9]).device_indices.tolist() == [10, 11]
    assert match(cache, [1, 2]).device_indices.tolist() == []
    check_cache(cache)


def test_eviction_takes_leaves_first_and_then_their_parents(cache):
    insert(cache, [1, 2, 3, 4])
    insert(cache, [1, 2, 5, 6])
    assert cache.evict(EvictParams(1)).num_tokens_evicted == 2
    assert match(cache, [1, 2, 5, 6]).device_indices.tolist() == [1, 2, 5, 6]
    assert cache.evict(EvictParams(100)).num_tokens_evicted == 4
    assert cache.root_node.children == {}
    assert cache.evict(EvictParams(1)).num_tokens_evicted == 0


def test_eviction_takes_whole_nodes(cache):
    insert(cache, range(8))
    assert cache.evict(EvictParams(3)).num_tokens_evicted == 8


def test_evicting_nothing_evicts_nothing(cache):
    insert(cache, [1, 2])
    assert cache.evict(EvictParams(0)).num_tokens_evicted == 0
    assert cache.evictable_size() == 2


def test_locked_prefixes_are_not_evicted(cache):
    insert(cache, [1, 2, 3, 4])
    insert(cache, [1, 2, 5, 6])
    node = match(cache, [1, 2, 3, 4]).last_device_node
    lock = cache.inc_lock_ref(node)
    assert (lock.delta, lock.node) == (-4, node)
    assert (cache.evictable_size(), cache.protected_size()) == (2, 4)
    assert cache.evict(EvictParams(100)).num_tokens_evicted == 2
    assert match(cache, [1, 2, 3, 4]).device_indices.tolist() == [1, 2, 3, 4]
    assert cache.dec_lock_ref(node) == (4,)
    assert cache.evict(EvictParams(100)).num_tokens_evicted == 4


def test_locks_count(cache):
    insert(cache, [1, 2])
    node = match(cache, [1, 2]).last_device_node
    cache.inc_lock_ref(node)
    assert cache.inc_lock_ref(node).delta == 0
    assert cache.dec_lock_ref(node) == (0,)
    assert cache.dec_lock_ref(node) == (2,)


def test_unlocking_what_is_not_locked_raises_and_changes_nothing(cache):
    insert(cache, [1, 2])
    node = match(cache, [1, 2]).last_device_node
    with pytest.raises(CacheStateError, match="lock_ref 0"):
        cache.dec_lock_ref(node)
    assert node.lock_ref == 0


def test_the_root_is_locked_and_unlocked_for_free(cache):
    assert cache.inc_lock_ref(cache.root_node).delta == 0
    assert cache.dec_lock_ref(cache.root_node) == (0,)


def test_nodes_of_another_tree_or_of_none_are_refused(cache):
    insert(cache, [1, 2])
    node = match(cache, [1, 2]).last_device_node
    other = RadixCache(page_size=2)
    for method in (other.inc_lock_ref, other.dec_lock_ref):
        with pytest.raises(CacheStateError, match="is not below"):
            method(node)
    cache.evict(EvictParams(2))
    with pytest.raises(CacheStateError, match="is not below"):
        cache.inc_lock_ref(node)


def test_reset_forgets_everything(cache):
    insert(cache, [1, 2, 3, 4])
    cache.inc_lock_ref(match(cache, [1, 2]).last_device_node)
    cache.reset()
    assert (cache.evictable_size(), cache.protected_size()) == (0, 0)
    assert match(cache, [1, 2]).device_indices.tolist() == []


def test_a_disabled_cache_keeps_nothing_and_locks_nothing():
    cache = RadixCache(page_size=2, disable=True)
    assert insert(cache, [1, 2], [5, 6]) == (0, 0)
    result = match(cache, [1, 2])
    assert result.device_indices.tolist() == []
    assert cache.inc_lock_ref(result.last_device_node).delta == 0
    assert cache.dec_lock_ref(result.last_device_node) == (0,)


def test_evicted_rows_return_to_their_pool():
    pool = PagedTokenToKVPoolAllocator(16, 4)
    cache = RadixCache(page_size=4, allocator=pool)
    insert(cache, range(8), pool.alloc(8))
    check_cache(cache, np.empty(0, np.int64))
    cache.evict(EvictParams(8))
    assert pool.available_size() == 16


def test_a_cache_and_its_pool_agree_on_the_page_size():
    with pytest.raises(ValueError, match=r"page_size: got 2.*4"):
        RadixCache(page_size=2, allocator=PagedTokenToKVPoolAllocator(16, 4))


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda c, n: setattr(c.tree, "evictable_size", 3), "evictable size.*3 != 4"),
        (lambda c, n: setattr(c.tree, "protected_size", 2), "protected size.*2 != 0"),
        (lambda c, n: c.evictable_leaves.discard(n), "evictable leaves"),
        (lambda c, n: setattr(n, "value", n.value[:2]), "rows, units: 2 != 4"),
        (lambda c, n: setattr(n, "parent", n), "its parent"),
        (lambda c, n: setattr(n, "key", RadixKey([9, 2, 3, 4])), "dictionary key"),
        (lambda c, n: setattr(n, "lock_ref", -1), "lock_ref -1"),
        (lambda c, n: setattr(n, "hash_value", ["x"]), "hashes, pages: 1 != 2"),
        (lambda c, n: n.value.fill(7), "distinct rows.*1 != 4"),
    ],
)
def test_check_finds_damage_and_states_both_figures(damage, what):
    cache = RadixCache(page_size=2)
    insert(cache, [1, 2, 3, 4])
    (node,) = cache.root_node.children.values()
    damage(cache, node)
    with pytest.raises(CacheStateError, match=what):
        check_cache(cache)


def test_check_finds_a_child_that_is_locked_under_an_unlocked_parent():
    cache = RadixCache(page_size=2)
    insert(cache, [1, 2, 3, 4])
    insert(cache, [1, 2])
    match(cache, [1, 2, 3, 4]).last_device_node.lock_ref = 1
    with pytest.raises(CacheStateError, match="parent"):
        check_cache(cache)


def test_check_finds_pages_without_an_owner():
    pool = PagedTokenToKVPoolAllocator(16, 4)
    cache = RadixCache(page_size=4, allocator=pool)
    rows = pool.alloc(8)
    check_cache(cache, rows)
    with pytest.raises(CacheStateError, match=r"free 2 \+ tree 0 \+ requests 0, pages of the pool: 2 != 4"):
        check_cache(cache, rows[:0])
    pool.free(rows)
    with pytest.raises(CacheStateError, match="distinct pages"):
        check_cache(cache, rows)
