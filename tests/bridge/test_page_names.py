"""Sequence hashes of pages with adapters, salts, objects and token pairs, in all forms that engines send."""

from typing import Any

import pytest

from tests.rigs.bridge import GPU, Rig, on
from tests.support.engines.event_payloads import Event, names_of, pairs, payload, removed, stored

TOKENS = list(range(100, 116))
NAMES = names_of(TOKENS)
HASHES = [11, 12, 13, 14]
PAIRED = [*TOKENS, 7]
FIRST, SECOND = "00000000deadbeef" + "0" * 48, "0" * 15 + "7" + "f" * 48
"""Identifiers of objects: the first 16 digits count."""


def whole(**fields: Any) -> list[Event]:
    """A store of the whole prompt."""
    return [stored(HASHES, TOKENS, **fields)]


def halves(**fields: Any) -> list[Event]:
    """Two stores of the prompt. Only the first has the fields."""
    return [stored(HASHES[:2], TOKENS[:8], **fields), stored(HASHES[2:], TOKENS[8:], parent=12)]


# fmt: off
CASES: list[tuple[str, list[Event], list[int]]] = [
    ("pairs of tokens",
     [stored(HASHES[:2], pairs(PAIRED[:9])), stored(HASHES[2:], pairs(PAIRED[8:]), parent=12)],
     names_of(PAIRED, is_bigram=True)),
    ("an adapter", whole(lora_name="ad"), names_of(TOKENS, lora="ad")),
    ("an adapter with a number", whole(lora_name="ad", lora_id=3), names_of(TOKENS, lora="ad")),
    ("an adapter in extra keys", whole(lora_name="ad", extra_keys=[["ad"]] * 4), names_of(TOKENS, lora="ad")),
    ("an adapter without a name", whole(lora_id=3), names_of(TOKENS, lora="3")),
    ("a salt and an adapter", whole(cache_salt="s", lora_name="ad"), names_of(TOKENS, lora="ad", salt="s")),
    ("children inherit a salt among extra keys", halves(extra_keys=[["s"], None]), names_of(TOKENS, salt="s")),
    ("a salt with the text of the adapter's name", whole(lora_name="x", extra_keys=[["x", "x"], *[["x"]] * 3]),
     names_of(TOKENS, lora="x", salt="x")),
    ("objects", whole(extra_keys=[None, [FIRST], [[SECOND, 12], FIRST], None]),
     names_of(TOKENS, objects=[[], [0xDEADBEEF], [7, 0xDEADBEEF], []])),
    ("a page with one object has the peer's name", [stored([1], [1, 2, 3, 4], extra_keys=[[FIRST]])],
     [15207512089340001072]),
    ("objects of a salted prompt",
     [stored(HASHES, range(1, 17), extra_keys=[[FIRST, "x"], None, [FIRST, SECOND], None])],
     [0x237426C75E38349F, 0x5D7D327961598A46, 0x2DE98B0DC4859AC9, 0xF93311B40B476FF4]),
]
# fmt: on


@pytest.mark.parametrize(("events", "names"), [pytest.param(*case, id=name) for name, *case in CASES])
def test_a_page_has_the_name_of_all_that_its_content_depends_on(events: list[Event], names: list[int]) -> None:
    assert Rig().take(*events, form="map").pages == on(GPU, names)


def test_a_salt_in_a_map_where_others_have_the_adapters_name() -> None:
    event = ["BlockStored", HASHES, None, TOKENS, 4, None, "GPU", {"cache_salt": "s", "new": [1]}]
    assert Rig().take_payload(payload(event)).pages == on(GPU, names_of(TOKENS, salt="s"))


def test_pairs_that_do_not_overlap_are_a_mistake() -> None:
    rig = Rig().take(stored([1], [[1, 2], [3, 4], [4, 5], [5, 6]]), stored([2], TOKENS[:4]))
    assert rig.pages == on(GPU, NAMES[:1])
    assert rig.counters.bad_events == {"tokens": 1}


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


def test_equal_hashes_under_two_salts_are_two_pages_and_one_removal_means_both() -> None:
    rig = Rig().take(*whole(), *whole(cache_salt="a"), *whole(cache_salt="b"), form="map")
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


def test_extra_keys_that_are_unknown_keep_a_page_apart_from_the_plain_one() -> None:
    rig = Rig().take(*whole(extra_keys=[None, [b"embeds"], [{"kind": "new"}], [["?", "?"]]]))
    assert len(rig.pages) == 4
    assert rig.pages & on(GPU, NAMES) == on(GPU, NAMES[:1])


@pytest.mark.parametrize("salt", ["s", "ab" * 32])
def test_a_salt_is_a_guess_only_if_the_event_does_not_name_it(salt: str) -> None:
    rig = Rig().take(*whole(cache_salt=salt, extra_keys=[[salt], None, None, None]), form="map")
    assert (rig.pages, rig.counters.guessed_salts) == (on(GPU, names_of(TOKENS, salt=salt)), 0)
    assert Rig().take(*whole(extra_keys=[["s"], None, None, None])).counters.guessed_salts == 1
