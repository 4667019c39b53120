"""A namespace that hashes, storage keys or events cannot represent is never added to a tree."""

import pytest

from engine_cache import EvictParams, InsertParams, MatchPrefixParams, PagedTokenToKVPoolAllocator, RadixCache, RadixKey
from kv_events.errors import InvalidValueError
from kv_events.limits import MAX_EXTRA_KEY_BYTES
from tests.models.cache_checks import check_cache


@pytest.mark.parametrize(
    ("extra_key", "expected"),
    [
        ("lora\ud800", "UTF-8"),
        ("x" * (MAX_EXTRA_KEY_BYTES + 1), f"{MAX_EXTRA_KEY_BYTES + 1} bytes"),
        ("ü" * (MAX_EXTRA_KEY_BYTES // 2 + 1), f"{MAX_EXTRA_KEY_BYTES + 2} bytes"),
        (7, "text"),
        (0, "text"),
        (b"a", "text"),
    ],
)
def test_a_namespace_that_cannot_be_named_is_no_key(extra_key, expected):
    with pytest.raises(InvalidValueError, match=f"extra_key.*{expected}"):
        RadixKey([1, 2], extra_key)


@pytest.mark.parametrize("extra_key", ["x" * MAX_EXTRA_KEY_BYTES, "ü" * (MAX_EXTRA_KEY_BYTES // 2), "日本語 🙂"])
def test_the_longest_and_the_oddest_that_can_be_named_are(extra_key):
    assert RadixKey([1, 2], extra_key).extra_key == extra_key


def test_an_empty_extra_key_is_a_namespace_of_its_own():
    cache = RadixCache(page_size=1, enable_kv_cache_events=True)
    cache.take_events()
    cache.insert(InsertParams(RadixKey([1, 2])))
    assert len(cache.match_prefix(MatchPrefixParams(RadixKey([1, 2], ""))).device_indices) == 0
    cache.insert(InsertParams(RadixKey([1, 2], "")))
    assert [event.extra_key for event in cache.take_events()] == [None, None, "", ""]  # type: ignore[union-attr]
    cache.evict(EvictParams(2))
    assert [event.extra_key for event in cache.take_events()] == [None, None]  # type: ignore[union-attr]
    assert len(cache.match_prefix(MatchPrefixParams(RadixKey([1, 2], ""))).device_indices) == 2


def test_pages_that_cannot_be_named_for_events_leave_the_tree_as_it_was():
    seeds = dict[str, int]()
    pool = PagedTokenToKVPoolAllocator(16, 2)
    cache = RadixCache(
        page_size=2, allocator=pool, enable_kv_cache_events=True, seed_of_extra_key=lambda key: seeds[key]
    )
    cache.take_events()
    key, rows = RadixKey([1, 2, 3, 4], "tenant"), pool.alloc(4)
    with pytest.raises(KeyError, match="tenant"):
        cache.insert(InsertParams(key, rows))
    assert (cache.root_node.children, cache.take_events(), cache.evictable_size()) == ({}, [], 0)
    check_cache(cache, rows)
    assert len(cache.match_prefix(MatchPrefixParams(key)).device_indices) == 0
    seeds["tenant"] = 7
    assert cache.insert(InsertParams(key, rows)).prefix_len == 0
    assert len(cache.take_events()) == 2
    assert cache.evict(EvictParams(4)).num_tokens_evicted == 4
    assert len(cache.take_events()) == 2
