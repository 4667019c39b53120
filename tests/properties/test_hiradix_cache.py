"""HiRadixCache under random operations with transfers in flight, failing copies and storage, and little room."""

import pytest
from hypothesis import settings

from engine_cache import EVICTION_POLICIES, WRITE_POLICIES, ThreadCopyEngine
from kv_events.schema import BlockRemoved, BlockStored, StorageMedium
from tests.support.caches.cache_machine import soak
from tests.support.caches.tier_rig import LAYOUTS, Rig
from tests.support.caches.tiered_machine import OldMatches
from tests.support.effort import num_examples

pytestmark = pytest.mark.torch


class HiRadixCacheMachine(OldMatches):
    OPTIONS = OldMatches.STORE_OPTIONS | {
        "page_size": (1, 2, 3),
        "is_eagle": (False, True),
        "write_policy": WRITE_POLICIES,
        "eviction_policy": tuple(sorted(EVICTION_POLICIES)),
        "enable_kv_cache_events": (True, True, True, False),
        "attention": ("mha", "mla"),
        "layout": LAYOUTS,
    }

    def make_rig(self, **options):
        return Rig(**options)


TestHiRadixCache = HiRadixCacheMachine.TestCase
TestHiRadixCache.settings = settings(max_examples=num_examples(150), stateful_step_count=50)


@pytest.mark.soak
@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
def test_ten_thousand_operations_leave_everything_in_order(write_policy):
    machine = HiRadixCacheMachine()
    machine.begin(write_policy=write_policy)
    soak(machine, 10_000, seed=write_policy)
    assert machine.cache.num_failed_backups > 0
    assert machine.num_fetched > 0
    for medium in (StorageMedium.GPU, StorageMedium.CPU, StorageMedium.DISK):
        assert min(machine.told[kind, medium] for kind in (BlockStored, BlockRemoved)) > 10


def test_three_thousand_operations_with_copies_on_threads_leave_everything_in_order():
    machine = HiRadixCacheMachine()
    machine.begin(engine=ThreadCopyEngine(), store="directory")
    soak(machine, 3000, seed=1)
