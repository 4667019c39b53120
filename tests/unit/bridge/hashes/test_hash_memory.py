"""Sequence hashes of pages with adapters, salts, objects and token pairs, in all forms that engines send."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.bridge.rig import GPU, Rig, on
from tests.support.engines.event_payloads import names_of, pairs, payload, removed, stored

TOKENS = list(range(100, 116))
NAMES = names_of(TOKENS)
HASHES = [11, 12, 13, 14]


def test_tokens_may_be_pairs() -> None:
    tokens = [*TOKENS, 7]
    rig = Rig().take(stored(HASHES[:2], pairs(tokens[:9]), 4), stored(HASHES[2:], pairs(tokens[8:]), 4, parent=12))
    assert rig.pages == on(GPU, names_of(tokens, is_bigram=True))


def test_pairs_that_do_not_overlap_are_a_mistake() -> None:
    rig = Rig().take(stored([1], [[1, 2], [3, 4], [4, 5], [5, 6]]), stored([2], TOKENS[:4]))
    assert rig.pages == on(GPU, NAMES[:1])
    assert rig.counters.bad_events == {"tokens": 1}


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_name": "ad"},
        {"lora_name": "ad", "lora_id": 3},
        {"lora_name": "ad", "extra_keys": [["ad"]] * 4},
    ],
)
def test_an_adapters_pages_have_their_own_hashes(fields: dict[str, Any]) -> None:
    assert Rig().take(stored(HASHES, TOKENS, **fields)).pages == on(GPU, names_of(TOKENS, lora="ad"))


def test_an_adapter_without_a_name_goes_by_its_number() -> None:
    assert Rig().take(stored(HASHES, TOKENS, lora_id=3)).pages == on(GPU, names_of(TOKENS, lora="3"))


def test_a_salt_in_a_field_of_its_own() -> None:
    rig = Rig().take(stored(HASHES, TOKENS, cache_salt="s", lora_name="ad"), form="map")
    assert rig.pages == on(GPU, names_of(TOKENS, lora="ad", salt="s"))


def test_a_salt_in_a_map_where_others_have_the_adapters_name() -> None:
    event = ["BlockStored", HASHES, None, TOKENS, 4, None, "GPU", {"cache_salt": "s", "new": [1]}]
    assert Rig().take_payload(payload(event)).pages == on(GPU, names_of(TOKENS, salt="s"))


def test_a_salt_among_the_extra_keys_of_a_prompts_first_page_goes_down_to_its_children() -> None:
    rig = Rig().take(stored(HASHES[:2], TOKENS[:8], extra_keys=[["s"], None]))
    rig.take(stored(HASHES[2:], TOKENS[8:], parent=12))
    assert rig.pages == on(GPU, names_of(TOKENS, salt="s"))


def test_salted_and_plain_chains_may_alternate_in_one_batch() -> None:
    plain, other = [21, 22], list(range(500, 508))
    rig = Rig().take(
        stored(HASHES[:1], TOKENS[:4], extra_keys=[["s"]]),
        stored(plain[:1], other[:4]),
        stored(HASHES[1:2], TOKENS[4:8], parent=11),
        stored(plain[1:], other[4:], parent=21),
        stored(HASHES[2:], TOKENS[8:], parent=12),
    )
    assert rig.pages == on(GPU, names_of(TOKENS, salt="s")) | on(GPU, names_of(other))


def test_a_salt_with_the_text_of_the_adapters_name_is_a_salt() -> None:
    rig = Rig().take(stored(HASHES, TOKENS, lora_name="x", extra_keys=[["x", "x"], ["x"], ["x"], ["x"]]))
    assert rig.pages == on(GPU, names_of(TOKENS, lora="x", salt="x"))


def test_equal_hashes_under_two_salts_are_two_pages_and_one_removal_means_both() -> None:
    rig = Rig().take(
        stored(HASHES, TOKENS),
        stored(HASHES, TOKENS, cache_salt="a"),
        stored(HASHES, TOKENS, cache_salt="b"),
        form="map",
    )
    plain, a, b = (names_of(TOKENS, salt=salt) for salt in (None, "a", "b"))
    assert rig.pages == on(GPU, plain + a + b)
    rig.take(stored([15], TOKENS[:4], parent=14, cache_salt="b"), removed([12]), form="map")
    child = names_of(TOKENS + TOKENS[:4], salt="b")[4]
    assert rig.pages == on(GPU, [name for names in (plain, a, b) for name in names if name != names[1]] + [child])


def test_a_parent_under_another_salt_is_not_the_parent() -> None:
    rig = Rig().take(
        stored([11], TOKENS[:4], cache_salt="a"), stored([12], TOKENS[4:8], parent=11, cache_salt="b"), form="map"
    )
    assert rig.pages == on(GPU, names_of(TOKENS[:4], salt="a"))
    assert rig.counters.unknown_parents == 1


def test_multimodal_pages_are_named_by_their_objects_too() -> None:
    first, second = "00000000deadbeef" + "0" * 48, "0" * 15 + "7" + "f" * 48
    keys = [None, [first], [[second, 12], first], None]
    rig = Rig().take(stored(HASHES, TOKENS, extra_keys=keys))
    assert rig.pages == on(GPU, names_of(TOKENS, objects=[[], [0xDEADBEEF], [7, 0xDEADBEEF], []]))


def test_a_page_with_one_object_has_the_peers_name() -> None:
    rig = Rig().take(stored([1], [1, 2, 3, 4], extra_keys=[["00000000deadbeef" + "0" * 48]]))
    assert rig.pages == on(GPU, [15207512089340001072])


def test_pages_with_objects_of_a_salted_prompt_are_chained_as_any_others() -> None:
    first, second = "00000000deadbeef" + "0" * 48, "0" * 15 + "7" + "f" * 48
    event = stored(HASHES, list(range(1, 17)), extra_keys=[[first, "x"], None, [first, second], None])
    names = [0x237426C75E38349F, 0x5D7D327961598A46, 0x2DE98B0DC4859AC9, 0xF93311B40B476FF4]
    assert Rig().take(event).pages == on(GPU, names)


@pytest.mark.parametrize(
    ("fields", "last"),
    [
        ({"lora_name": "ad"}, 0x3A2B86E7E7B7D2B2),
        ({"cache_salt": "x"}, 0x592AD9BD00FFAEB5),
        ({"lora_name": "ad", "cache_salt": "x"}, 0xF825316CBB67C828),
    ],
)
def test_the_pages_of_a_namespace_are_chained_with_the_base(fields: dict[str, Any], last: int) -> None:
    tokens = list(range(1, 17))
    first = stored(HASHES[:3], tokens[:12], **fields)
    rig = Rig().take(first, stored(HASHES[3:], tokens[12:], parent=13, **fields), form="map")
    assert on(GPU, [last]) <= rig.pages
    assert len(rig.pages) == 4


def test_extra_keys_that_are_unknown_keep_a_page_apart_from_the_plain_one() -> None:
    rig = Rig().take(stored(HASHES, TOKENS, extra_keys=[None, [b"embeds"], [{"kind": "new"}], [["?", "?"]]]))
    assert len(rig.pages) == 4
    assert rig.pages & on(GPU, NAMES) == on(GPU, NAMES[:1])


@pytest.mark.parametrize("salt", ["s", "ab" * 32])
def test_a_salt_that_the_event_names_is_not_taken_for_an_object_where_the_extra_keys_have_it_too(salt: str) -> None:
    rig = Rig().take(stored(HASHES, TOKENS, cache_salt=salt, extra_keys=[[salt], None, None, None]), form="map")
    assert rig.pages == on(GPU, names_of(TOKENS, salt=salt))
    assert rig.counters.guessed_salts == 0


def test_a_salt_that_only_extra_keys_name_is_counted_as_a_guess() -> None:
    rig = Rig().take(stored(HASHES, TOKENS, extra_keys=[["s"], None, None, None]))
    assert rig.counters.guessed_salts == 1
