import numpy as np
import pytest

from engine_cache import EvictParams, InsertParams, MatchPrefixParams, RadixCache, RadixKey
from engine_cache.tree.eviction import EVICTION_POLICIES, find_policy
from tests.support.caches.checks import check_cache


def evicted_order(policy):
    """Return the order in which four one-page leaves are evicted. Leaves are identified by their token.

    Inserted 1, 2, 3, 4 with priorities 4, 1, 3, 2; then 1 is inserted twice more, 2 once more, and 3 is matched.
    """
    cache = RadixCache(page_size=1, eviction_policy=policy)
    for token, priority in ((1, 4), (2, 1), (3, 3), (4, 2)):
        cache.insert(InsertParams(RadixKey([token]), np.array([token]), priority=priority))
    for token in (1, 1, 2):
        cache.insert(InsertParams(RadixKey([token]), np.array([token])))
    cache.match_prefix(MatchPrefixParams(RadixKey([3])))
    order = list[int]()
    while cache.evictable_size():
        before = {int(node.value[0]) for node in cache.root_node.children.values()}
        assert cache.evict(EvictParams(1)).num_tokens_evicted == 1
        after = {int(node.value[0]) for node in cache.root_node.children.values()}
        order += before - after
        check_cache(cache)
    return order


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("lru", [4, 1, 2, 3]),
        ("lfu", [4, 3, 2, 1]),
        ("fifo", [1, 2, 3, 4]),
        ("mru", [3, 2, 1, 4]),
        ("filo", [4, 3, 2, 1]),
        ("priority", [2, 4, 3, 1]),
        ("slru", [4, 3, 1, 2]),
    ],
)
def test_each_policy_has_its_order(policy, expected):
    assert evicted_order(policy) == expected


def test_every_policy_is_covered_above():
    assert set(EVICTION_POLICIES) == {"lru", "lfu", "fifo", "mru", "filo", "priority", "slru"}


def test_an_unknown_policy_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'random'.*lru, lfu, fifo, mru, filo, priority, slru"):
        find_policy("random")
