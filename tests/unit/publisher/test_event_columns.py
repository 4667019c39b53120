"""Conversion of engine events to columns."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_events.hashing import namespace_seed, sequence_hashes
from kv_events.schema import BlockRemoved, BlockStored, StorageMedium
from publisher.event_columns import (
    MAX_PAGES_PER_EVENT,
    InvalidEventError,
    PageEvents,
    check_extra_key,
    derived_columns,
    medium_index,
    removed_words,
    stored_columns,
    token_rows,
)
from tests.support.log.records import words


def stored(**fields: Any) -> BlockStored:
    values = {
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": list(range(8)),
        "block_size": 4,
        "sequence_hashes": words([11, 12]),
        **fields,
    }
    return BlockStored(**values)


def test_columns_state_what_the_events_state() -> None:
    columns = stored_columns(
        [stored(), stored(block_hashes=[3], parent_block_hash=2, token_ids=[], sequence_hashes=words([13]))], 4
    )
    assert columns.block_hashes.tolist() == [1, 2, 3]
    assert columns.hashes.tolist() == [11, 12, 13]
    assert columns.lengths.tolist() == [2, 1]
    assert columns.parents.tolist() == [0, 2]
    assert columns.has_parent.tolist() == [0, 1]


@pytest.mark.parametrize("names", [[-1, -(2**63)], [2**64 - 1, 2**63], [-1, 2**63]])
def test_signed_and_unsigned_block_hashes_are_the_same_name(names: list[int]) -> None:
    assert removed_words([BlockRemoved(names)]).tolist() == [2**64 - 1, 2**63]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"block_hashes": "ab"}, "type"),
        ({"block_hashes": b"ab"}, "type"),
        ({"block_hashes": None}, "type"),
        ({"block_hashes": [1, "2"]}, "type"),
        ({"block_hashes": [1.0, 2.5]}, "type"),
        ({"block_hashes": [1, 2**64]}, "hash_range"),
        ({"block_hashes": [1, -(2**63) - 1]}, "hash_range"),
        ({"block_hashes": [1]}, "hash_count"),
        ({"sequence_hashes": words([11])}, "hash_count"),
        ({"sequence_hashes": b"12345678901"}, "hash_count"),
        ({"sequence_hashes": [11, 12]}, "type"),
        ({"parent_block_hash": "root"}, "type"),
        ({"parent_block_hash": 2**70}, "hash_range"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": -4}, "block_size"),
        ({"block_size": 2**70}, "block_size"),
        ({"block_size": None}, "block_size"),
        ({"block_size": [4]}, "type"),
        ({"token_ids": [1, 2, 3]}, "token_count"),
        ({"token_ids": 8}, "type"),
    ],
)
def test_a_bad_store_is_refused_by_reason(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidEventError) as error:
        stored_columns([stored(**fields)], 4)
    assert error.value.reason == reason or (reason == "hash_count" and error.value.reason == "token_count")


def test_an_event_of_too_many_pages_is_refused() -> None:
    names = [0] * (MAX_PAGES_PER_EVENT + 1)
    with pytest.raises(InvalidEventError, match="262145 pages, at most 262144"):
        removed_words([BlockRemoved(names)])


@pytest.mark.parametrize("medium", ["gpu", "TAPE", 3, ["GPU"], b"GPU"])
def test_an_unknown_medium_is_refused(medium: Any) -> None:
    with pytest.raises(InvalidEventError) as error:
        medium_index(medium)
    assert error.value.reason == "medium"


def test_media_are_tiers_and_none_is_the_fastest() -> None:
    assert [medium_index(m) for m in (None, *StorageMedium)] == [0, 0, 1, 2, 3]
    assert medium_index("CPU_PINNED") == 1


@pytest.mark.parametrize(("key", "reason"), [(7, "type"), ("\ud800", "extra_key"), ("x" * 1025, "extra_key")])
def test_a_bad_extra_key_is_refused(key: Any, reason: str) -> None:
    with pytest.raises(InvalidEventError) as error:
        check_extra_key(key)
    assert error.value.reason == reason


def test_hashes_are_derived_from_tokens_seed_and_parent() -> None:
    event = stored(sequence_hashes=b"", extra_key="salt")
    expected = sequence_hashes(np.arange(8, dtype=np.uint32), 4, namespace_seed(cache_salt="salt"), 99)
    assert derived_columns(event, 4, 99).hashes.tolist() == expected.tolist()


def test_hashes_are_derived_from_pairs() -> None:
    pairs = [(i, i + 1) for i in range(8)]
    expected = sequence_hashes(np.arange(9, dtype=np.uint32), 4, is_bigram=True)
    assert derived_columns(stored(token_ids=pairs, sequence_hashes=b""), 4, None).hashes.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([], "unidentified"),
        ([-1, *range(7)], "tokens"),
        ([2**32, *range(7)], "tokens"),
        (["x", *range(7)], "tokens"),
        ([(1, 2), (9, 3), *[(3, 3)] * 6], "tokens"),
        ([(1, 2, 3)] * 8, "tokens"),
        ([(1, 2), 3, 4, 5, 6, 7, 8, 9], "type"),
    ],
)
def test_pages_that_cannot_be_named_are_refused(tokens: Any, reason: str) -> None:
    with pytest.raises(InvalidEventError) as error:
        derived_columns(stored(token_ids=tokens, sequence_hashes=b""), 4, None)
    assert error.value.reason == reason


def test_token_rows_are_the_pages_tokens() -> None:
    assert token_rows(stored(), 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    pairs = [(i, i + 1) for i in range(8)]
    assert token_rows(stored(token_ids=pairs), 4).tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    assert token_rows(stored(token_ids=[]), 4).shape == (0, 0)


@given(st.lists(st.integers(0, 25), max_size=12), st.integers(1, 10), st.randoms(use_true_random=False))
def test_parts_of_columns_state_what_the_whole_states(lengths: list[int], max_pages: int, random: Random) -> None:
    num_pages = sum(lengths)
    whole = PageEvents(
        np.arange(num_pages, dtype=np.uint64) + 1000,
        np.arange(num_pages, dtype=np.uint64) + 2000,
        np.array(lengths, np.int64),
        np.arange(len(lengths), dtype=np.uint64),
        np.array([random.randrange(2) for _ in lengths], np.uint8),
        np.array([random.randrange(8) for _ in lengths], np.uint8),
    )
    parts = list(whole.parts(max_pages))
    assert [page for part in parts for page in pages_of(part)] == pages_of(whole)
    for part in parts:
        assert len(part.block_hashes) == part.lengths.sum() <= max_pages or part is whole
        assert len(part.kinds) == len(part.lengths) == len(part.parents) == len(part.has_parent)


def pages_of(events: PageEvents) -> list[tuple[int, int, int, int | None]]:
    """Return the kind, both hashes and the parent of every page."""
    rows, page = [], 0
    for length, parent, has_parent, kind in zip(*events[2:], strict=True):
        before = int(parent) if has_parent else None
        for _ in range(length):
            block_hash = int(events.block_hashes[page])
            rows.append((int(kind), block_hash, int(events.hashes[page]), before))
            before, page = block_hash, page + 1
    return rows
