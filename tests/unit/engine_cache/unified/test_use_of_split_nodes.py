"""Nodes that an insert splits. Both parts count as used by the insert."""

import pytest

from engine_cache import ComponentType
from engine_cache.tree.node import iter_nodes
from tests.support.caches.unified_rig import UnifiedRig

pytestmark = pytest.mark.torch


def uses(rig):
    return [(list(node.key.token_ids), node.priority, node.hit_count) for node in iter_nodes(rig.cache.root_node)]


def rig_of(**params):
    return UnifiedRig(("swa",), page_size=1, window=8, device_pages=20, swa_pages=20, host_pages=30, **params)


def test_a_tombstone_that_is_cut_where_its_swa_rows_begin_again():
    rig = rig_of(tiers=1)
    rig.insert([1, 2, 3, 4])
    rig.cache.component(ComponentType.SWA).free_on_device(rig.node_of([1, 2, 3, 4]))
    rig.insert([1, 2, 3, 4], evicted=2, priority=9)
    assert uses(rig) == [([1, 2], 9, 2), ([3, 4], 9, 2)]
    rig.check()


def test_a_node_that_comes_back_from_the_host_without_the_swa_rows_of_its_beginning():
    rig = rig_of()
    rig.insert([1, 2, 3, 4])
    rig.settle()
    rig.cache.host.evict_leaf(rig.node_of([1, 2, 3, 4]))
    rig.insert([1, 2, 3, 4], evicted=2, priority=9)
    assert uses(rig) == [([1, 2], 9, 2), ([3, 4], 9, 2)]
    rig.check()


@pytest.mark.parametrize("evicted", [0, 2])
def test_a_leaf_that_is_cut_is_backed_up_as_a_whole(evicted):
    rig = UnifiedRig(("swa",), page_size=1, window=2, device_pages=8, swa_pages=8, host_pages=10, swa_host_pages=10)
    rig.insert([1, 2, 3, 4, 5], evicted=evicted, priority=3)
    assert [use[1:] for use in uses(rig)] == [(3, 0)] * (len(uses(rig)) - 1) + [(3, 1)]
    assert len(uses(rig)) > 1
    rig.settle()
    assert all(node.host_value is not None for node in iter_nodes(rig.cache.root_node))
    rig.check()
