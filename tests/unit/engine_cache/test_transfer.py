import threading
from functools import partial

import numpy as np
import pytest
import torch

from engine_cache import (
    BytelessHostPool,
    HiCacheController,
    HostPoolGroup,
    HybridCacheController,
    Lane,
    ManualCopyEngine,
    PagedTokenToKVPoolAllocator,
    PoolEntry,
    ThreadCopyEngine,
    TransferError,
)
from engine_cache.pools.device import MHATokenToKVPool, PoolShape
from engine_cache.pools.host import MHATokenToKVPoolHost
from engine_cache.storage.base import PoolName, PoolTransfer
from kv_events.errors import InvalidValueError
from tests.rigs.cache_tensors import FaultyHostPool

pytestmark = pytest.mark.torch
LAYERS = 3


def byteless(device_size=8, host_size=12, name=PoolName.KV, **entry):
    return PoolEntry(name, BytelessHostPool(host_size, 2), None, PagedTokenToKVPoolAllocator(device_size, 2), **entry)


def real(name=PoolName.KV, host=MHATokenToKVPoolHost, layers=LAYERS, **entry):
    device = MHATokenToKVPool(PoolShape(8, 2, layers, torch.float32), 1, 2)
    for tensor in (*device.k_buffer, *device.v_buffer):
        tensor.copy_(torch.randn(tensor.shape))
    return PoolEntry(name, host(device, ratio=1.2, reserve_bytes=0), device, PagedTokenToKVPoolAllocator(8, 2), **entry)


def content(entry, rows):
    rows = torch.from_numpy(rows)
    return torch.stack([tensor[rows] for tensor in (*entry.device_pool.k_buffer, *entry.device_pool.v_buffer)])


@pytest.fixture
def engine():
    engine = ThreadCopyEngine()
    yield engine
    engine.close()


# --- engines ---


def test_jobs_of_a_lane_run_in_order_and_lanes_do_not_wait_for_each_other(engine):
    gate, order = threading.Event(), []
    blocked = engine.submit(Lane.WRITE, [gate.wait, lambda: order.append("first")])
    behind = engine.submit(Lane.WRITE, [lambda: order.append("second")])
    other = engine.submit(Lane.LOAD, [lambda: order.append("other lane")])
    other.synchronize()
    assert not blocked.query()
    assert not behind.query()
    gate.set()
    behind.synchronize()
    assert order == ["other lane", "first", "second"]


def test_a_ticket_reports_how_far_a_job_is(engine):
    gate = threading.Event()
    ticket = engine.submit(Lane.LOAD, [lambda: None, gate.wait])
    ticket.wait_for_step(0)
    assert not ticket.query()
    gate.set()
    ticket.wait_for_step(1)
    assert ticket.query()
    assert ticket.error is None


def test_a_step_that_fails_is_tried_once_more(engine):
    attempts = list[int]()

    def fails_once():
        attempts.append(len(attempts))
        if len(attempts) == 1:
            raise RuntimeError("injected")

    ticket = engine.submit(Lane.WRITE, [fails_once])
    ticket.synchronize()
    assert (attempts, ticket.error) == ([0, 1], None)


def test_a_step_that_fails_twice_ends_its_job_and_not_its_lane(engine):
    ran = []

    def fails():
        ran.append("failed")
        raise RuntimeError("injected")

    ticket = engine.submit(Lane.LOAD, [lambda: None, fails, lambda: ran.append("never")])
    ticket.synchronize()
    assert str(ticket.error) == "injected"
    ticket.wait_for_step(0)
    with pytest.raises(TransferError, match="step 1 of 3 failed: injected"):
        ticket.wait_for_step(1)
    engine.submit(Lane.LOAD, [lambda: ran.append("next")]).synchronize()
    assert ran == ["failed", "failed", "next"]


def test_drain_waits_for_what_jobs_have_submitted_too(engine):
    ran = []
    engine.submit(Lane.WRITE, [lambda: engine.submit(Lane.LOAD, [lambda: ran.append("inner")]) and None])
    assert engine.drain()
    assert ran == ["inner"]


def test_drain_stops_after_its_time(engine):
    gate = threading.Event()
    engine.submit(Lane.WRITE, [gate.wait])
    assert not engine.drain(0.01)
    gate.set()
    assert engine.drain()


def test_a_manual_engine_runs_steps_in_any_order():
    engine, ran = ManualCopyEngine(), list[int]()
    tickets = [engine.submit(Lane.WRITE, [partial(ran.append, n)]) for n in range(3)]
    assert engine.num_queued(Lane.WRITE) == 3
    assert engine.step(Lane.WRITE, 1)
    assert [ticket.query() for ticket in tickets] == [False, True, False]
    assert not engine.step(Lane.LOAD)
    tickets[2].synchronize()
    assert ran == [1, 0, 2]


# --- the controller ---


def test_a_page_goes_to_the_host_and_back_with_its_bytes(engine):
    kv = real()
    controller = HiCacheController(kv, engine)
    rows = kv.device_allocator.alloc(4)
    before = content(kv, rows)
    host_rows = controller.write(rows, 7)
    assert [ack.ids for ack in controller.finished_writes(wait=True)] == [[7]]
    for tensor in (*kv.device_pool.k_buffer, *kv.device_pool.v_buffer):
        tensor.zero_()
    loaded = controller.load(host_rows, 8)
    assert not content(kv, loaded).any()
    consumer = controller.start_loading()
    for layer in range(LAYERS):
        controller.wait_for_layer(consumer, layer)
    assert torch.equal(content(kv, loaded), before)
    assert set(loaded.tolist()).isdisjoint(rows.tolist())


def test_acknowledgements_come_in_order_and_stop_at_the_first_open_one():
    engine = ManualCopyEngine()
    controller = HiCacheController(byteless(), engine)
    for ack_id in range(3):
        controller.write(np.arange(2), ack_id)
    engine.step(Lane.WRITE, 1)
    assert controller.finished_writes() == []
    engine.step(Lane.WRITE)
    assert [ack.ids for ack in controller.finished_writes()] == [[0], [1]]
    assert [ack.ids for ack in controller.finished_writes(wait=True)] == [[2]]
    assert controller.finished_writes(wait=True) == []


def test_queued_loads_start_as_one_operation():
    engine = ManualCopyEngine()
    controller = HiCacheController(byteless(), engine)
    assert controller.start_loading() == -1
    for ack_id in (4, 5):
        controller.load(np.arange(2) + 2 * ack_id - 8, ack_id)
    assert engine.num_queued(Lane.LOAD) == 0
    assert controller.start_loading() == 0
    assert engine.num_queued(Lane.LOAD) == 1
    engine.step(Lane.LOAD)
    assert [ack.ids for ack in controller.finished_loads()] == [[4, 5]]
    controller.wait_for_layer(0, 0)


def test_no_room_takes_nothing():
    controller = HiCacheController(byteless(), ManualCopyEngine())
    assert controller.write(np.arange(14), 0) is None
    assert controller.load(np.arange(10), 0) is None
    assert controller.kv.host_pool.available_size() == 12
    assert controller.kv.device_allocator.available_size() == 8  # type: ignore[attr-defined]


def test_a_load_that_fails_twice_is_an_error():
    kv, engine = real(host=FaultyHostPool), ManualCopyEngine()
    controller = HiCacheController(kv, engine)
    kv.host_pool.load_faults = 2
    controller.load(kv.host_pool.alloc(2), 1)
    consumer = controller.start_loading()
    with pytest.raises(TransferError, match="injected load fault"):
        controller.wait_for_layer(consumer, 0)
    with pytest.raises(TransferError, match="load of 1 nodes failed"):
        controller.finished_loads()


def test_reset_waits_for_copies_and_frees_the_host(engine):
    controller = HiCacheController(byteless(), engine)
    gate = threading.Event()
    ran = []
    engine.submit(Lane.WRITE, [gate.wait, lambda: ran.append("before")])
    controller.write(np.arange(2), 0)
    threading.Timer(0.02, gate.set).start()
    controller.reset()
    assert ran == ["before"]
    assert controller.finished_writes() == []
    assert controller.kv.host_pool.available_size() == 12


# --- sidecars ---


def test_a_sidecar_moves_in_the_same_operation(engine):
    kv, state = real(), real(PoolName.MAMBA)
    controller = HybridCacheController(HostPoolGroup.of(kv, state), engine)
    rows, slots = kv.device_allocator.alloc(4), state.device_allocator.alloc(2)
    before = content(state, slots)
    transfer = PoolTransfer(PoolName.MAMBA, device_indices=slots)
    host_rows = controller.write(rows, 0, [transfer])
    (ack,) = controller.finished_writes(wait=True)
    assert ack.ids == [0]
    back = PoolTransfer(PoolName.MAMBA, host_indices=transfer.host_indices)
    controller.load(host_rows, 1, [back])
    controller.start_loading()
    engine.drain()
    assert torch.equal(content(state, back.device_indices), before)


def test_without_room_for_a_sidecar_nothing_is_taken():
    state = byteless(host_size=4, name=PoolName.MAMBA)
    controller = HybridCacheController(HostPoolGroup.of(byteless(), state), ManualCopyEngine())
    transfer = PoolTransfer(PoolName.MAMBA, device_indices=np.arange(6))
    assert controller.write(np.arange(4), 0, [transfer]) is None
    assert transfer.host_indices is None
    assert controller.kv.host_pool.available_size() == 12
    back = PoolTransfer(PoolName.MAMBA, host_indices=np.arange(10))
    assert controller.load(np.arange(4), 0, [back]) is None
    assert controller.kv.device_allocator.available_size() == 8  # type: ignore[attr-defined]


def test_a_sidecar_evicts_once_before_it_stops():
    asked = []
    state = byteless(host_size=4, name=PoolName.MAMBA)
    held = state.host_pool.alloc(4)

    def evict(rows):
        asked.append(rows)
        state.host_pool.free(held)

    state.host_evict_fn = evict
    controller = HybridCacheController(HostPoolGroup.of(byteless(), state), ManualCopyEngine())
    assert controller.write(np.arange(4), 0, [PoolTransfer(PoolName.MAMBA, device_indices=np.arange(2))]) is not None
    assert asked == [2]


def test_a_sidecar_with_host_rows_is_written_in_place():
    state = byteless(name=PoolName.MAMBA)
    controller = HybridCacheController(HostPoolGroup.of(byteless(), state), ManualCopyEngine())
    held = state.host_pool.alloc(2)
    transfer = PoolTransfer(PoolName.MAMBA, device_indices=np.arange(2), host_indices=held)
    controller.write(np.arange(4), 0, [transfer])
    assert state.host_pool.available_size() == 10


def test_interleaved_layers_are_each_moved_once(engine):
    kv = real(layers=1, layer_mapper={1: 0}.get)
    state = real(PoolName.MAMBA, layers=2, layer_mapper={0: 0, 2: 1}.get)
    controller = HybridCacheController(HostPoolGroup.of(kv, state), engine, transfer_layer_num=3)
    rows, slots = kv.device_allocator.alloc(2), state.device_allocator.alloc(2)
    before = content(kv, rows), content(state, slots)
    transfer = PoolTransfer(PoolName.MAMBA, device_indices=slots)
    host_rows = controller.write(rows, 0, [transfer])
    controller.finished_writes(wait=True)
    back = PoolTransfer(PoolName.MAMBA, host_indices=transfer.host_indices)
    loaded = controller.load(host_rows, 1, [back])
    controller.wait_for_layer(controller.start_loading(), 2)
    assert torch.equal(content(kv, loaded), before[0])
    assert torch.equal(content(state, back.device_indices), before[1])


@pytest.mark.parametrize(
    ("mapper", "layers", "words"),
    [({0: 0}.get, 2, "no pool moves"), ({0: 0, 1: 0}.get, 2, "each of 0"), ({}.get, 1, "each of 0")],
)
def test_layers_without_a_pool_and_pools_without_layers_are_refused(mapper, layers, words):
    with pytest.raises(InvalidValueError, match=words):
        HiCacheController(byteless(layer_mapper=mapper), ManualCopyEngine(), transfer_layer_num=layers)


def test_a_host_no_larger_than_the_device_is_refused():
    with pytest.raises(InvalidValueError, match="8, expected more rows than the device pool's 8"):
        HiCacheController(byteless(host_size=8), ManualCopyEngine())


def test_a_pool_named_twice_is_refused():
    with pytest.raises(InvalidValueError, match="each name once"):
        HybridCacheController(HostPoolGroup.of(byteless(), byteless()), ManualCopyEngine())


def test_a_transfer_for_an_unknown_pool_or_without_a_source_is_refused_and_takes_nothing():
    controller = HybridCacheController(HostPoolGroup.of(byteless()), ManualCopyEngine())
    with pytest.raises(InvalidValueError, match="one of kv"):
        controller.write(np.arange(2), 0, [PoolTransfer(PoolName.SWA, device_indices=np.arange(2))])
    with pytest.raises(InvalidValueError, match="a source"):
        controller.write(np.arange(2), 0, [PoolTransfer(PoolName.KV)])
    assert controller.kv.host_pool.available_size() == 12


def test_a_controller_of_kv_alone_refuses_what_would_move_along_and_takes_nothing():
    controller = HiCacheController(byteless(), ManualCopyEngine())
    for move in (controller.write, controller.load):
        with pytest.raises(InvalidValueError, match="pool: got 'mamba', expected one of kv"):
            move(np.arange(2), 0, [PoolTransfer(PoolName.MAMBA, device_indices=np.arange(2))])
    assert controller.kv.host_pool.available_size() == 12
    assert controller.kv.device_allocator.available_size() == 8  # type: ignore[attr-defined]


def test_a_job_that_a_closed_engine_refuses_is_not_waited_for():
    engine = ThreadCopyEngine()
    engine.close()
    with pytest.raises(RuntimeError):
        engine.submit(Lane.ARCHIVE, [lambda: None])
    assert engine.drain(1.0)


# --- waiting for loads ---


@pytest.fixture
def controller():
    return HiCacheController(byteless(), ManualCopyEngine())


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
