from typing import Any

import numpy as np
import pytest

from engine_cache import (
    BytelessHostPool,
    HiMambaRadixCache,
    HostPoolGroup,
    HybridCacheController,
    InsertParams,
    MambaSlotAllocator,
    ManualCopyEngine,
    MatchPrefixParams,
    PagedTokenToKVPoolAllocator,
    PoolEntry,
    RadixKey,
)
from engine_cache.storage.base import PoolName
from kv_events.errors import InvalidValueError
from tests.support.caches.hybrid_rig import HybridRig

pytestmark = pytest.mark.torch


def cache_of(**changes):
    pool, slots = PagedTokenToKVPoolAllocator(8, 2), MambaSlotAllocator(2)
    kv = PoolEntry(PoolName.KV, BytelessHostPool(12, 2), None, pool)
    sidecars = changes.pop("sidecars", [PoolEntry(PoolName.MAMBA, BytelessHostPool(4, 1), None, slots)])
    controller = HybridCacheController(HostPoolGroup.of(kv, *sidecars), ManualCopyEngine())
    options: dict[str, Any] = {"page_size": 2, "allocator": pool, "mamba_allocator": slots}
    options["enable_mamba_extra_buffer"] = True
    return HiMambaRadixCache(controller=controller, **options | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"page_size": 0}, "page_size.*0"),
        ({"write_policy": "later"}, "write_policy.*later"),
        ({"load_back_threshold": -1}, "load_back_threshold.*-1"),
        ({"mamba_allocator": MambaSlotAllocator(2)}, "mamba_allocator"),
        ({"sidecars": []}, "pool.*mamba.*one of kv"),
        ({"enable_mamba_extra_buffer": False}, "page_size.*2"),
    ],
)
def test_a_bad_configuration_is_refused_with_its_numbers(changes, words):
    with pytest.raises(InvalidValueError, match=words):
        cache_of(**changes)


def test_states_have_pages_of_one_row():
    slots = MambaSlotAllocator(2)
    sidecars = [PoolEntry(PoolName.MAMBA, BytelessHostPool(4, 2), None, slots)]
    with pytest.raises(InvalidValueError, match=r"mamba page_size: got 1, expected the host pool's, 2"):
        cache_of(sidecars=sidecars, mamba_allocator=slots)


def test_a_disabled_cache_keeps_nothing():
    cache = cache_of(disable=True)
    key = RadixKey([1, 2])
    assert cache.insert(InsertParams(key, np.array([2, 3]), mamba_value=np.array([1]))).mamba_exist
    assert len(cache.match_prefix(MatchPrefixParams(key)).device_indices) == 0


def test_the_order_of_eviction_is_no_choice():
    with pytest.raises(TypeError, match="eviction_policy"):
        HybridRig(eviction_policy="fifo")
