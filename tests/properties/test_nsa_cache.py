"""Sparse attention under random operations: KV is always accompanied by the index of the same tokens."""

import pytest
from hypothesis import settings

from engine_cache import (
    WRITE_POLICIES,
    HiRadixCache,
    HostPoolGroup,
    HybridCacheController,
    ManualCopyEngine,
    PagedTokenToKVPoolAllocator,
    PoolEntry,
    ThreadCopyEngine,
)
from engine_cache.storage.base import PoolName
from tests.support.caches.cache_machine import soak
from tests.support.caches.nsa_pools import NsaPools
from tests.support.caches.tier_rig import LAYOUTS, Rig
from tests.support.caches.tiered_machine import TieredCacheMachine
from tests.support.effort import num_examples

pytestmark = pytest.mark.torch


class NsaRig(Rig):
    def __init__(
        self, *, page_size=2, device_pages=8, host_pages=12, layout="layer_first", engine=None, is_eagle=False, **cache
    ):
        self.page_size, self.is_bigram = page_size, is_eagle
        self.pool = PagedTokenToKVPoolAllocator(device_pages * page_size, page_size)
        self.kv = NsaPools(device_pages, host_pages, page_size, layout)
        self.device, self.host = self.kv.device, self.kv.host
        self.engine = engine or ManualCopyEngine()
        index = PoolEntry(PoolName.INDEXER, self.kv.index, self.device, self.pool, None, share_indices_with_anchor=True)
        kv = PoolEntry(PoolName.KV, self.host, self.device, self.pool)
        self.controller = HybridCacheController(HostPoolGroup.of(kv, index), self.engine)
        options = {"load_back_threshold": 1, "enable_kv_cache_events": True, "is_eagle": is_eagle} | cache
        self.cache = HiRadixCache(page_size=page_size, allocator=self.pool, controller=self.controller, **options)


class NsaCacheMachine(TieredCacheMachine):
    OPTIONS = TieredCacheMachine.STORE_OPTIONS | {
        "page_size": (1, 2, 3),
        "is_eagle": (False, True),
        "write_policy": WRITE_POLICIES,
        "layout": LAYOUTS,
    }

    def make_rig(self, **options):
        return NsaRig(**options)


TestNsaCache = NsaCacheMachine.TestCase
TestNsaCache.settings = settings(max_examples=num_examples(40), stateful_step_count=40)


@pytest.mark.soak
@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
def test_three_thousand_operations_leave_every_index_with_its_kv(write_policy):
    machine = NsaCacheMachine()
    machine.begin(write_policy=write_policy)
    soak(machine, 3000, seed=write_policy)
    assert machine.cache.num_failed_backups > 0


def test_a_thousand_operations_with_copies_on_threads_leave_every_index_with_its_kv():
    machine = NsaCacheMachine()
    machine.begin(engine=ThreadCopyEngine(), store="directory")
    soak(machine, 1000, seed=1)
