from typing import Any

import pytest

from engine_cache import EvictParams, InsertParams, KVCacheEventMixin, MambaRadixCache, RadixKey
from engine_cache.tree import events
from kv_events.schema import AllBlocksCleared, StorageMedium
from tests.support.caches.mamba_rig import Rig

# block hashes of tokens 1 to 4 and then 5 to 12, page size 4, from an independent computation
V1 = -3488128144981237669
V2 = [5674439469042975057, -1307369107475853156]


def test_events_come_from_the_mixin_that_all_caches_share():
    assert MambaRadixCache.take_events is KVCacheEventMixin.take_events


def test_inserted_pages_are_announced_in_a_chain():
    rig = Rig(page_size=4, enable_kv_cache_events=True)
    rig.insert([1, 2, 3, 4])
    rig.insert([*range(1, 13)])
    events: list[Any] = rig.cache.take_events()
    cleared, *stored = events
    assert isinstance(cleared, AllBlocksCleared)
    assert [event.block_hashes for event in stored] == [[V1], [V2[0]], [V2[1]]]
    assert [event.parent_block_hash for event in stored] == [None, V1, V2[0]]
    assert {event.medium for event in stored} == {StorageMedium.GPU}


def test_an_eagle_cache_announces_pairs():
    rig = Rig(page_size=2, is_eagle=True, enable_kv_cache_events=True)
    params = InsertParams(RadixKey([1, 2, 3]), rig.pool.alloc(2), mamba_value=rig.slots.alloc(1))
    assert rig.cache.insert(params) == (0, 2, False)
    events: list[Any] = rig.cache.take_events()
    assert events[1].token_ids == [(1, 2), (2, 3)]


def test_a_split_is_silent_and_keeps_the_hashes(rig):
    rig.insert([1, 2, 3])
    (stored,) = [[event.block_hashes for event in rig.cache.take_events()]]
    rig.match([1, 2])
    assert rig.cache.take_events() == []
    rig.cache.evict_full(3)
    assert sorted(event.block_hashes for event in rig.cache.take_events()) == sorted(stored)


def test_events_off_cost_no_hash(monkeypatch):
    monkeypatch.setattr(events, "compute_node_hash_values", lambda *_: pytest.fail("a hash was computed"))
    rig = Rig()
    rig.insert([1, 2, 3])
    rig.match([1, 2])
    rig.cache.evict(EvictParams(3))
    assert rig.cache.take_events() == []
