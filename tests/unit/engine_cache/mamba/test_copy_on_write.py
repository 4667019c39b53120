import numpy as np
import pytest

from engine_cache import PoolExhaustedError, Request
from tests.support.caches.checks import check_cache
from tests.support.caches.mamba_rig import NOTHING, Rig


def test_a_request_gets_a_slot_of_its_own_and_the_state_to_copy(rig):
    rig.insert([1, 2])
    req = Request("r", [], 0)
    rig.match([1, 2, 3], cow_mamba=True, req=req)
    assert req.mamba_cow_src_index.tolist() == rig.node([1, 2]).mamba_value.tolist()
    assert req.mamba_pool_idx.tolist() != req.mamba_cow_src_index.tolist()
    check_cache(rig.cache, NOTHING, req.mamba_pool_idx)
    rig.slots.free(req.mamba_pool_idx)


def test_a_request_keeps_the_slot_it_has(rig):
    rig.insert([1, 2])
    req = Request("r", [], 0, mamba_pool_idx=rig.slots.alloc(1))
    had = req.mamba_pool_idx
    rig.match([1, 2], cow_mamba=True, req=req)
    assert req.mamba_pool_idx is had
    rig.slots.free(had)


def test_without_a_state_there_is_nothing_to_copy(rig):
    req = Request("r", [], 0, mamba_cow_src_index=np.array([3]))
    rig.match([1, 2], cow_mamba=True, req=req)
    assert (req.mamba_pool_idx, req.mamba_cow_src_index) == (None, None)


def test_a_full_pool_evicts_another_state_but_not_the_one_to_copy():
    rig = Rig(slots=2)
    rig.insert([1, 2])
    rig.insert([5])
    req = Request("r", [], 0)
    rig.match([5], cow_mamba=True, req=req)
    assert len(rig.match([5]).device_indices) == 1
    assert rig.match([1, 2]).device_indices.tolist() == []
    check_cache(rig.cache, NOTHING, req.mamba_pool_idx)


def test_a_request_that_no_slot_is_left_for_gets_an_error_and_leaves_no_lock():
    rig = Rig(slots=1)
    rig.insert([1, 2])
    with pytest.raises(PoolExhaustedError, match="request r needs a state slot: 0 of 1 free"):
        rig.match([1, 2], cow_mamba=True, req=Request("r", [], 0))
    assert (rig.cache.protected_size(), rig.cache.states.protected_size) == (0, 0)
    assert issubclass(PoolExhaustedError, RuntimeError)
    check_cache(rig.cache, NOTHING, NOTHING)


def test_copying_a_state_needs_a_request(rig):
    with pytest.raises(ValueError, match="req: got None"):
        rig.match([1], cow_mamba=True)


def test_an_eviction_that_fails_leaves_no_lock_behind():
    rig = Rig(slots=1)
    rig.insert([1, 2])

    def fail(mamba_num):
        raise RuntimeError("injected")

    evict_mamba, rig.cache.evict_mamba = rig.cache.evict_mamba, fail  # type: ignore[method-assign]
    req = Request("r", [], 0)
    with pytest.raises(RuntimeError, match="injected"):
        rig.match([1, 2], cow_mamba=True, req=req)
    assert (rig.cache.protected_size(), rig.cache.states.protected_size, req.mamba_pool_idx) == (0, 0, None)
    rig.cache.evict_mamba = evict_mamba  # type: ignore[method-assign]
    check_cache(rig.cache, NOTHING, NOTHING)
