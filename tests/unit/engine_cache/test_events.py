import hashlib
import struct

import msgspec
import numpy as np
import pytest
import xxhash

from engine_cache import (
    BasePrefixCache,
    EvictParams,
    InsertParams,
    KVCacheEventMixin,
    MatchPrefixParams,
    RadixCache,
    RadixKey,
)
from engine_cache.tree import events as events_module
from kv_events.errors import InvalidValueError
from kv_events.hashing import namespace_seed
from kv_events.schema import AllBlocksCleared, BlockRemoved, BlockStored, StorageMedium
from tests.support.log.records import words


def make_cache(**options):
    options.setdefault("page_size", 4)
    cache = RadixCache(enable_kv_cache_events=True, **options)
    assert cache.take_events() == [AllBlocksCleared()]
    return cache


def insert(cache, tokens, extra_key=None):
    return cache.insert(InsertParams(RadixKey(tokens, extra_key)))


def rolling(tokens, page_size, seed=1337, width=None):
    """Independent reference: sequence hashes computed with the xxhash package. seed: seed of the local hashes."""
    width = width or page_size
    result = list[int]()
    for start in range(0, len(tokens) - width + 1, page_size):
        local = xxhash.xxh3_64_intdigest(struct.pack(f"<{width}I", *tokens[start : start + width]), seed)
        pair = struct.pack("<QQ", result[-1], local) if result else None
        result.append(xxhash.xxh3_64_intdigest(pair, 1337) if pair else local)
    return result


def test_the_mixins_take_events_wins():
    assert RadixCache.take_events is KVCacheEventMixin.take_events
    assert RadixCache.take_events is not BasePrefixCache.take_events  # type: ignore[comparison-overlap]


def test_a_store_is_one_event_a_page_chained_to_the_page_before_it():
    cache = make_cache()
    insert(cache, [1, 2, 3, 4])
    insert(cache, range(1, 13))
    hashes = [-3488128144981237669, 5674439469042975057, -1307369107475853156]
    sequence = rolling(list(range(1, 13)), 4)
    assert cache.take_events() == [
        BlockStored([h], parent, [i, i + 1, i + 2, i + 3], 4, None, StorageMedium.GPU, None, words([s]))
        for h, parent, i, s in zip(hashes, [None, *hashes], (1, 5, 9), sequence, strict=False)
    ]


def test_bigram_pages_carry_pairs():
    cache = make_cache(page_size=2, is_eagle=True)
    insert(cache, [1, 2, 3, 4, 5])
    first, second = cache.take_events()
    assert first.token_ids == [(1, 2), (2, 3)]
    assert first.block_hashes == [-1303529142941650691]
    assert (second.token_ids, second.block_hashes) == ([(3, 4), (4, 5)], [7461429976246528554])
    assert second.parent_block_hash == first.block_hashes[0]
    assert first.sequence_hashes + second.sequence_hashes == words(rolling([1, 2, 3, 4, 5], 2, width=3))


def test_a_namespace_is_named_and_seeds_the_sequence_hashes():
    cache = make_cache()
    insert(cache, [1, 2, 3, 4], "x")
    (stored,) = cache.take_events()
    assert stored.extra_key == "x"
    assert stored.block_hashes == [-3488128144981237669]
    assert stored.sequence_hashes == words([0x32D40E0B05E9F0AE])
    cache.evict(EvictParams(4))
    assert cache.take_events() == [BlockRemoved([-3488128144981237669], StorageMedium.GPU, "x")]


def test_the_owner_reports_what_an_extra_key_means():
    cache = make_cache(seed_of_extra_key=lambda key: namespace_seed(lora_name=key))
    insert(cache, [1, 2, 3, 4], "ad")
    assert cache.take_events()[0].sequence_hashes == words([0xE31F2294523CAC4F])


def test_hashes_are_kept_on_the_node_with_events_on():
    cache = make_cache()
    insert(cache, [1, 2, 3, 4])
    (node,) = cache.root_node.children.values()
    assert [bytes.fromhex(h) for h in node.hash_value] == [hashlib.sha256(struct.pack("<4I", 1, 2, 3, 4)).digest()]
    assert len(node.sequence_hash) == 1


def test_events_off_cost_no_hash(monkeypatch):
    calls = []
    monkeypatch.setattr(events_module, "compute_node_hash_values", lambda *a: calls.append(a))
    monkeypatch.setattr(events_module, "compute_node_sequence_hashes", lambda *a: calls.append(a))
    cache = RadixCache(page_size=4)
    insert(cache, range(12))
    insert(cache, [0, 1, 2, 3, 9, 9, 9, 9])
    cache.evict(EvictParams(100))
    cache.reset()
    assert calls == []
    assert cache.kv_event_queue == []
    assert cache.take_events() == []


def test_removes_name_what_was_stored_even_after_a_split():
    cache = make_cache()
    insert(cache, range(16))
    stored = {event.block_hashes[0] for event in cache.take_events()}
    insert(cache, [0, 1, 2, 3, 4, 5, 6, 7, 50, 51, 52, 53])
    stored |= {event.block_hashes[0] for event in cache.take_events()}
    cache.evict(EvictParams(100))
    removed = [event.block_hashes[0] for event in cache.take_events()]
    assert len(removed) == 5
    assert set(removed) == stored


def test_a_split_is_silent_and_keeps_the_hashes():
    cache = make_cache()
    insert(cache, range(16))
    cache.take_events()
    before = [(page.block_hash, page.sequence_hash) for page in cache.iter_resident(StorageMedium.GPU)]
    cache.match_prefix(MatchPrefixParams(RadixKey([*range(8), 99, 99, 99, 99])))
    assert cache.take_events() == []
    pages = list(cache.iter_resident(StorageMedium.GPU))
    assert len({page.node.id for page in pages}) == 2
    assert [(page.block_hash, page.sequence_hash) for page in pages] == before


def test_parents_are_stored_before_and_removed_after_their_children():
    cache = make_cache()
    insert(cache, range(8))
    insert(cache, [*range(4), 9, 9, 9, 9])
    upper = cache.take_events()[0].block_hashes[0]
    cache.evict(EvictParams(100))
    assert cache.take_events()[-1].block_hashes == [upper]


@pytest.mark.parametrize("medium", [None, *StorageMedium])
def test_the_medium_is_gpu_by_default(medium):
    cache = make_cache()
    insert(cache, [1, 2, 3, 4])
    cache.take_events()
    (node,) = cache.root_node.children.values()
    cache.events.store(node, medium)
    cache.events.remove(node, medium=medium)
    assert [event.medium for event in cache.take_events()] == [medium or StorageMedium.GPU] * 2


def test_media_are_their_strings_on_the_wire_too():
    assert list(StorageMedium) == ["GPU", "CPU_PINNED", "DISK", "EXTERNAL"]
    for medium in StorageMedium:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(medium)) == medium.value


def test_taking_events_empties_the_queue():
    cache = make_cache()
    insert(cache, range(8))
    assert len(cache.take_events()) == 2
    assert cache.take_events() == []


def test_reset_reports_it_after_what_was_not_taken_yet():
    cache = make_cache()
    insert(cache, [1, 2, 3, 4])
    cache.reset()
    stored, cleared = cache.take_events()
    assert isinstance(stored, BlockStored)
    assert cleared == AllBlocksCleared()


def test_resident_pages_are_listed_parents_first_with_all_hashes():
    cache = make_cache()
    insert(cache, range(8), "x")
    insert(cache, [*range(4), 9, 9, 9, 9], "x")
    events = {event.block_hashes[0]: event for event in cache.take_events()}
    seen = {None}
    for page in cache.iter_resident(StorageMedium.GPU):
        event = events.pop(page.block_hash)
        assert page.parent_block_hash in seen
        assert (page.parent_block_hash, page.token_ids, page.extra_key) == (
            event.parent_block_hash,
            event.token_ids,
            event.extra_key,
        )
        assert words([page.sequence_hash]) == event.sequence_hashes
        seen.add(page.block_hash)
    assert events == {}


def test_a_device_cache_holds_nothing_on_other_tiers():
    cache = make_cache()
    insert(cache, range(8))
    assert list(cache.iter_resident(StorageMedium.CPU)) == []


@pytest.mark.parametrize("medium", [StorageMedium.DISK, StorageMedium.EXTERNAL])
def test_a_store_is_no_medium_of_the_tree(medium):
    cache = RadixCache(page_size=2, enable_kv_cache_events=True)
    with pytest.raises(InvalidValueError, match=f"medium.*{medium.value}.*iter_announced"):
        cache.iter_resident(medium)


def test_event_values_are_plain_python():
    cache = make_cache()
    cache.insert(InsertParams(RadixKey(np.arange(4, dtype=np.uint32))))
    (event,) = cache.take_events()
    assert {type(v) for v in (*event.block_hashes, *event.token_ids)} == {int}
