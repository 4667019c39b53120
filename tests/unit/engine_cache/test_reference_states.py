"""States and KV on different tiers in a HiMambaRadixCache, as in the reference."""

import pytest

from engine_cache import EvictParams, EvictResult
from tests.support.caches.hybrid_rig import HybridRig
from tests.support.caches.hybrid_steps import node_of

pytestmark = pytest.mark.torch


@pytest.fixture
def rig():
    rig = HybridRig(page_size=1)
    yield rig
    rig.check()


def above_a_host_only_child(rig):
    """Put [1] on both tiers above [2], which is on the host only. Returns the node of [1]."""
    rig.insert([1])
    rig.insert([1, 2])
    rig.settle()
    rig.cache.evict(EvictParams(1))
    rig.events()
    return node_of(rig, [1])


def test_a_state_above_host_only_children_goes_alone_and_silently(rig):
    node = above_a_host_only_child(rig)
    assert rig.cache.evict_mamba(1) == EvictResult(0, 1)
    assert rig.events() == []
    assert (node.value is not None, node.mamba_value) == (True, None)


def test_a_state_without_children_goes_with_its_kv(rig):
    node = above_a_host_only_child(rig)
    rig.cache.evict_host(1)
    rig.events()
    assert rig.cache.evict_mamba(1) == EvictResult(1, 1)
    assert rig.events() == [("BlockRemoved", "GPU", None)]
    assert node.host_value is not None


def test_kv_on_the_host_alone_is_no_branching_point(rig):
    rig.insert([1, 2, 3, 4])
    rig.match([1, 2])
    rig.settle()
    rig.cache.evict(EvictParams(4))
    assert node_of(rig, [1, 2]).host_value is not None
    assert rig.match([1, 2]).mamba_branching_seqlen is None


def test_the_branching_point_is_where_kv_on_the_device_ends(rig):
    rig.insert([1, 2, 3, 4])
    rig.match([1, 2])
    rig.settle()
    rig.cache.evict(EvictParams(1))
    match = rig.match([1, 2, 3])
    assert (match.host_hit_length, match.mamba_branching_seqlen) == (0, 2)
