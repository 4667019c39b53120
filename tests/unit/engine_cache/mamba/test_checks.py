import pytest

from engine_cache import CacheStateError
from kv_events.schema import AllBlocksCleared
from tests.support.caches.checks import check_cache
from tests.support.caches.mamba_rig import NOTHING, Rig


def test_reset_forgets_states_too(rig):
    rig.insert([1, 2])
    rig.lock([1, 2])
    rig.cache.reset()
    rig.pool.clear()
    rig.slots.clear()
    assert (rig.cache.states.evictable_size, rig.cache.states.protected_size) == (0, 0)
    assert rig.match([1, 2]).device_indices.tolist() == []
    assert isinstance(rig.cache.take_events()[-1], AllBlocksCleared)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda c, n: setattr(c.states, "evictable_size", 3), "evictable mamba rows.*3 != 1"),
        (lambda c, n: setattr(c.states, "protected_size", 2), "protected mamba rows.*2 != 0"),
        (lambda c, n: setattr(c.states.data(n), "value", None), "a leaf without a state"),
        (lambda c, n: setattr(c.states.data(n), "lock_ref", 1), "0 <= mamba_lock_ref <= lock_ref"),
        (lambda c, n: c.states.device_lru_list.pop(n), "mamba list: nodes listed"),
        (lambda c, n: c.mamba_allocator.free(n.mamba_value), "distinct pages"),
    ],
)
def test_check_finds_damage_and_states_both_figures(damage, what):
    rig = Rig()
    rig.insert([1, 2])
    damage(rig.cache, rig.node([1, 2]))
    with pytest.raises(CacheStateError, match=what):
        check_cache(rig.cache)


def test_check_finds_a_list_out_of_order():
    rig = Rig()
    rig.insert([1])
    rig.insert([2])
    rig.cache.states.device_lru_list.move_to_end(rig.node([1]))
    with pytest.raises(CacheStateError, match="times of use"):
        check_cache(rig.cache)


def test_check_finds_slots_without_an_owner():
    rig = Rig()
    rig.slots.alloc(1)
    with pytest.raises(CacheStateError, match="free 7"):
        check_cache(rig.cache, NOTHING, NOTHING)
