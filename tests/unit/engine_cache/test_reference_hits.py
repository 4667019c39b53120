"""Hit counts of the two parts of a split node, which determine their backups, as in the reference."""

import pytest

from tests.support.caches.hybrid_rig import HybridRig
from tests.support.caches.unified_rig import UnifiedRig

pytestmark = pytest.mark.torch


def host_prefixes(rig):
    return {tuple(prefixes[-1]) for node, _, prefixes in rig.walk() if node.host_value is not None}


@pytest.fixture
def selective():
    return HybridRig(page_size=1, write_policy="write_through_selective")


def test_the_upper_part_of_a_split_begins_without_hits(selective):
    selective.insert([1, 2])
    selective.insert([1, 3])
    selective.settle()
    assert host_prefixes(selective) == set()
    selective.insert([1, 4])
    selective.settle()
    assert host_prefixes(selective) == {(1,)}
    selective.check()


def test_a_match_that_splits_a_node_gives_the_upper_part_no_hits(selective):
    selective.insert([1, 2])
    selective.match([1])
    selective.insert([1, 2])
    selective.settle()
    assert host_prefixes(selective) == set()
    selective.check()


def test_of_a_leaf_cut_at_the_window_only_the_lower_part_has_the_hit():
    params = {"page_size": 1, "window": 2, "swa_pages": 8, "swa_host_pages": 10}
    rig = UnifiedRig(("swa",), write_policy="write_through_selective", **params)
    rig.insert([1, 2, 3, 4])
    rig.insert([1, 2])
    rig.settle()
    assert host_prefixes(rig) == set()
    rig.insert([1, 2, 3, 4])
    rig.settle()
    assert host_prefixes(rig) == {(1, 2), (1, 2, 3, 4)}
    rig.check()
