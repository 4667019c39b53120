"""Events: namespaces, media and groups. The machines of caches compare every event with independent hashes."""

from typing import Any

import numpy as np
import pytest

from engine_cache import BasePrefixCache, EvictParams, InsertParams, KVCacheEventMixin, RadixCache, RadixKey
from engine_cache.tree import events
from kv_events.errors import InvalidValueError
from kv_events.schema import AllBlocksCleared, StorageMedium
from tests.rigs.cache import AB, CPU, DISK, EXTERNAL, GPU, A, CacheRig, rigs, stored
from tests.support.log.records import words

ALL = ("radix", "mamba", "hiradix", "himamba", "unified", "unified+mamba+swa")
PAGES_OF_FOUR = {"page_size": 4, "device_pages": 8}


@rigs(*ALL)
def test_take_events_is_that_of_the_one_mixin(rig):
    assert type(rig.cache).take_events is KVCacheEventMixin.take_events
    assert KVCacheEventMixin.take_events is not BasePrefixCache.take_events


@rigs("hiradix", "himamba", "mamba", enable_kv_cache_events=False)
def test_events_off_cost_no_hash(rig, monkeypatch):
    for name in ("compute_node_hash_values", "compute_node_sequence_hashes"):
        monkeypatch.setattr(events, name, lambda *args: pytest.fail("a hash was computed"))
    rig.demoted(A, AB)
    if rig.controller:
        rig.load(AB)
        rig.settle()
    rig.match([1, 1, 2, 9])
    assert all(place.node.hash_value is None for place in rig.walk())
    rig.reset()
    assert (rig.cache.kv_event_queue, rig.cache.take_events(), rig.cache.take_group_events()) == ([], [], {})


@pytest.mark.parametrize("medium", [None, *StorageMedium])
@rigs("radix")
def test_the_medium_is_gpu_by_default(rig, medium):
    (node,) = rig.turns(A)
    rig.cache.events.store(node, medium)
    rig.cache.events.remove(node, medium=medium)
    assert [event.medium for event in rig.cache.take_events()] == [medium or GPU] * 2


def test_a_reset_is_reported_after_what_was_not_taken_yet():
    rig = CacheRig("radix")
    assert rig.cache.take_events() == [AllBlocksCleared()]
    rig.insert(A)
    rig.reset()
    assert rig.events() == [*stored(GPU, A), ("AllBlocksCleared", None, None)]


@rigs("radix", **PAGES_OF_FOUR)
def test_resident_pages_are_listed_parents_first_with_all_hashes(rig):
    rig.insert([*range(8)], "x")
    rig.insert([*range(4), 9, 9, 9, 9], "x")
    told = {event.block_hashes[0]: event for event in rig.cache.take_events()}
    seen = {None}
    for page in rig.cache.iter_resident(GPU):
        event = told.pop(page.block_hash)
        assert page.parent_block_hash in seen
        expected = event.parent_block_hash, event.token_ids, event.extra_key
        assert (page.parent_block_hash, page.token_ids, page.extra_key) == expected
        assert words([page.sequence_hash]) == event.sequence_hashes
        seen.add(page.block_hash)
    assert told == {}
    assert list(rig.cache.iter_resident(CPU)) == []
    for medium in (DISK, EXTERNAL):
        with pytest.raises(InvalidValueError, match=f"medium.*{medium.value}.*iter_announced"):
            rig.cache.iter_resident(medium)


def test_event_values_are_plain_python():
    cache = RadixCache(page_size=4, enable_kv_cache_events=True)
    cache.insert(InsertParams(RadixKey(np.arange(4, dtype=np.uint32))))
    taken: list[Any] = cache.take_events()[1:]
    for event in taken:
        assert {type(each) for each in (*event.block_hashes, *event.token_ids)} == {int}


# --- groups ---


def test_without_the_switch_or_states_there_are_no_groups_and_the_stream_of_kv_is_the_same():
    rigs = [CacheRig("mamba", emit_group_events=is_on) for is_on in (True, False)]
    for rig in rigs:
        rig.insert(A)
        rig.insert(AB)
        rig.cache.evict(EvictParams(2))
    assert rigs[1].cache.take_group_events() == {}
    assert rigs[0].cache.take_events() == rigs[1].cache.take_events()
    plain = CacheRig("radix").cache
    assert (plain.event_groups, plain.take_group_events()) == ((), {})


@rigs("mamba", device_pages=64)
def test_a_state_costs_the_name_of_one_page(rig, monkeypatch):
    rig.insert(list(range(64)))
    convert, converted = events.hash_strs_to_int64, []  # type: ignore[attr-defined]
    monkeypatch.setattr(events, "hash_strs_to_int64", lambda names: converted.append(len(names)) or convert(names))  # type: ignore[func-returns-value]
    rig.cache.evict_mamba(1)
    rig.cache.take_group_events()
    assert converted[0] == 1
