"""Eviction of a unified tree: its order, the data that is evicted together, and the events."""

import pytest

from engine_cache import EvictParams
from tests.support.caches.unified_rig import UnifiedRig

pytestmark = pytest.mark.torch

A, AB, ABC = [1, 1], [1, 1, 2, 2], [1, 1, 2, 2, 3, 3]


def filled(*kinds, **params):
    rig = UnifiedRig(kinds, **params)
    for tokens in (A, AB, ABC):
        rig.insert(tokens)
        rig.settle()
    rig.events()
    return rig


def has(rig, tokens, kind):
    data = rig.data(rig.node_of(tokens), kind)
    return data.value is not None, data.host_value is not None


def test_a_state_of_an_inner_node_goes_alone_and_silently():
    rig = filled("mamba", "swa", tiers=1)
    assert rig.cache.evict(EvictParams(0, mamba_num=1)) == (0, 1, 0)
    assert (has(rig, A, "mamba"), has(rig, A, "swa"), has(rig, A, "full")) == (
        (False, False),
        (True, False),
        (True, False),
    )
    assert rig.events() == []
    rig.check()


def test_swa_rows_of_an_inner_node_take_the_state_with_them():
    rig = filled("mamba", "swa", tiers=1)
    assert rig.cache.evict(EvictParams(0, swa_num_tokens=1)) == (0, 1, 2)
    assert (has(rig, A, "mamba"), has(rig, A, "swa")) == ((False, False), (False, False))
    assert rig.node_of(A).value is not None
    assert rig.events() == []
    rig.check()


def test_a_leaf_loses_everything_and_that_is_an_event():
    rig = filled("mamba", tiers=1)
    assert rig.cache.evict(EvictParams(0, mamba_num=3)) == (2, 3, 0)
    assert rig.events() == [("BlockRemoved", "GPU", None)]
    assert rig.match(AB).last_device_node is rig.cache.root_node
    rig.check()


def test_what_goes_with_kv_counts_for_the_other_kinds():
    rig = filled("mamba", "swa", tiers=1)
    assert rig.cache.evict(EvictParams(4, mamba_num=2, swa_num_tokens=4)) == (4, 2, 4)
    rig.check()


def test_a_leaf_with_a_host_copy_is_demoted_with_all_its_kinds():
    rig = filled("mamba", "swa")
    assert rig.cache.evict(EvictParams(1)) == (2, 1, 2)
    assert rig.events() == [("BlockRemoved", "GPU", None)]
    assert [has(rig, ABC, kind) for kind in ("full", "mamba", "swa")] == [(False, True)] * 3
    for component in rig.cache.auxiliaries:
        assert list(component.host_lru_list) == [rig.node_of(ABC)]
    rig.check()


def test_a_leaf_that_lost_its_state_is_still_a_leaf():
    """KV without a state is useful for longer prompts that are computed later. It is evicted in its normal order."""
    rig = filled("mamba", tiers=1)
    rig.cache.evict(EvictParams(0, mamba_num=2))
    rig.cache.evict(EvictParams(2))
    assert rig.node_of(AB) in rig.cache.evictable_leaves
    rig.check()


def test_locked_data_stay_and_the_loop_ends():
    rig = filled("mamba", "swa")
    lock = rig.cache.inc_lock_ref(rig.node_of(ABC))
    result = rig.cache.evict(EvictParams(100, 100, 100))
    assert result == (0, 2, 2)  # states of A and AB, SWA rows of A
    rig.cache.release(lock)
    rig.check()


def test_a_state_that_is_locked_keeps_the_swa_rows_of_its_node():
    rig = UnifiedRig(("mamba", "swa"), window=3, tiers=1)
    rig.insert(A)
    rig.insert(AB)
    mamba, swa = rig.cache.auxiliaries
    node = rig.node_of(A)
    mamba.lock(node)
    node.lock_ref += 1
    assert rig.cache._evictor.evict_component(swa, 100) == 2
    assert rig.data(node, "swa").value is not None
    mamba.unlock(node)
    node.lock_ref -= 1


@pytest.mark.parametrize("kind", ["mamba", "swa"])
def test_a_host_leaf_that_loses_one_kind_goes_as_a_whole(kind):
    rig = filled("mamba", "swa")
    rig.cache.evict(EvictParams(100))
    component = next(each for each in rig.cache.auxiliaries if each.kind.name.lower() == kind)
    list_of = [node.id for node in component.host_lru_list]
    component.host_lru_list.move_to_end(rig.node_of(A))
    component.host_lru_list.move_to_end(rig.node_of(AB))
    assert len(list_of) == 3
    rig.events()
    assert rig.cache.host.leaves.evict_component(component, 1) == (1 if kind == "mamba" else 2)
    assert rig.events() == [("BlockRemoved", "CPU_PINNED", None)]
    assert rig.match(ABC).best_match_node is rig.node_of(AB)
    rig.check()


def test_an_inner_node_of_the_host_loses_one_kind_silently():
    rig = filled("mamba", "swa")
    rig.cache.evict(EvictParams(100))
    rig.events()
    mamba, swa = rig.cache.auxiliaries
    rig.match(ABC)
    assert rig.cache.host.leaves.evict_component(mamba, 1) == 1
    assert (has(rig, A, "mamba"), has(rig, A, "swa")) == ((False, False), (False, True))
    assert rig.cache.host.leaves.evict_component(swa, 1) == 2
    assert rig.events() == []
    rig.check()


def test_write_back_copies_a_leaf_with_all_its_kinds_before_it_goes():
    rig = filled("mamba", "swa", write_policy="write_back")
    assert rig.cache.evict(EvictParams(2)) == (2, 1, 2)
    kinds = [event[:2] for event in rig.events()]
    assert kinds == [("BlockStored", "CPU_PINNED"), ("BlockRemoved", "GPU")]
    assert [has(rig, ABC, kind) for kind in ("full", "mamba", "swa")] == [(False, True)] * 3
    rig.check()


def test_write_back_driven_by_states_waits_for_the_copy_and_skips_a_leaf_without_room():
    rig = filled("mamba", write_policy="write_back", host_pages=9)
    taken = rig.host.alloc(18)
    assert rig.cache.evict(EvictParams(0, mamba_num=3)) == (0, 2, 0)
    rig.host.free(taken)
    assert rig.cache.evict(EvictParams(0, mamba_num=1)) == (2, 1, 0)
    rig.check()


def test_without_a_copy_a_leaf_is_deleted_and_its_parent_becomes_one():
    rig = filled("swa", tiers=1)
    rig.cache.evict(EvictParams(2))
    assert rig.node_of(AB) in rig.cache.evictable_leaves
    assert rig.match(ABC).last_device_node is rig.node_of(AB)
    rig.check()


def test_a_reset_forgets_every_kind_on_every_tier():
    rig = filled("mamba", "swa")
    rig.cache.evict(EvictParams(2))
    rig.cache.reset()
    rig.tokens.clear()
    rig.slots.clear()
    assert [event[0] for event in rig.events()][-1] == "AllBlocksCleared"
    for pool in (rig.pool, rig.slots, *rig.host_pools.values()):
        assert pool.available_size() == pool.size
    rig.check()
    rig.insert(AB)
    rig.settle()
    rig.check()
