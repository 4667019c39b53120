"""Valid pool groups, and copies of pools that share the rows of the anchor."""

import numpy as np
import pytest

from engine_cache import (
    BytelessHostPool,
    HostPoolGroup,
    HybridCacheController,
    Lane,
    ManualCopyEngine,
    PagedTokenToKVPoolAllocator,
    PoolEntry,
    PoolError,
)
from engine_cache.storage.base import PoolName, PoolTransfer
from kv_events.errors import InvalidValueError

KV, INDEXER, MAMBA, SWA = PoolName.KV, PoolName.INDEXER, PoolName.MAMBA, PoolName.SWA


class SharingHostPool(BytelessHostPool):
    """A pool that shares the rows of another one and records copies."""

    def __init__(self, size, page_size):
        super().__init__(size, page_size)
        self.copied = []

    def alloc(self, need_size):
        raise PoolError("these rows are the anchor's")

    def free(self, indices):
        raise PoolError("these rows are the anchor's")

    def backup_from_device_all_layer(self, device_pool, host_indices, device_indices):
        self.copied.append(("backup", host_indices.tolist(), device_indices.tolist()))

    def load_to_device_per_layer(self, device_pool, host_indices, device_indices, layer_id):
        self.copied.append(("load", host_indices.tolist(), device_indices.tolist()))


def entry(name, host_rows=12, page_size=2, host=BytelessHostPool, device_rows=8, **options):
    allocator = PagedTokenToKVPoolAllocator(device_rows, page_size)
    return PoolEntry(name, host(host_rows, page_size), None, allocator, **options)


def nsa(*sidecars):
    index = entry(INDEXER, host=SharingHostPool, share_indices_with_anchor=True)
    return HybridCacheController(HostPoolGroup.of(entry(KV), index, *sidecars), ManualCopyEngine()), index.host_pool


# --- groups ---


def test_the_rows_of_a_group_are_its_anchors():
    kv, states = entry(KV), entry(MAMBA, 5, 1)
    group = HostPoolGroup.of(kv, states)
    assert (group.size, group.page_size, group.layout, group.anchor) == (12, 2, "page_first", kv)
    rows = group.alloc(4)
    states.host_pool.alloc(2)
    assert group.available_size() == kv.host_pool.available_size() == 8
    group.free(rows[:2])
    assert group.available_size() == 10
    group.clear()
    assert (group.available_size(), states.host_pool.available_size()) == (12, 5)
    assert group.get_pool(MAMBA) is states.host_pool
    with pytest.raises(InvalidValueError, match="'swa', expected one of kv, mamba"):
        group.get_pool(SWA)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([], "at least one pool"),
        ([entry(KV, is_primary_index_anchor=True), entry(KV)], r"\['kv', 'kv'\]"),
        ([entry(KV), entry(MAMBA)], r"anchors of a group: got \[\]"),
        (
            [entry(KV, is_primary_index_anchor=True), entry(SWA, is_primary_index_anchor=True)],
            r"anchors of a group: got \['kv', 'swa'\]",
        ),
        ([entry(KV, is_primary_index_anchor=True, share_indices_with_anchor=True)], "rows of its own"),
        (
            [entry(KV, is_primary_index_anchor=True), entry(INDEXER, 14, share_indices_with_anchor=True)],
            r"pool indexer: got \(7, 2\), expected the anchor's \(6, 2\)",
        ),
        (
            [entry(KV, is_primary_index_anchor=True), entry(INDEXER, 6, 1, share_indices_with_anchor=True)],
            r"pool indexer: got \(6, 1\), expected the anchor's \(6, 2\)",
        ),
    ],
)
def test_pools_that_make_no_group_are_refused(entries, words):
    with pytest.raises(InvalidValueError, match=words):
        HostPoolGroup(entries)


# --- copies ---


def test_a_sharing_pool_moves_on_the_rows_of_kv_and_hands_out_none():
    controller, index = nsa()
    host_rows = controller.write(np.arange(2, 6), 0)
    loaded = controller.load(host_rows, 1)
    controller.start_loading()
    controller.engine.drain()
    assert index.copied == [
        ("backup", host_rows.tolist(), [2, 3, 4, 5]),
        ("load", host_rows.tolist(), loaded.tolist()),
    ]


def test_a_sharing_pool_moves_with_kv_and_not_with_other_sidecars():
    controller, index = nsa(entry(MAMBA, 5, 1, device_rows=4))
    state = PoolTransfer(MAMBA, device_indices=np.array([3]))
    controller.write(np.arange(2), 0, [state])
    assert len(state.host_indices) == 1
    controller.engine.drain()
    assert [len(rows) for _, rows, _ in index.copied] == [2]


@pytest.mark.parametrize("evicts", [True, False])
def test_without_room_for_one_sidecar_every_pool_is_as_before(evicts):
    states = entry(MAMBA, 5, 1, device_rows=4)
    controller, _ = nsa(states)
    held = states.host_pool.alloc(5)
    asked = list[int]()
    states.host_evict_fn = asked.append if evicts else None
    state = PoolTransfer(MAMBA, device_indices=np.array([3]))
    assert controller.write(np.arange(2), 0, [state]) is None
    assert asked == ([1] if evicts else [])
    assert state.host_indices is None
    assert controller.group.available_size() == 12
    assert controller.engine.num_queued(Lane.WRITE) == 0
    states.host_pool.free(held)
    assert controller.write(np.arange(2), 1, [state]) is not None


def test_an_eviction_that_raises_leaves_nothing_taken():
    states = entry(MAMBA, 5, 1, device_rows=4)
    controller, _ = nsa(states)
    states.host_pool.alloc(5)

    def fail(_):
        raise RuntimeError("injected")

    states.host_evict_fn = fail
    with pytest.raises(RuntimeError, match="injected"):
        controller.write(np.arange(2), 0, [PoolTransfer(MAMBA, device_indices=np.array([3]))])
    assert controller.group.available_size() == 12


def test_an_engine_that_refuses_a_backup_leaves_nothing_taken(monkeypatch):
    controller, _ = nsa()

    def refuse(*_):
        raise RuntimeError("injected")

    monkeypatch.setattr(controller.engine, "submit", refuse)
    with pytest.raises(RuntimeError, match="injected"):
        controller.write(np.arange(2), 0)
    assert controller.group.available_size() == 12


def test_a_transfer_of_an_unknown_pool_is_refused_and_takes_nothing():
    controller, _ = nsa()
    extras = [PoolTransfer(SWA, device_indices=np.arange(2))]
    with pytest.raises(InvalidValueError, match="one of kv, indexer"):
        controller.write(np.arange(2), 0, extras)
    with pytest.raises(InvalidValueError, match="one of kv, indexer"):
        controller.load(np.arange(2), 0, extras)
    assert controller.group.available_size() == 12
    assert controller.kv.device_allocator.available_size() == 8


def test_a_transfer_has_as_many_rows_on_both_sides():
    controller = HybridCacheController(
        HostPoolGroup.of(entry(KV), entry(MAMBA, 5, 1, device_rows=4)), ManualCopyEngine()
    )
    wrong = PoolTransfer(MAMBA, device_indices=np.array([1]), host_indices=np.array([1, 2]))
    with pytest.raises(InvalidValueError, match="host_indices of pool mamba: got 2"):
        controller.write(np.arange(2), 0, [wrong])
    assert controller.group.available_size() == 12
