"""Groups of pools, and the controller that copies pages between device and host."""

import threading

import numpy as np
import pytest

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
from engine_cache.storage.base import PoolName, PoolTransfer
from kv_events.errors import InvalidValueError

KV, INDEXER, MAMBA, SWA = PoolName.KV, PoolName.INDEXER, PoolName.MAMBA, PoolName.SWA


def byteless(name=KV, host_size=12, page_size=2, device_size=8, **entry):
    rows = PagedTokenToKVPoolAllocator(device_size, page_size)
    return PoolEntry(name, BytelessHostPool(host_size, page_size), None, rows, **entry)


@pytest.fixture
def engine():
    engine = ThreadCopyEngine()
    yield engine
    engine.close()


def fail(*_):
    raise RuntimeError("injected")


def nsa(*sidecars):
    """Return a controller of KV and an index on its rows, and a list of the copies of the index."""
    index, copied = byteless(INDEXER, share_indices_with_anchor=True), []

    def note(_device_pool, *rows):
        copied.append([each.tolist() for each in rows[:2]])

    pool = index.host_pool
    pool.alloc = pool.free = fail  # these rows are the anchor's
    pool.backup_from_device_all_layer = pool.load_to_device_per_layer = note
    return HybridCacheController(HostPoolGroup.of(byteless(), index, *sidecars), ManualCopyEngine()), copied


def states(**options):
    return byteless(MAMBA, 5, 1, 4, **options)


def is_untouched(controller):
    """Return whether no row of KV is taken on either side and no copy is queued."""
    rows = controller.kv.host_pool.available_size(), controller.kv.device_allocator.available_size()
    return (rows, controller.engine.num_queued(Lane.WRITE)) == ((12, 8), 0)


# --- groups ---


def test_the_rows_of_a_group_are_its_anchors():
    kv, slots = byteless(), states()
    group = HostPoolGroup.of(kv, slots)
    assert (group.size, group.page_size, group.layout, group.anchor) == (12, 2, "page_first", kv)
    rows = group.alloc(4)
    slots.host_pool.alloc(2)
    assert group.available_size() == kv.host_pool.available_size() == 8
    group.free(rows[:2])
    assert group.available_size() == 10
    group.clear()
    assert (group.available_size(), slots.host_pool.available_size()) == (12, 5)
    assert group.get_pool(MAMBA) is slots.host_pool
    with pytest.raises(InvalidValueError, match="'swa', expected one of kv, mamba"):
        group.get_pool(SWA)


ANCHOR, SHARING = {"is_primary_index_anchor": True}, {"share_indices_with_anchor": True}


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([], "at least one pool"),
        ([byteless(**ANCHOR), byteless()], r"\['kv', 'kv'\]"),
        ([byteless(), states()], r"anchors of a group: got \[\]"),
        ([byteless(**ANCHOR), byteless(SWA, **ANCHOR)], r"anchors of a group: got \['kv', 'swa'\]"),
        ([byteless(**ANCHOR, **SHARING)], "rows of its own"),
        ([byteless(**ANCHOR), byteless(INDEXER, 14, **SHARING)], r"indexer: got \(7, 2\), expected .*\(6, 2\)"),
        ([byteless(**ANCHOR), byteless(INDEXER, 6, 1, **SHARING)], r"indexer: got \(6, 1\), expected .*\(6, 2\)"),
    ],
)
def test_pools_that_make_no_group_are_refused(entries, words):
    with pytest.raises(InvalidValueError, match=words):
        HostPoolGroup(entries)


@pytest.mark.parametrize(
    ("options", "layers", "words"),
    [
        ({"layer_mapper": {0: 0}.get}, 2, "no pool moves"),
        ({"layer_mapper": {0: 0, 1: 0}.get}, 2, "each of 0"),
        ({"layer_mapper": {}.get}, 1, "each of 0"),
        ({"host_size": 8}, 1, "8, expected more rows than the device pool's 8"),
    ],
)
def test_layers_without_a_pool_pools_without_layers_and_a_small_host_are_refused(options, layers, words):
    with pytest.raises(InvalidValueError, match=words):
        HiCacheController(byteless(**options), ManualCopyEngine(), transfer_layer_num=layers)


# --- the controller ---


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


def test_a_sidecar_with_host_rows_is_written_in_place():
    state = byteless(MAMBA)
    controller = HybridCacheController(HostPoolGroup.of(byteless(), state), ManualCopyEngine())
    held = state.host_pool.alloc(2)
    transfer = PoolTransfer(MAMBA, device_indices=np.arange(2), host_indices=held)
    controller.write(np.arange(4), 0, [transfer])
    assert state.host_pool.available_size() == 10


def test_a_sharing_pool_moves_with_kv_and_not_with_other_sidecars_and_hands_out_no_rows():
    controller, copied = nsa(states())
    state = PoolTransfer(MAMBA, device_indices=np.array([3]))
    host_rows = controller.write(np.arange(2, 6), 0, [state])
    assert len(state.host_indices) == 1
    loaded = controller.load(host_rows, 1)
    controller.start_loading()
    controller.engine.drain()
    assert copied == [[host_rows.tolist(), [2, 3, 4, 5]], [host_rows.tolist(), loaded.tolist()]]


# --- what is refused takes nothing ---


@pytest.mark.parametrize("evicts", [True, False])
def test_without_room_for_one_sidecar_every_pool_is_as_before(evicts):
    slots = states()
    controller, _ = nsa(slots)
    held, asked = slots.host_pool.alloc(5), list[int]()
    slots.host_evict_fn = asked.append if evicts else None
    state = PoolTransfer(MAMBA, device_indices=np.array([3]))
    assert controller.write(np.arange(2), 0, [state]) is None
    assert (asked, state.host_indices) == ([1] if evicts else [], None)
    assert is_untouched(controller)
    slots.host_evict_fn = lambda _: slots.host_pool.free(held)
    assert controller.write(np.arange(2), 1, [state]) is not None


def test_without_room_on_the_other_side_nothing_is_taken():
    controller, _ = nsa(states())
    assert controller.write(np.arange(14), 0) is None
    assert controller.load(np.arange(10), 0) is None
    assert controller.load(np.arange(4), 0, [PoolTransfer(MAMBA, host_indices=np.arange(10))]) is None
    assert is_untouched(controller)


@pytest.mark.parametrize("part", ["eviction", "engine"])
def test_an_eviction_or_an_engine_that_raises_leaves_nothing_taken(monkeypatch, part):
    slots = states(host_evict_fn=fail)
    controller, _ = nsa(slots)
    if part == "engine":
        monkeypatch.setattr(controller.engine, "submit", fail)
    else:
        slots.host_pool.alloc(5)
    with pytest.raises(RuntimeError, match="injected"):
        controller.write(np.arange(2), 0, [PoolTransfer(MAMBA, device_indices=np.array([3]))])
    assert is_untouched(controller)


@pytest.mark.parametrize(
    ("transfer", "words"),
    [
        (PoolTransfer(SWA, device_indices=np.arange(2)), "pool: got 'swa', expected one of kv, indexer, mamba"),
        (PoolTransfer(MAMBA), "a source"),
        (PoolTransfer(MAMBA, np.array([1, 2]), np.array([1])), "host_indices of pool mamba: got 2"),
    ],
)
def test_a_transfer_of_an_unknown_pool_or_without_a_source_or_of_unequal_sides_is_refused(transfer, words):
    controller, _ = nsa(states())
    with pytest.raises(InvalidValueError, match=words):
        controller.write(np.arange(2), 0, [transfer])
    if transfer.name is SWA:
        with pytest.raises(InvalidValueError, match=words):
            controller.load(np.arange(2), 0, [transfer])
    assert is_untouched(controller)


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
