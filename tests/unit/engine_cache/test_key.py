from array import array
from hashlib import sha256

import numpy as np
import pytest

from engine_cache.tree.key import RadixKey
from kv_events.errors import InvalidValueError

PLAIN = RadixKey([1, 2, 3, 4, 5])
BIGRAM = RadixKey([1, 2, 3, 4, 5], is_bigram=True)


@pytest.mark.parametrize(
    "tokens",
    [
        [7, 0, 2**32 - 1],
        (7, 0, 2**32 - 1),
        array("q", [7, 0, 2**32 - 1]),
        np.array([7, 0, 2**32 - 1], dtype=np.int64),
        np.array([7, 0, 2**32 - 1], dtype=np.uint32),
        np.array([7, 5, 0, 5, 2**32 - 1, 5], dtype=np.uint64)[::2],
    ],
)
def test_any_sequence_of_integers_makes_the_same_key(tokens):
    key = RadixKey(tokens)
    assert key.token_ids == array("q", [7, 0, 2**32 - 1])
    assert list(key) == [7, 0, 2**32 - 1]


@pytest.mark.parametrize(
    ("tokens", "named"),
    [
        ([1, -1], r"token_ids\[1\]: got -1"),
        ([1, 2, 2**32], r"token_ids\[2\]: got 4294967296"),
        ([2**70], r"token_ids\[0\]"),
        ([1, 2.5], r"token_ids\[1\]: got 2.5"),
        (["1"], r"token_ids\[0\]: got '1'"),
        (b"12345678", "token_ids"),
        (np.array([3, -4]), r"token_ids\[1\]: got -4"),
        (np.array([2**63], dtype=np.uint64), r"token_ids\[0\]: got 9223372036854775808"),
        (np.array([1.0]), "float64"),
        (np.array([[1]]), "one dimension"),
    ],
)
def test_a_token_that_is_none_is_named_with_its_position(tokens, named):
    with pytest.raises(InvalidValueError, match=named):
        RadixKey(tokens)


def test_a_key_does_not_follow_a_caller_that_reuses_its_buffer():
    buffer = np.array([1, 2, 3], dtype=np.uint32)
    key = RadixKey(buffer)
    buffer[:] = 9
    assert list(key) == [1, 2, 3]


def test_units_are_tokens_or_pairs_of_neighbours():
    assert (len(PLAIN), list(PLAIN)) == (5, [1, 2, 3, 4, 5])
    assert (len(BIGRAM), list(BIGRAM)) == (4, [(1, 2), (2, 3), (3, 4), (4, 5)])


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_a_bigram_key_without_a_pair_is_empty(num_tokens):
    key = RadixKey([1] * num_tokens, is_bigram=True)
    assert len(key) == 0
    assert list(key) == []


def test_slices_keep_namespace_and_kind_of_unit():
    part = RadixKey([1, 2, 3, 4, 5], "lora", is_bigram=True)[1:3]
    assert (list(part.token_ids), part.extra_key, part.is_bigram) == ([2, 3, 4], "lora", True)


def test_an_empty_bigram_slice_has_no_raw_token():
    assert len(BIGRAM[2:2].raw) == 0
    assert len(BIGRAM[3:1].raw) == 0


@pytest.mark.parametrize("i", [0, 2, -1, -4])
def test_indexing_gives_a_key_of_one_unit(i):
    assert list(PLAIN[i]) == [list(PLAIN)[i]]
    assert list(BIGRAM[i]) == [list(BIGRAM)[i]]


@pytest.mark.parametrize("i", [4, -5])
def test_indexing_out_of_range_raises(i):
    with pytest.raises(IndexError, match="length 4"):
        BIGRAM[i]


def test_slices_have_step_one():
    with pytest.raises(ValueError, match="step"):
        PLAIN[::2]


def test_page_alignment_cuts_to_whole_pages_of_units():
    assert list(PLAIN.page_aligned(2).token_ids) == [1, 2, 3, 4]
    assert list(BIGRAM.page_aligned(3).token_ids) == [1, 2, 3, 4]
    assert len(PLAIN.page_aligned(6)) == 0


def test_the_bigram_view_cuts_the_value_and_leaves_the_callers_key_alone():
    value = np.arange(5)
    key, cut = PLAIN.maybe_to_bigram_view(True, value)
    assert (list(key), cut.tolist()) == (list(BIGRAM), [0, 1, 2, 3])
    assert not PLAIN.is_bigram
    again, cut = key.maybe_to_bigram_view(True, cut)
    assert (list(again), cut.tolist()) == (list(BIGRAM), [0, 1, 2, 3])


def test_without_eagle_the_bigram_view_changes_nothing():
    value = np.arange(5)
    key, same = PLAIN.maybe_to_bigram_view(False, value)
    assert key is PLAIN
    assert same is value


@pytest.mark.parametrize(
    ("other", "page_size", "expected"),
    [([1, 2, 3, 9], 2, 2), ([1, 2, 3, 9], 1, 3), ([9], 1, 0), ([], 1, 0), ([1, 2, 3, 4, 5, 6, 7], 2, 4)],
)
def test_plain_match_counts_whole_equal_pages(other, page_size, expected):
    assert PLAIN.match(RadixKey(other), page_size) == expected
    assert RadixKey(other).match(PLAIN, page_size) == expected


@pytest.mark.parametrize("page_size", [1, 2])
def test_bigram_match_counts_pairs_both_of_whose_tokens_agree(page_size):
    assert BIGRAM.match(RadixKey([1, 2, 3, 9, 9], is_bigram=True), page_size) == 2
    assert BIGRAM.match(RadixKey([1], is_bigram=True), page_size) == 0


@pytest.mark.parametrize("at", [64, 65, 127, 1024, 1999])
def test_long_keys_match_up_to_the_token_where_they_part(at):
    tokens = np.random.default_rng(5).integers(0, 2**32, 2000)
    other = tokens.copy()
    other[at] ^= 1
    assert RadixKey(tokens).match(RadixKey(other), 1) == at
    assert RadixKey(tokens).match(RadixKey(other[64:]), 1, start=64) == at - 64


def test_keys_of_two_namespaces_do_not_compare():
    with pytest.raises(ValueError, match="extra_key"):
        PLAIN.match(RadixKey([1], "a"), 1)


def test_bigram_and_plain_keys_do_not_compare():
    with pytest.raises(ValueError, match="is_bigram"):
        PLAIN.match(BIGRAM, 1)


def test_child_keys_are_the_first_page_in_its_namespace():
    spaced = RadixKey([1, 2, 3], "L")
    assert PLAIN.child_key(1) == 1
    assert PLAIN.child_key(2) == (1, 2)
    assert BIGRAM.child_key(1) == (1, 2)
    assert BIGRAM.child_key(2) == ((1, 2), (2, 3))
    assert spaced.child_key(1) == ("L", 1)
    assert spaced.child_key(2) == ("L", (1, 2))


@pytest.mark.parametrize("is_bigram", [False, True])
def test_page_keys_are_equal_exactly_when_child_keys_are(is_bigram):
    rng = np.random.default_rng(1)
    keys = [RadixKey(rng.integers(0, 2, 5), extra, is_bigram) for extra in (None, "a", "b") for _ in range(12)]
    for a in keys:
        for b in keys:
            assert (a.page_key(2, 1) == b.page_key(2, 1)) == (a[1:].child_key(2) == b[1:].child_key(2))


def test_an_empty_namespace_is_kept():
    assert RadixKey([1], "").extra_key == ""


def test_pages_are_lists_of_units():
    assert list(PLAIN[:4].pages(2)) == [[1, 2], [3, 4]]
    assert list(BIGRAM.pages(2)) == [[(1, 2), (2, 3)], [(3, 4), (4, 5)]]


def test_the_page_hash_of_a_slice_chains_to_the_prior_one():
    first = PLAIN.hash_page(0, 2)
    assert first == sha256(np.array([1, 2], "<u4").tobytes()).hexdigest()
    second = BIGRAM.hash_page(2, 4, first)
    assert second == sha256(bytes.fromhex(first) + np.array([3, 4, 4, 5], "<u4").tobytes()).hexdigest()


def test_a_page_hash_outside_the_key_is_refused():
    with pytest.raises(ValueError, match="page"):
        PLAIN.hash_page(4, 6)
