"""The cost of an insert when the host is full: each node tries to find room at most once."""

import pytest

from engine_cache import InsertParams, RadixKey
from tests.support.caches.checks import check_cache
from tests.support.caches.unified_rig import UnifiedRig

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("depth", [1, 30, 60])
def test_an_insert_along_a_path_that_found_no_room_looks_for_it_once(depth):
    rig = UnifiedRig(page_size=1, device_pages=2 * depth, host_pages=2 * depth + 1)
    taken = rig.host.alloc(rig.host.size)
    keys = [RadixKey(list(range(length + 1))) for length in range(depth)]
    for key in keys:
        rig.cache.insert(InsertParams(key, rig.alloc(len(key)), chunked=True))
    asked, evict = [], rig.cache.host.leaves.evict
    rig.cache.host.leaves.evict = lambda num: asked.append(num) or evict(num)  # type: ignore[assignment, func-returns-value, method-assign]
    rig.cache.insert(InsertParams(keys[-1], rig.alloc(depth)))
    assert asked == [1]
    rig.host.free(taken)
    check_cache(rig.cache)


def test_with_room_again_the_whole_path_is_backed_up():
    rig = UnifiedRig(page_size=1, device_pages=8, host_pages=10)
    taken = rig.host.alloc(rig.host.size)
    for length in (1, 2, 3):
        rig.insert(list(range(length)))
    rig.host.free(taken)
    rig.insert([0, 1, 2])
    rig.settle()
    assert [place.node.host_value is not None for place in rig.walk()] == [True] * 3
    rig.check()
