"""Pools besides KV in a store: in batches, archived before KV and fetched after it. The index of sparse attention."""

from dataclasses import replace

import pytest

from engine_cache import (
    HostPoolGroup,
    HybridCacheController,
    Lane,
    ManualCopyEngine,
    PagedTokenToKVPoolAllocator,
    PoolEntry,
    RadixKey,
    StoragePolicy,
)
from engine_cache.storage.base import PoolHitPolicy, PoolName, PoolTransfer
from engine_cache.storage.operations import ArchiveOperation, PrefetchOperation
from engine_cache.tiers.storage_io import StorageIO
from tests.rigs.cache import ABC, ABCD, CacheRig, rigs
from tests.rigs.cache_pools import NumberPools
from tests.rigs.cache_steps import archived
from tests.rigs.cache_stores import MemoryStorage, page_hashes

KV, INDEXER, MAMBA, SWA = PoolName.KV, PoolName.INDEXER, PoolName.MAMBA, PoolName.SWA
ALL, TRAILING = PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES
KEYS = page_hashes(ABCD)
PAGES = len(KEYS)


class Hybrid:
    """Storage I/O for KV in pages of two rows and one other pool, with a store that accepts three pages per call."""

    def __init__(self, name, page_size):
        self.name, self.page_size, self.engine = name, page_size, ManualCopyEngine()
        pools = {KV: NumberPools(16, 24, 2), name: NumberPools(16, 24, page_size)}
        entries = [
            PoolEntry(each, pair.host, pair.device, PagedTokenToKVPoolAllocator(8 * pair.page_size, pair.page_size))
            for each, pair in pools.items()
        ]
        controller = HybridCacheController(HostPoolGroup.of(*entries), self.engine)
        self.kv, self.state = pools[KV].host, pools[name].host
        for number, pool in enumerate((self.kv, self.state)):
            pool.rows[:] = range(100 * number, 100 * number + len(pool.rows))
        self.store = MemoryStorage()
        self.store.register_mem_pool_host(self.kv)
        self.store.register_mem_host_pool_v2(self.state, name)
        self.io = StorageIO(self.store, controller, StoragePolicy(prefetch_threshold=2, batch_pages=3))

    def transfer(self, policy, pages=PAGES):
        """Return a transfer of the last pages of the prompt."""
        rows = self.state.alloc(pages * self.page_size)
        return PoolTransfer(self.name, host_indices=rows, keys=KEYS[PAGES - pages :], hit_policy=policy)

    def archive(self, policy=TRAILING, pages=PAGES):
        operation = ArchiveOperation(None, list(KEYS), self.kv.alloc(PAGES * 2), [self.transfer(policy, pages)])
        self.io.archive(operation)
        return operation

    def prefetch(self, policy=TRAILING, pages=PAGES):
        extra = self.transfer(policy, pages)
        extra = extra if pages > 1 else replace(extra, keys=None)  # as for one state or window
        operation = PrefetchOperation("r", None, RadixKey(ABCD), None, self.kv.alloc(PAGES * 2), [extra])
        self.io.prefetch(operation)
        return operation

    def content(self, operation):
        """Return the numbers of KV and of the other pool."""
        (extra,) = operation.extras
        rows = operation.host_indices if isinstance(operation, ArchiveOperation) else operation.rows()
        return self.kv.rows[rows].tolist(), self.state.rows[extra.host_indices].tolist()


@pytest.fixture(params=[(SWA, 2), (MAMBA, 1)], ids=["swa", "mamba"])
def hybrid(request):
    return Hybrid(*request.param)


@pytest.mark.parametrize("policy", [ALL, TRAILING])
def test_no_call_moves_more_than_a_batch_and_every_page_arrives(hybrid, policy):
    stored = hybrid.archive(policy)
    hybrid.engine.drain()
    assert hybrid.store.calls("set") == [(hybrid.name, 3), (hybrid.name, 1), (KV, 3), (KV, 1)]
    fetched = hybrid.prefetch(policy)
    hybrid.engine.drain()
    assert hybrid.store.calls("get") == [(KV, 3), (KV, 1), (hybrid.name, 3), (hybrid.name, 1)]
    assert fetched.extra_pool_hit_pages == {hybrid.name: PAGES}
    assert hybrid.content(fetched) == hybrid.content(stored)


def test_a_prefetch_may_not_finish_before_its_state_is_there(hybrid):
    hybrid.archive(pages=1)
    hybrid.engine.drain()
    fetched = hybrid.prefetch(pages=1)
    for _ in range(3):
        hybrid.engine.step(Lane.PREFETCH)
    assert not fetched.may_finish(hybrid.io.policy)  # all KV is there, the state is not
    hybrid.engine.drain()
    assert (len(fetched.take()), fetched.is_over) == (8, True)
    assert fetched.extra_pool_hit_pages == {hybrid.name: 1}


def test_two_archives_take_turns(hybrid):
    first, second = hybrid.archive(), hybrid.archive()
    written, keep = [], hybrid.store._write

    def write(name, pool, keys, rows):
        written.append(int(rows[0]) in (second.extras[0] if name is hybrid.name else second).host_indices)
        return keep(name, pool, keys, rows)

    hybrid.store._write = write
    hybrid.engine.drain()
    assert written == [False, True] * 4
    assert list(hybrid.io.archived) == [first, second]


@pytest.mark.parametrize("refused", [0, 2])
def test_kv_without_a_page_that_it_needs_of_another_pool_is_not_written(hybrid, refused):
    """The second batch of the other pool, the one page with key 3, is position 0 of its batch."""
    hybrid.store.refused = {(hybrid.name, refused)}
    hybrid.io.policy = StoragePolicy(prefetch_threshold=2, batch_pages=4 if refused else 3)
    operation = hybrid.archive(ALL)
    hybrid.engine.drain()
    assert operation.completed_pages == refused
    assert hybrid.store.keys_of(KV) == KEYS[:refused]


def test_a_prefetch_that_is_abandoned_reads_no_further_batch(hybrid):
    hybrid.archive()
    hybrid.engine.drain()
    operation = hybrid.prefetch()
    for _ in range(4):  # the query, two batches of KV, one of the state
        hybrid.engine.step(Lane.PREFETCH)
    operation.take()
    hybrid.engine.drain()
    assert hybrid.store.calls("get") == [(KV, 3), (KV, 1), (hybrid.name, 3)]
    assert operation.is_over


# --- the index of sparse attention ---

NSA = "hiradix+indexer"
LONG = [token for token in range(1, 6) for _ in range(2)]


@rigs(NSA)
def test_the_index_uses_the_rows_of_kv_and_none_of_its_own(rig):
    rig.demoted(ABC)
    index = rig.pools[KV].index
    assert (index.available_size(), rig.used()) == (index.size, {"kv": 6})
    rig.cache.evict_host(10**6)
    assert rig.used() == {"kv": 0}


def test_the_index_rides_with_kv_and_other_models_have_nothing_that_does():
    sharing = [CacheRig(name).controller.group.sharing for name in (NSA, "hiradix", "unified+swa")]
    assert [[entry.name for entry in entries] for entries in sharing] == [[INDEXER], [], []]


@rigs(NSA)
def test_a_hit_ends_where_the_index_of_a_page_is_missing(rig):
    store = archived(rig, LONG)
    del store.pages[INDEXER, page_hashes(LONG)[2]]
    rig.prefetch(LONG)
    assert rig.fetched() == 4
    assert ("get", INDEXER, 2) in store.batches


@rigs(NSA)
def test_the_store_is_asked_once_a_pool_and_batch(rig):
    store = archived(rig, LONG)
    assert store.calls("set") == [(INDEXER, 2), (KV, 2)] * 2 + [(INDEXER, 1), (KV, 1)]
    rig.prefetch(LONG)
    assert rig.fetched() == len(LONG)
    assert store.calls("get") == [(KV, 2), (INDEXER, 2)] * 2 + [(KV, 1), (INDEXER, 1)]
