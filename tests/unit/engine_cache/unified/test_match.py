"""The end of a match in a unified tree, on any tier and on the device."""

from typing import Any

import pytest

from engine_cache.components.component import num_accepted
from engine_cache.presets import UnifiedRadixCache
from engine_cache.tree.node import iter_nodes
from tests.support.caches.unified_rig import UnifiedRig

pytestmark = pytest.mark.torch

A, AB, ABC = [1, 1], [1, 1, 2, 2], [1, 1, 2, 2, 3, 3]


def num_nodes(rig):
    return len(list(iter_nodes(rig.cache.root_node)))


def evict_state(rig, tokens):
    """Evict the state of an inner node from the device."""
    node = rig.node_of(tokens)
    assert node.children
    rig.cache.auxiliaries[-1].free_on_device(node)
    return node


@pytest.fixture
def mamba():
    """A chain of three nodes with a state each, on both tiers."""
    rig = UnifiedRig(("mamba",))
    for tokens in (A, AB, ABC):
        rig.insert(tokens)
    rig.settle()
    return rig


@pytest.fixture
def swa():
    """The same with SWA rows; window 3, so that a match needs those of two pages."""
    rig = UnifiedRig(("swa",))
    for tokens in (A, AB, ABC):
        rig.insert(tokens)
    rig.settle()
    return rig


@pytest.mark.parametrize("length", range(8))
def test_without_a_host_tier_all_three_nodes_are_one(length):
    rig = UnifiedRig(("mamba",), tiers=1)
    rig.insert(AB)
    rig.insert([*ABC, 4, 4])
    match = rig.match([*ABC, 4, 4][:length])
    assert match.best_match_node is match.last_device_node is match.last_host_node
    assert (match.host_hit_length, match.mamba_host_hit_length) == (0, 0)
    assert len(match.device_indices) == {8: 8}.get(length, 4 if length >= 4 else 0)


def test_a_state_on_the_host_only_makes_the_best_match_deeper_than_the_device_match(mamba):
    node = evict_state(mamba, AB)
    match = mamba.match(AB)
    assert match.best_match_node is match.last_host_node is node
    assert match.last_device_node is mamba.node_of(A)
    assert match.device_indices.tolist() == mamba.node_of(A).value.tolist()
    assert (match.host_hit_length, match.mamba_host_hit_length) == (2, 1)


def test_a_device_match_goes_beyond_a_node_without_a_state(mamba):
    evict_state(mamba, AB)
    match = mamba.match(ABC)
    assert match.best_match_node is match.last_device_node is mamba.node_of(ABC)
    assert len(match.device_indices) == 6
    assert (match.host_hit_length, match.mamba_host_hit_length) == (0, 0)


def test_swa_rows_on_the_host_only_make_the_best_match_deeper_than_the_device_match(swa):
    evict_state(swa, AB)
    match = swa.match(ABC)
    assert match.best_match_node is swa.node_of(ABC)
    assert match.last_device_node is swa.node_of(A)
    assert (match.host_hit_length, match.swa_host_hit_length) == (4, 2)


def test_a_prefix_shorter_than_the_window_needs_its_rows_from_the_root_on(swa):
    evict_state(swa, A)
    assert swa.match(A).last_device_node is swa.cache.root_node
    assert swa.match(AB).last_device_node is swa.cache.root_node
    assert swa.match(ABC).last_device_node is swa.node_of(ABC)


def test_kv_on_the_host_counts_for_the_best_match_alone():
    rig = UnifiedRig()
    rig.insert(AB)
    rig.insert(ABC)
    rig.settle()
    rig.cache.host.evict_leaf(rig.node_of(ABC))
    match = rig.match(ABC)
    assert (len(match.device_indices), match.host_hit_length) == (4, 2)
    assert (match.last_device_node, match.best_match_node) == (rig.node_of(AB), rig.node_of(ABC))


@pytest.mark.parametrize("kinds", [("mamba", "swa"), ("swa", "mamba")])
def test_a_gap_of_one_kind_does_not_change_what_another_counts(kinds):
    """The SWA window continues after a node at which Mamba does not allow a match to end."""
    rig = UnifiedRig(kinds)
    rig.insert(ABC)
    rig.match(A)
    rig.match(AB)  # two nodes above that have SWA rows, but no state
    assert rig.match(ABC).last_device_node is rig.node_of(ABC)
    assert rig.match(AB).best_match_node is rig.cache.root_node


def test_every_validator_sees_every_node():
    seen = list[Any]()
    nodes: Any = ["a", "b", "c"]
    accepted = num_accepted(nodes, [lambda node: node != "c", lambda node: seen.append(node) or node != "a"])  # type: ignore[comparison-overlap, func-returns-value]
    assert (accepted, seen) == (2, nodes)


def test_a_dead_node_stops_the_walk():
    rig = UnifiedRig()
    rig.insert(AB)
    rig.insert(ABC)
    rig.settle()
    rig.node_of(AB).value = rig.node_of(AB).host_value = None
    match = rig.match(ABC)
    assert match.best_match_node is rig.cache.root_node
    rig.insert([9, 9])
    assert len(rig.match([9, 9]).device_indices) == 2


def test_a_partial_match_splits_at_a_page_and_there_is_no_matcher_that_does_not():
    rig = UnifiedRig(page_size=2)
    rig.insert(ABC)
    before = num_nodes(rig)
    match = rig.match([1, 1, 2, 9])
    assert num_nodes(rig) == before + 1
    assert len(match.device_indices) == 2
    assert not [name for name in dir(UnifiedRadixCache) if "readonly" in name.lower()]


@pytest.mark.parametrize(("tiers", "expected"), [(1, 4), (2, None)])
def test_the_branching_length_is_reported_without_a_host_tier_only(tiers, expected):
    rig = UnifiedRig(("mamba",), tiers=tiers)
    rig.insert(A)
    rig.insert([*ABC, 4, 4])
    assert rig.match(AB).mamba_branching_seqlen == expected
    assert rig.match(A).mamba_branching_seqlen is None


def test_a_match_refreshes_states_on_the_way_and_swa_rows_of_the_window_only(swa, mamba):
    for rig, path in ((mamba, [A, AB, ABC]), (swa, [AB, ABC])):
        rig.insert([7, 7])
        rig.match(ABC)
        newest = [node.id for node in rig.cache.auxiliaries[0].device_lru_list][-len(path) - 1 :]
        expected = [rig.node_of(tokens).id for tokens in path]
        assert newest[-len(path) :] == (expected if rig is mamba else [rig.node_of(t).id for t in (AB, ABC)])
    on_list = [node.id for node in swa.cache.auxiliaries[0].device_lru_list]
    assert on_list.index(swa.node_of([7, 7]).id) < on_list.index(swa.node_of(AB).id)


def test_matches_leave_no_trace_of_data_they_do_not_return(mamba):
    evict_state(mamba, AB)
    for tokens in (A, AB, ABC, [1, 1, 9, 9]):
        match = mamba.match(tokens)
        on_path = [row for node in reversed(list(mamba.up(match.last_device_node))) for row in node.value]
        assert match.device_indices.tolist() == on_path
    mamba.check()
