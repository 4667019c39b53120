"""Events: one for each page, with its names, and groups of events for other kinds of state."""

import hashlib
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from engine_cache import BasePrefixCache, EvictParams, InsertParams, KVCacheEventMixin, RadixCache, RadixKey
from engine_cache.tree import events
from kv_events.errors import InvalidValueError
from kv_events.hashing import namespace_seed
from kv_events.schema import AllBlocksCleared, BlockRemoved, BlockStored, StorageMedium
from tests.rigs.cache import AB, CPU, DISK, EVERYTHING, EXTERNAL, GPU, A, CacheRig, rigs, stored
from tests.rigs.cache_stores import MemoryStorage
from tests.support.log.records import words

pytestmark = pytest.mark.torch

ALL = ("radix", "mamba", "hiradix", "himamba", "unified", "unified+mamba+swa")
PAGES_OF_FOUR = {"page_size": 4, "device_pages": 8}
# block hashes of tokens 1 to 12 in pages of 4
NAMES = [-3488128144981237669, 5674439469042975057, -1307369107475853156]


def rolling(tokens, page_size, seed=1337, width=None):
    """Independent reference: sequence hashes computed with the xxhash package. seed: seed of the local hashes."""
    width = width or page_size
    result = list[int]()
    for start in range(0, len(tokens) - width + 1, page_size):
        local = xxhash.xxh3_64_intdigest(struct.pack(f"<{width}I", *tokens[start : start + width]), seed)
        pair = struct.pack("<QQ", result[-1], local) if result else None
        result.append(xxhash.xxh3_64_intdigest(pair, 1337) if pair else local)
    return result


def names_of(rig):
    return [event.block_hashes[0] for event in rig.cache.take_events()]


@rigs(*ALL)
def test_take_events_is_that_of_the_one_mixin(rig):
    assert type(rig.cache).take_events is KVCacheEventMixin.take_events
    assert KVCacheEventMixin.take_events is not BasePrefixCache.take_events


@rigs(*ALL, **PAGES_OF_FOUR, swa_pages=8, window=100)
def test_a_store_is_one_event_a_page_chained_to_the_page_before_it(rig):
    rig.insert([1, 2, 3, 4])
    rig.insert([*range(1, 13)])
    sequence = rolling(list(range(1, 13)), 4)
    assert rig.cache.take_events() == [
        BlockStored([name], parent, [i, i + 1, i + 2, i + 3], 4, None, GPU, None, words([s]))
        for name, parent, i, s in zip(NAMES, [None, *NAMES], (1, 5, 9), sequence, strict=False)
    ]
    assert rig.cache.take_events() == []
    (node,) = rig.cache.root_node.children.values()
    assert [bytes.fromhex(h) for h in node.hash_value] == [hashlib.sha256(struct.pack("<4I", 1, 2, 3, 4)).digest()]
    assert len(node.sequence_hash) == 1
    rig.settle()


@rigs("radix", "mamba", is_eagle=True)
def test_bigram_pages_carry_pairs(rig):
    rig.insert([1, 2, 3, 4, 5])
    first, second = rig.cache.take_events()
    assert (first.token_ids, first.block_hashes) == ([(1, 2), (2, 3)], [-1303529142941650691])
    assert (second.token_ids, second.block_hashes) == ([(3, 4), (4, 5)], [7461429976246528554])
    assert second.parent_block_hash == first.block_hashes[0]
    assert first.sequence_hashes + second.sequence_hashes == words(rolling([1, 2, 3, 4, 5], 2, width=3))


@rigs("radix", **PAGES_OF_FOUR)
def test_a_namespace_is_named_and_seeds_the_sequence_hashes(rig):
    rig.insert([1, 2, 3, 4], "x")
    (event,) = rig.cache.take_events()
    assert (event.extra_key, event.block_hashes) == ("x", NAMES[:1])
    assert event.sequence_hashes == words([0x32D40E0B05E9F0AE])
    rig.cache.evict(EvictParams(4))
    assert rig.cache.take_events() == [BlockRemoved(NAMES[:1], GPU, "x")]


@rigs("radix", **PAGES_OF_FOUR, seed_of_extra_key=lambda key: namespace_seed(lora_name=key))
def test_the_owner_reports_what_an_extra_key_means(rig):
    rig.insert([1, 2, 3, 4], "ad")
    assert rig.cache.take_events()[0].sequence_hashes == words([0xE31F2294523CAC4F])


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


@rigs("radix", **PAGES_OF_FOUR)
def test_removes_name_what_was_stored_even_after_a_split_and_parents_go_last(rig):
    rig.insert([*range(16)])
    rig.insert([*range(8), 50, 51, 52, 53])
    stored = names_of(rig)
    rig.cache.evict(EVERYTHING)
    gone = names_of(rig)
    assert (len(gone), set(gone)) == (5, set(stored))
    assert gone[-2:] == stored[:2], "those of one node in the order of its pages"


@rigs("radix", "mamba", **PAGES_OF_FOUR)
def test_a_split_is_silent_and_keeps_the_hashes(rig):
    rig.insert([*range(16)])
    rig.cache.take_events()
    before = [(page.block_hash, page.sequence_hash) for page in rig.cache.iter_resident(GPU)]
    rig.match([*range(8), 99, 99, 99, 99])
    assert rig.cache.take_events() == []
    pages = list(rig.cache.iter_resident(GPU))
    assert len({page.node.id for page in pages}) == 2
    assert [(page.block_hash, page.sequence_hash) for page in pages] == before


@pytest.mark.parametrize("medium", [None, *StorageMedium])
@rigs("radix")
def test_the_medium_is_gpu_by_default(rig, medium):
    (node,) = rig.turns(A)
    rig.cache.events.store(node, medium)
    rig.cache.events.remove(node, medium=medium)
    assert [event.medium for event in rig.cache.take_events()] == [medium or GPU] * 2


def test_media_are_their_strings_on_the_wire_too():
    assert list(StorageMedium) == ["GPU", "CPU_PINNED", "DISK", "EXTERNAL"]
    for medium in StorageMedium:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(medium)) == medium.value


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

STORE, REMOVE = "store", "remove"
TIERED = ("himamba", "unified+mamba")


def told(rig):
    """Return (kind, medium) of the group events since the last call."""
    kinds: dict[Any, str] = {BlockStored: STORE, BlockRemoved: REMOVE}
    return [(kinds[type(event)], event.medium) for event in rig.cache.take_group_events()["mamba"]]


@pytest.fixture
def grouped(rig):
    assert rig.cache.take_group_events() == {"mamba": [AllBlocksCleared()]}
    return rig


@rigs("mamba")
def test_an_insert_reports_the_state_at_its_last_page_only_and_once(grouped):
    for _ in range(2):
        grouped.insert([1, 2, 3, 4, 5, 6])
    *_, last = grouped.cache.take_events()
    (state,) = grouped.cache.take_group_events()["mamba"]
    assert state == BlockStored(last.block_hashes, None, [], 2, None, GPU, None, last.sequence_hashes)
    assert grouped.cache.take_group_events() == {"mamba": []}


@rigs("mamba")
def test_a_split_is_silent_and_the_state_keeps_its_page(grouped):
    grouped.insert(AB)
    (state,) = grouped.cache.take_group_events()["mamba"]
    grouped.match(A)
    assert told(grouped) == []
    grouped.cache.evict(EvictParams(4))
    assert grouped.cache.take_group_events()["mamba"] == [BlockRemoved(state.block_hashes, GPU)]


@rigs("mamba")
def test_a_state_that_goes_alone_is_an_event_of_the_group_and_none_of_kv(grouped):
    grouped.insert(A)
    grouped.insert(AB)
    inner, _ = grouped.cache.take_group_events()["mamba"]
    grouped.cache.take_events()
    grouped.cache.evict_mamba(1)
    assert grouped.cache.take_events() == []
    assert grouped.cache.take_group_events()["mamba"] == [BlockRemoved(inner.block_hashes, GPU)]
    grouped.reset()
    assert grouped.cache.take_group_events() == {"mamba": [AllBlocksCleared()]}


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


@rigs(*TIERED)
def test_a_state_is_reported_on_each_tier_as_it_moves(grouped):
    rig = grouped
    rig.insert(AB)
    assert told(rig) == [(STORE, GPU)]
    rig.engine.drain()
    assert told(rig) == []
    rig.cache.writing_check()
    assert told(rig) == [(STORE, CPU)]
    rig.cache.evict(EvictParams(100))
    assert told(rig) == [(REMOVE, GPU)]
    rig.load(AB)
    rig.settle()
    assert told(rig) == [(STORE, GPU)]
    rig.end_requests()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("follows", [False, True])
@rigs(*TIERED)
def test_a_state_is_on_the_host_when_its_copy_has_arrived_whether_it_went_with_its_kv_or_followed(
    grouped, follows, fails
):
    rig = grouped
    if follows:
        rig.insert(AB)
        rig.match(A)
        rig.settle()
        told(rig)
    rig.host_states.write_faults = 2 * fails
    rig.insert(A)
    assert rig.data(rig.node_of(A), "mamba").pending_id is not None
    assert told(rig) == [(STORE, GPU)]
    rig.settle()
    assert told(rig) == [(STORE, CPU)] * (not fails)


@rigs("himamba")
def test_a_host_slot_that_goes_alone_is_reported(grouped):
    grouped.turns(A)
    told(grouped)
    grouped.cache.evict_mamba_host(1)
    assert (told(grouped), grouped.events()) == ([(REMOVE, CPU)], [])


@rigs(*TIERED)
def test_a_state_that_was_fetched_is_on_the_host(grouped):
    rig = grouped
    rig.attach(MemoryStorage())
    rig.demoted(AB)
    rig.cache.evict_host(100)
    told(rig)
    rig.prefetch(AB)
    assert rig.fetched() == 4
    assert told(rig) == [(STORE, CPU)]
