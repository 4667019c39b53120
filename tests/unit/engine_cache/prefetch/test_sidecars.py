import pytest

from engine_cache import Lane, ManualCopyEngine, RadixKey, StoragePolicy
from engine_cache.storage.base import PoolHitPolicy, PoolName, PoolTransfer
from engine_cache.storage.operations import ArchiveOperation, PrefetchOperation
from engine_cache.tiers.storage_io import StorageIO
from tests.support.caches.prefetch_steps import PROMPT, hybrid_controller, page_hashes
from tests.support.caches.tier_rig import MemoryStorage

pytestmark = pytest.mark.torch


@pytest.fixture
def hybrid():
    """A store with two pools, its storage I/O, and the pools."""
    store, engine = MemoryStorage(), ManualCopyEngine()
    controller = hybrid_controller(PoolName.MAMBA, 1, engine)
    kv, state = controller.kv.host_pool, controller.entry(PoolName.MAMBA).host_pool
    kv.kv_buffer.random_(0, 1000)
    state.kv_buffer.random_(0, 1000)
    store.register_mem_pool_host(kv)
    store.register_mem_host_pool_v2(state, PoolName.MAMBA)
    return StorageIO(store, controller, StoragePolicy(prefetch_threshold=2, batch_pages=2)), engine, store, kv, state


def archive(hybrid, policy=PoolHitPolicy.TRAILING_PAGES, slots=1):
    io, engine, _, kv, state = hybrid
    keys = page_hashes(PROMPT)
    extra = PoolTransfer(PoolName.MAMBA, host_indices=state.alloc(slots), keys=keys[4 - slots :], hit_policy=policy)
    operation = ArchiveOperation(None, keys, kv.alloc(8), [extra])
    io.archive(operation)
    engine.drain()
    assert list(io.archived) == [operation]
    return operation, extra


def test_state_is_archived_first_and_fetched_last(hybrid):
    io, engine, store, kv, state = hybrid
    stored, extra = archive(hybrid)
    assert store.batches[0] == ("set", PoolName.MAMBA, 1)
    slot = state.alloc(1)
    fetched = PrefetchOperation(
        "r",
        None,
        RadixKey(PROMPT),
        None,
        kv.alloc(8),
        [PoolTransfer(PoolName.MAMBA, host_indices=slot, hit_policy=PoolHitPolicy.TRAILING_PAGES)],
    )
    io.prefetch(fetched)
    for _ in range(3):
        engine.step(Lane.PREFETCH)
    assert not fetched.may_finish(io.policy)  # all KV is there, the state is not
    engine.drain()
    assert fetched.extra_pool_hit_pages == {PoolName.MAMBA: 1}
    rows = fetched.take()
    assert fetched.is_over
    assert all(
        (kv.get_data_page(a) == kv.get_data_page(b)).all()
        for a, b in zip(rows[::2].tolist(), stored.host_indices[::2].tolist(), strict=True)
    )
    assert (state.get_data_page(int(slot[0])) == state.get_data_page(int(extra.host_indices[0]))).all()


def test_kv_without_the_state_it_needs_on_every_page_is_not_written(hybrid):
    store = hybrid[2]
    keep = store._write

    def write(name, pool, keys, rows):
        return [True, True, False, True] if name is PoolName.MAMBA else keep(name, pool, keys, rows)

    store._write = write
    operation, _ = archive(hybrid, PoolHitPolicy.ALL_PAGES, slots=4)
    assert operation.completed_pages == 2
    assert len(store.pages) == 2


def test_state_is_not_read_when_kv_is_cut_short(hybrid):
    io, engine, store, kv, state = hybrid
    archive(hybrid)
    extra = PoolTransfer(PoolName.MAMBA, host_indices=state.alloc(1), hit_policy=PoolHitPolicy.TRAILING_PAGES)
    operation = PrefetchOperation("r", None, RadixKey(PROMPT), None, kv.alloc(8), [extra])
    io.prefetch(operation)
    engine.step(Lane.PREFETCH)
    store.lose(page_hashes(PROMPT)[3])
    engine.drain()
    assert len(operation.take()) == 6
    assert operation.extra_pool_hit_pages == {}
