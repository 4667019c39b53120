"""Group events for the states of a cache."""

import pytest

from engine_cache import EvictParams, RadixCache
from engine_cache.tree import events
from kv_events.errors import InvalidValueError
from kv_events.schema import AllBlocksCleared, BlockRemoved, BlockStored, StorageMedium
from tests.support.caches.mamba_rig import Rig


@pytest.fixture
def rig():
    rig = Rig(page_size=2, enable_kv_cache_events=True, emit_group_events=True)
    assert rig.cache.take_group_events() == {"mamba": [AllBlocksCleared()]}
    rig.cache.take_events()
    return rig


def test_an_insert_reports_the_state_at_its_last_page_only(rig):
    rig.insert([1, 2, 3, 4, 5, 6])
    *_, last = rig.cache.take_events()
    (state,) = rig.cache.take_group_events()["mamba"]
    assert state == BlockStored(last.block_hashes, None, [], 2, None, StorageMedium.GPU, None, last.sequence_hashes)


def test_events_are_reported_once(rig):
    rig.insert([1, 2])
    assert len(rig.cache.take_group_events()["mamba"]) == 1
    assert rig.cache.take_group_events() == {"mamba": []}


def test_a_state_that_is_there_already_is_not_reported_again(rig):
    for _ in range(2):
        rig.insert([1, 2])
    assert len(rig.cache.take_group_events()["mamba"]) == 1


def test_a_split_is_silent_and_the_state_keeps_its_page(rig):
    rig.insert([1, 2, 3, 4])
    stored = rig.cache.take_group_events()["mamba"]
    rig.match([1, 2])
    assert rig.cache.take_group_events() == {"mamba": []}
    rig.cache.evict(EvictParams(4))
    removed = rig.cache.take_group_events()["mamba"]
    assert removed == [BlockRemoved(stored[0].block_hashes, StorageMedium.GPU)]


def test_a_state_that_goes_alone_is_an_event_here_and_none_of_kv(rig):
    rig.insert([1, 2])
    rig.insert([1, 2, 3, 4])
    inner, _ = rig.cache.take_group_events()["mamba"]
    rig.cache.take_events()
    rig.cache.evict_mamba(1)
    assert rig.cache.take_events() == []
    assert rig.cache.take_group_events()["mamba"] == [BlockRemoved(inner.block_hashes, StorageMedium.GPU)]


def test_a_tombstone_that_gets_a_state_is_reported(rig):
    rig.insert([1, 2, 3, 4])
    rig.match([1, 2])
    rig.cache.take_group_events()
    rig.insert([1, 2])
    (stored,) = rig.cache.take_group_events()["mamba"]
    assert isinstance(stored, BlockStored)


def test_a_reset_clears_the_group_too(rig):
    rig.insert([1, 2])
    rig.cache.take_group_events()
    rig.cache.reset()
    assert rig.cache.take_group_events() == {"mamba": [AllBlocksCleared()]}


def test_without_the_switch_there_are_no_groups_and_the_stream_of_kv_is_the_same(rig):
    plain = Rig(page_size=2, enable_kv_cache_events=True)
    plain.cache.take_events()
    for each in (rig, plain):
        each.insert([1, 2])
        each.insert([1, 2, 3, 4])
        each.cache.evict(EvictParams(2))
    assert plain.cache.take_group_events() == {}
    assert plain.cache.take_events() == rig.cache.take_events()


def test_a_cache_without_states_has_no_group():
    cache = RadixCache(page_size=1, enable_kv_cache_events=True, emit_group_events=True)
    assert (cache.event_groups, cache.take_group_events()) == ((), {})


def test_groups_without_events_of_kv_are_refused():
    with pytest.raises(InvalidValueError, match="emit_group_events: got True"):
        Rig(emit_group_events=True)


def test_a_state_costs_the_name_of_one_page(rig, monkeypatch):
    rig.insert(list(range(64)))
    convert, converted = events.hash_strs_to_int64, []  # type: ignore[attr-defined]
    monkeypatch.setattr(events, "hash_strs_to_int64", lambda names: converted.append(len(names)) or convert(names))  # type: ignore[func-returns-value]
    rig.cache.evict_mamba(1)
    rig.cache.take_group_events()
    assert converted[0] == 1
