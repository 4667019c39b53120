"""The parts of a split node that count as used and are evicted last, as in the reference, in all five caches."""

import pytest

from engine_cache import (
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
    RadixCache,
    RadixKey,
    Request,
)
from engine_cache.tree.node import TreeNode, iter_nodes
from tests.support.caches.hybrid_rig import HybridRig
from tests.support.caches.mamba_rig import Rig as MambaRig
from tests.support.caches.tier_rig import Rig as TierRig
from tests.support.caches.unified_rig import UnifiedRig

pytestmark = pytest.mark.torch


class RadixRig:
    """A RadixCache without pools."""

    def __init__(self):
        self.cache = RadixCache(page_size=1)

    def insert(self, tokens):
        self.cache.insert(InsertParams(RadixKey(tokens)))

    def match(self, tokens):
        self.cache.match_prefix(MatchPrefixParams(RadixKey(tokens)))


RIGS = {
    "radix": RadixRig,
    "hiradix": lambda: TierRig(page_size=1),
    "mamba": MambaRig,
    "himamba": lambda: HybridRig(page_size=1),
    "unified": lambda: UnifiedRig(("swa", "mamba"), page_size=1, tiers=1, device_pages=32, swa_pages=32),
}
WITH_STATES = ("mamba", "himamba", "unified")


@pytest.fixture(params=RIGS)
def rig(request):
    return RIGS[request.param]()


@pytest.fixture(params=WITH_STATES)
def stateful(request):
    return RIGS[request.param]()


def fill(rig, *prompts):
    for tokens in prompts:
        rig.insert(tokens)
    if hasattr(rig, "settle"):
        rig.settle()  # a backup locks its node on the device


def prefixes_of(cache, wanted):
    """Return the tokens up to the end of each selected node."""
    raw_of: dict[TreeNode, tuple[int, ...]] = {cache.root_node: ()}
    found = set()
    for node in iter_nodes(cache.root_node):
        raw_of[node] = raw_of[node.parent] + tuple(node.key.token_ids)
        if wanted(node):
            found.add(raw_of[node])
    return found


def on_device(rig):
    return prefixes_of(rig.cache, lambda node: node.value is not None)


def states(rig):
    if isinstance(rig, UnifiedRig):
        return prefixes_of(rig.cache, lambda node: rig.data(node, "mamba").value is not None)
    return prefixes_of(rig.cache, lambda node: node.mamba_value is not None)


def test_a_match_that_splits_a_node_uses_its_lower_part_too(rig):
    fill(rig, [1, 2], [9])
    rig.match([1])
    rig.cache.evict(EvictParams(1))
    assert on_device(rig) == {(1,), (1, 2)}


def test_an_insert_that_splits_a_node_uses_its_lower_part_too(rig):
    fill(rig, [1, 2], [9], [1, 3])
    rig.cache.evict(EvictParams(1))
    assert on_device(rig) == {(1,), (1, 2), (1, 3)}


def test_the_lower_part_of_a_split_is_older_than_the_new_leaf_beside_it(rig):
    fill(rig, [1, 2], [9], [1, 3])
    rig.cache.evict(EvictParams(2))
    assert on_device(rig) == {(1,), (1, 3)}


def test_an_insert_that_splits_a_node_uses_the_state_below(stateful):
    fill(stateful, [1, 2], [9], [1, 3])
    stateful.cache.evict_mamba(1)
    assert states(stateful) == {(1, 2), (1, 3)}


def test_a_match_that_splits_a_node_uses_the_state_below(stateful):
    fill(stateful, [1, 2], [9])
    stateful.match([1])
    stateful.cache.evict_mamba(1)
    assert states(stateful) == {(1, 2)}


def test_after_an_insert_the_state_below_a_split_is_newer_than_those_on_the_way(stateful):
    fill(stateful, [1], [1, 2, 3], [1, 2, 4])
    stateful.cache.evict_mamba(1)
    assert states(stateful) == {(1, 2, 3), (1, 2, 4)}


def test_after_a_match_the_state_below_a_split_is_older_than_those_on_the_way(stateful):
    fill(stateful, [1], [1, 2, 3])
    stateful.match([1, 2])
    stateful.cache.evict_mamba(1)
    assert states(stateful) == {(1,)}


def windows(rig):
    return prefixes_of(rig.cache, lambda node: rig.data(node, "swa").value is not None)


def test_the_window_that_an_insert_uses_ends_with_its_new_leaf():
    rig = UnifiedRig(("swa",), page_size=1, tiers=1, window=3, device_pages=32, swa_pages=32)
    fill(rig, [0, 1, 2, 3, 4, 5, 6, 7])
    rig.match([0, 1, 2, 3, 4, 5, 6, 7])
    fill(rig, [0, 1, 2, 3, 4, 50, 51, 52, 53])
    rig.events()
    assert rig.cache.evict(EvictParams(0, swa_num_tokens=1)) == (0, 0, 5)
    assert rig.events() == []
    old, new = (0, 1, 2, 3, 4, 5, 6, 7), (0, 1, 2, 3, 4, 50)
    assert windows(rig) == {old, new, (*new, 51, 52, 53)}
    rig.check()


def test_an_insert_uses_what_its_new_leaf_lacks_of_a_window_of_the_nodes_above():
    rig = UnifiedRig(("swa",), page_size=1, tiers=1, window=3, device_pages=32, swa_pages=32)
    fill(rig, [0], [0, 1], [9], [0, 1, 2])
    rig.cache.evict(EvictParams(0, swa_num_tokens=1))
    assert windows(rig) == {(0,), (0, 1), (0, 1, 2)}
    rig.check()


def test_what_a_cascade_lays_bare_on_the_device_waits_for_the_next_call():
    rig = HybridRig(page_size=1)
    rig.host.alloc(rig.host.size)  # so that nothing is backed up, and eviction deletes
    rig.insert([1])
    rig.insert([1, 2, 3])
    rig.match([1, 2])
    rig.insert([9])
    assert rig.cache.evict(EvictParams(3)).num_tokens_evicted == 3
    assert on_device(rig) == {(1,)}
    assert rig.cache.evict(EvictParams(1)).num_tokens_evicted == 1
    assert on_device(rig) == set()


def test_what_a_cascade_lays_bare_on_the_host_waits_for_the_next_call():
    rig = HybridRig(page_size=1)
    fill(rig, [1], [1, 2, 3])
    rig.match([1, 2])
    fill(rig, [9])
    rig.cache.evict(EvictParams(4))
    assert rig.cache.evict_host(3) == 3
    assert prefixes_of(rig.cache, lambda node: True) == {(1,)}
    assert rig.cache.evict_host(1) == 1
    rig.check()


def test_what_a_cascade_lays_bare_is_evicted_by_the_same_call_without_a_host_tier():
    rig = MambaRig()
    fill(rig, [1], [1, 2, 3])
    rig.match([1, 2])
    fill(rig, [9])
    rig.cache.evict(EvictParams(3))
    assert on_device(rig) == {(9,)}


@pytest.mark.parametrize("make", [lambda: HybridRig(page_size=1), lambda: UnifiedRig(("mamba",), page_size=1)])
def test_a_load_back_does_not_use_the_states_on_the_way(make):
    rig = make()
    fill(rig, [1], [1, 2])
    rig.cache.evict(EvictParams(1))
    match = rig.match([1, 2])
    fill(rig, [9])
    lock = rig.cache.inc_lock_ref(match.last_device_node)
    req = Request("r", [], 0, last_node=match.last_device_node)
    rig.cache.init_load_back(InitLoadBackParams(match.best_match_node, match.host_hit_length, req=req))
    rig.cache.release(lock)
    rig.settle()
    rig.cache.evict_mamba(1)
    assert states(rig) == {(1, 2), (9,)}
