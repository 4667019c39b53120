"""After a failed load, no match returns the device rows that were never filled, until the cache is reset."""

import numpy as np
import pytest

from engine_cache import (
    BytelessHostPool,
    EvictParams,
    HiCacheController,
    Lane,
    ManualCopyEngine,
    PagedTokenToKVPoolAllocator,
    PoolEntry,
    TransferError,
)
from engine_cache.storage.base import PoolName
from kv_events.errors import InvalidValueError
from tests.support.caches.checks import check_cache
from tests.support.caches.hybrid_rig import HybridRig
from tests.support.caches.tier_rig import Rig
from tests.support.caches.unified_rig import UnifiedRig

pytestmark = pytest.mark.torch
A, B = [1, 1, 2, 2], [3, 3, 4, 4]


@pytest.fixture(params=[Rig, HybridRig, UnifiedRig], ids=["hiradix", "himamba", "unified"])
def rig(request):
    return request.param()


@pytest.fixture
def consumer(rig, monkeypatch):
    """The consumer of a load of `A` whose copy failed unnoticed. `B` is on the host only."""
    for tokens in (A, B):
        rig.insert(tokens)
        rig.settle()
    rig.cache.evict(EvictParams(100))
    rig.cache.load_back(rig.match(A).best_match_node)
    consumer = rig.cache.ready_to_load_host_cache()
    with monkeypatch.context() as patch:
        patch.setattr(rig.host, "load_to_device_per_layer", lambda *_: 1 / 0)
        rig.engine.step(Lane.LOAD)
    return consumer


@pytest.mark.parametrize("is_noticed", [False, True])
def test_everything_that_could_hand_out_its_rows_reports_it_until_a_reset(rig, consumer, is_noticed):
    if is_noticed:
        with pytest.raises(TransferError):
            rig.cache.loading_check()
    nodes = list(rig.cache.root_node.children.values())
    (other,) = (node for node in nodes if node.value is None)
    calls = [
        lambda: rig.match(A),
        lambda: rig.match(B),
        lambda: rig.insert(B),
        lambda: rig.cache.load_back(other),
        lambda: rig.cache.loading_check(),
        lambda: rig.cache.check_hicache_events(),
        lambda: check_cache(rig.cache),
        lambda: rig.controller.wait_for_layer(consumer, rig.controller.transfer_layer_num - 1),
    ]
    for call in [*calls, *calls]:
        with pytest.raises(TransferError, match="division by zero"):
            call()
    rig.cache.reset()
    rig.pool.clear()
    if isinstance(rig, HybridRig):
        rig.slots.clear()
    assert len(rig.match(A).device_indices) == 0
    assert rig.insert(A).prefix_len == 0
    rig.settle()
    rig.check()


def test_a_load_before_the_one_that_failed_is_not_blamed(rig, monkeypatch):
    last = rig.controller.transfer_layer_num - 1
    rig.insert(A)
    rig.insert(B)
    rig.settle()
    rig.cache.evict(EvictParams(100))
    for tokens in (A, B):
        match = rig.match(tokens)
        rig.cache.load_back(match.best_match_node)
        rig.cache.ready_to_load_host_cache()
    rig.engine.step(Lane.LOAD)
    rig.controller.wait_for_layer(0, last)
    monkeypatch.setattr(rig.host, "load_to_device_per_layer", lambda *_: 1 / 0)
    rig.engine.step(Lane.LOAD)
    rig.controller.wait_for_layer(0, last)
    with pytest.raises(TransferError):
        rig.controller.wait_for_layer(1, last)


# --- waiting for loads ---


@pytest.fixture
def controller():
    kv = PoolEntry(PoolName.KV, BytelessHostPool(12, 2), None, PagedTokenToKVPoolAllocator(8, 2))
    return HiCacheController(kv, ManualCopyEngine())


def begin(controller):
    controller.load(np.arange(2), 0)
    return controller.start_loading()


@pytest.mark.parametrize("consumer", [-2, 1, 99])
def test_no_caller_waits_for_a_load_that_never_began(controller, consumer):
    assert begin(controller) == 0
    with pytest.raises(InvalidValueError, match=f"consumer: got {consumer}, expected -1 .. 0"):
        controller.wait_for_layer(consumer, 0)


def test_there_is_nothing_to_wait_for_where_nothing_was_queued_or_all_is_acknowledged(controller):
    controller.wait_for_layer(controller.start_loading(), 0)
    consumer = begin(controller)
    controller.engine.drain()
    controller.finished_loads()
    controller.wait_for_layer(consumer, 0)
    assert controller._load_tickets == {}


def test_a_load_that_a_reset_abandoned_is_reported_to_the_caller_that_waits_for_it(controller):
    old = begin(controller)
    controller.reset()
    new = begin(controller)
    assert new == old + 1
    with pytest.raises(TransferError, match=f"load {old} was dropped in a reset"):
        controller.wait_for_layer(old, 0)
    controller.engine.drain()
    controller.wait_for_layer(new, 0)
