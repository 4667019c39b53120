"""Sidecars with their own rows are copied in batches, as KV is, and operations alternate."""

import pytest

from engine_cache import Lane, ManualCopyEngine, RadixKey, StoragePolicy
from engine_cache.storage.base import PoolHitPolicy, PoolName, PoolTransfer
from engine_cache.storage.operations import ArchiveOperation, PrefetchOperation
from engine_cache.tiers.storage_io import StorageIO
from tests.support.caches.prefetch_steps import PROMPT, hybrid_controller, page_hashes
from tests.support.caches.tier_rig import MemoryStorage

pytestmark = pytest.mark.torch
KV, ALL, TRAILING = PoolName.KV, PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES
KEYS = page_hashes(PROMPT)
PAGES = len(KEYS)


class Hybrid:
    """Storage I/O for KV in pages of two rows and one other pool, with a store that accepts three pages per call."""

    def __init__(self, name, page_size):
        self.name, self.page_size = name, page_size
        self.engine = ManualCopyEngine()
        controller = hybrid_controller(name, page_size, self.engine)
        self.kv, self.state = controller.kv.host_pool, controller.entry(name).host_pool
        for pool in (self.kv, self.state):
            pool.kv_buffer.random_(0, 1000)
        self.store = MemoryStorage()
        self.store.register_mem_pool_host(self.kv)
        self.store.register_mem_host_pool_v2(self.state, name)
        self.io = StorageIO(self.store, controller, StoragePolicy(prefetch_threshold=2, batch_pages=3))

    def transfer(self, policy):
        """Return a transfer of all pages of the prompt."""
        rows = self.state.alloc(PAGES * self.page_size)
        return PoolTransfer(self.name, host_indices=rows, keys=list(KEYS), hit_policy=policy)

    def archive(self, policy=TRAILING):
        operation = ArchiveOperation(None, list(KEYS), self.kv.alloc(PAGES * 2), [self.transfer(policy)])
        self.io.archive(operation)
        return operation

    def prefetch(self, policy=TRAILING):
        extra = self.transfer(policy)
        operation = PrefetchOperation("r", None, RadixKey(PROMPT), None, self.kv.alloc(PAGES * 2), [extra])
        self.io.prefetch(operation)
        return operation

    def calls(self, what):
        """Return the pool and the number of pages of each call of that kind."""
        return [(name, count) for kind, name, count in self.store.batches if kind == what]

    def content(self, operation):
        (extra,) = operation.extras
        return [self.state.get_data_page(int(row)).tolist() for row in extra.host_indices[:: self.page_size]]


@pytest.fixture(params=[(PoolName.SWA, 2), (PoolName.MAMBA, 1)], ids=["swa", "mamba"])
def hybrid(request):
    return Hybrid(*request.param)


@pytest.mark.parametrize("policy", [ALL, TRAILING])
def test_no_call_moves_more_than_a_batch_and_every_page_arrives(hybrid, policy):
    stored = hybrid.archive(policy)
    hybrid.engine.drain()
    assert hybrid.calls("set") == [(hybrid.name, 3), (hybrid.name, 1), (KV, 3), (KV, 1)]
    fetched = hybrid.prefetch(policy)
    hybrid.engine.drain()
    assert hybrid.calls("get") == [(KV, 3), (KV, 1), (hybrid.name, 3), (hybrid.name, 1)]
    assert fetched.extra_pool_hit_pages == {hybrid.name: PAGES}
    assert hybrid.content(fetched) == hybrid.content(stored)


def test_two_archives_take_turns(hybrid):
    first, second = hybrid.archive(), hybrid.archive()
    written = []
    keep = hybrid.store._write

    def write(name, pool, keys, rows):
        written.append(int(rows[0]) in (second.extras[0] if name is hybrid.name else second).host_indices)
        return keep(name, pool, keys, rows)

    hybrid.store._write = write
    hybrid.engine.drain()
    assert written == [False, True] * 4
    assert list(hybrid.io.archived) == [first, second]


def test_a_page_that_is_refused_in_a_later_batch_ends_the_kv_there(hybrid):
    keep = hybrid.store._write

    def write(name, pool, keys, rows):
        return [key != KEYS[3] for key in keys] if name is hybrid.name else keep(name, pool, keys, rows)

    hybrid.store._write = write
    operation = hybrid.archive(ALL)
    hybrid.engine.drain()
    assert operation.completed_pages == 3
    assert {key for name, key in hybrid.store.pages if name is KV} == set(KEYS[:3])


def test_a_prefetch_that_is_abandoned_reads_no_further_batch(hybrid):
    hybrid.archive()
    hybrid.engine.drain()
    operation = hybrid.prefetch()
    for _ in range(4):  # the query, two batches of KV, one of the state
        hybrid.engine.step(Lane.PREFETCH)
    operation.take()
    hybrid.engine.drain()
    assert hybrid.calls("get") == [(KV, 3), (KV, 1), (hybrid.name, 3)]
    assert operation.is_over
