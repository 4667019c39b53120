"""Eviction: from which tier data goes, what goes with it, and what is reported."""

import pytest

from engine_cache import EvictParams, EvictResult
from tests.rigs.cache import AB, ABC, CPU, FAILED, GPU, A, refuse, removed, rigs, stored
from tests.rigs.cache_steps import host_evict, in_tree

STATES = ("himamba", "unified+mamba")
ALL = ("hiradix", *STATES, "unified+mamba+swa")
ONE_TIER = {"tiers": 1}


# --- states and windows on the device ---


@rigs("mamba", ("unified+mamba", ONE_TIER), "himamba", "unified+mamba")
def test_losing_the_state_of_a_leaf_removes_its_kv_from_the_device(rig):
    rig.turns(A, AB)
    num_pages = 2 if rig.cls == "mamba" else 1  # the tombstone above goes with it
    assert rig.cache.evict(EvictParams(0, mamba_num=2)) == (2 * num_pages, 2, 0)
    assert rig.events() == removed(GPU, num_pages)
    assert rig.ends("mamba") == set()


@rigs("himamba", page_size=1)
def test_a_leaf_that_a_cascade_makes_on_the_device_is_evicted_by_the_next_call(rig):
    rig.host.alloc(rig.host.size)  # so that nothing is backed up, and eviction deletes
    rig.turns([1], [1, 2, 3])
    rig.match([1, 2])
    rig.insert([9])
    for wanted, evicted, left in ((3, 3, {(1,)}), (1, 1, set())):
        assert rig.cache.evict(EvictParams(wanted)).num_tokens_evicted == evicted
        assert rig.ends() == left
    rig.host.clear()


# --- from the device to the host ---


@rigs(*ALL)
def test_a_backed_up_leaf_leaves_the_device_with_all_its_kinds_and_stays_on_the_host(rig):
    rig.turns(A, AB)
    assert rig.cache.evict(EvictParams(1)) == (2, int("mamba" in rig.kinds), 2 * ("swa" in rig.kinds))
    assert rig.events() == removed(GPU)
    assert [rig.has(AB, kind) for kind in ("full", *rig.kinds)] == [(False, True)] * (1 + len(rig.kinds))
    if rig.cls == "unified":
        assert [list(each.host_lru_list) for each in rig.cache.auxiliaries] == [[rig.node_of(AB)]] * len(rig.kinds)
    match = rig.match(AB)
    assert (match.last_host_node, match.best_match_node) == (rig.node_of(AB),) * 2
    assert match.host_hit_length == 2


@rigs(*STATES)
def test_a_state_above_children_on_the_host_only_goes_alone_or_with_its_kv(rig):
    """With its KV in a unified tree."""
    node, _ = rig.turns(A, AB)
    rig.cache.evict(EvictParams(2))
    rig.cache.take_events()
    goes_along = int(rig.cls == "unified")
    assert rig.cache.evict_mamba(1)[:2] == (2 * goes_along, 1)
    assert (rig.events(), node.value is None) == (removed(GPU, goes_along), bool(goes_along))
    assert rig.has(A, "mamba")[1]


# --- on the host ---


@rigs(*ALL)
def test_host_eviction_deletes_what_is_neither_on_the_device_nor_referenced(rig):
    (node,) = rig.turns(A)
    assert rig.cache.evict_host(2) == 0
    rig.cache.evict(EvictParams(2))
    rig.cache.take_events()
    leaves = rig.cache.host.leaves
    leaves.hold(node)
    assert rig.cache.evict_host(2) == 0
    leaves.release(node)
    assert rig.cache.evict_host(1) == 2
    assert (rig.events(), set(rig.used().values()), list(rig.walk())) == (removed(CPU), {0}, [])


@pytest.mark.parametrize("kind", ["mamba", "swa"])
@rigs("unified+mamba+swa")
def test_a_host_leaf_that_loses_one_kind_goes_as_a_whole(rig, kind):
    rig.demoted(A, AB, ABC)
    order = next(each for each in rig.cache.auxiliaries if each.kind.name.lower() == kind).host_lru_list
    assert len(order) == 3
    for tokens in (A, AB):
        order.move_to_end(rig.node_of(tokens))
    assert host_evict(rig, kind, 1) == (1 if kind == "mamba" else 2)
    assert (rig.events(), in_tree(rig)) == (removed(CPU), {tuple(A), tuple(AB)})


@rigs("himamba")
def test_a_host_state_of_a_node_on_the_host_only_goes_with_all_it_has(rig):
    rig.demoted(A, AB)
    assert rig.cache.evict_mamba_host(2) == 2
    assert rig.events() == removed(CPU, 2)  # the leaf, and its parent, which was a tombstone by then
    assert list(rig.walk()) == []


@rigs(*STATES)
def test_states_on_the_host_go_in_the_order_of_their_use(rig):
    rig.demoted([1, 1], [2, 2], [3, 3])
    rig.match([1, 1])
    host_evict(rig, "mamba", 1)
    assert [rig.match([token, token]).host_hit_length for token in (1, 2, 3)] == [2, 0, 2]


@pytest.fixture
def tombstone(rig):
    """A without a state above B with one, which is on the host only. Returns the node of A."""
    rig.insert(AB)
    rig.match(A)
    rig.settle()
    rig.cache.evict(EvictParams(2))
    rig.cache.take_events()
    return rig.node_of(A)


@rigs("himamba")
def test_a_tombstone_that_lost_its_last_child_goes_from_both_tiers(rig, tombstone):
    assert rig.cache.evict_host(1) == 4
    assert rig.events() == removed(CPU) + removed(GPU) + removed(CPU)
    assert list(rig.walk()) == []


@pytest.mark.parametrize("tier", ["device", "host"])
@rigs("himamba")
def test_a_cascade_ends_at_a_state_on_either_tier(rig, tier):
    rig.turns(A, AB)
    rig.cache.evict(EvictParams(2))
    rig.cache.evict_mamba(1) if tier == "host" else rig.cache.evict_mamba_host(1)
    rig.cache.evict_host(1)
    assert in_tree(rig) == {tuple(A)}


@rigs("himamba", page_size=1)
def test_a_leaf_that_a_cascade_makes_on_the_host_is_evicted_by_the_next_call(rig):
    rig.turns([1], [1, 2, 3])
    rig.match([1, 2])
    rig.turns([9])
    rig.cache.evict(EvictParams(4))
    for wanted, evicted, left in ((3, 3, {(1,)}), (1, 1, set())):
        assert rig.cache.evict_host(wanted) == evicted
        assert in_tree(rig) == left


# --- write-back ---


@rigs(*ALL, write_policy="write_back")
def test_write_back_reports_the_host_before_it_leaves_the_device(rig):
    rig.turns(A, AB)
    assert rig.cache.evict(EvictParams(4)).num_tokens_evicted == 4
    assert rig.events() == stored(CPU, [2, 2], [1, 1]) + removed(GPU, 2)
    for kind in ("full", *rig.kinds):
        assert rig.has(A, kind) == rig.has(AB, kind) == (False, True)
    assert rig.match(AB).host_hit_length == 4


@pytest.mark.parametrize("kind", ["full", "mamba"])
@rigs("himamba", write_policy="write_back")
def test_write_back_keeps_a_leaf_whose_copy_fails(rig, kind):
    rig.turns(A)
    (rig.host if kind == "full" else rig.host_states).write_faults = 2
    for result, events in (((0, 0), []), ((2, 1), stored(CPU, [1, 1]) + removed(GPU))):
        assert rig.cache.evict(EvictParams(0, mamba_num=1)) == EvictResult(*result)
        assert rig.events() == events


@rigs("hiradix", "unified", write_policy="write_back")
def test_a_copy_that_is_under_way_is_waited_for_before_its_node_leaves_the_device(rig):
    rig.insert(A)
    rig.cache.write_backup(rig.node_of(A), write_back=True)
    rig.cache.take_events()
    assert rig.cache.evict(EvictParams(2)).num_tokens_evicted == 2
    assert rig.events() == stored(CPU, [1, 1]) + removed(GPU)


@rigs("himamba", write_policy="write_back", device_pages=4, host_pages=5)
def test_room_for_a_write_back_does_not_take_the_tombstone_that_is_written(rig):
    rig.insert(AB)
    rig.match(A)
    rig.cache.take_events()
    rig.cache.evict(EvictParams(2))
    held = rig.host.alloc(rig.host.available_size())
    assert rig.cache.evict(EvictParams(2)) == EvictResult(2, 0)
    assert rig.events() == stored(CPU, [2, 2]) + removed(GPU) + removed(CPU) + stored(CPU, [1, 1]) + removed(GPU)
    assert in_tree(rig) == {tuple(A)}
    rig.host.free(held)


@rigs("hiradix", "himamba", "unified", write_policy="write_back")
def test_a_write_back_that_the_engine_refuses_keeps_the_node(rig, monkeypatch):
    rig.insert(A)
    free = rig.used(), rig.pool.available_size(), rig.slots.available_size()
    with monkeypatch.context() as patch:
        patch.setattr(rig.engine, "submit", refuse)
        with pytest.raises(RuntimeError, match=FAILED):
            rig.cache.evict(EvictParams(2))
    assert (rig.used(), rig.pool.available_size(), rig.slots.available_size()) == free
    assert rig.node_of(A).host_ref_counter == 0
    assert rig.cache.evict(EvictParams(2)).num_tokens_evicted == 2
