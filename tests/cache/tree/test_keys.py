"""Keys and nodes: units, pages, namespaces, and the two hashes of each page."""

from array import array
from hashlib import sha256

import numpy as np
import pytest

from engine_cache import EvictParams, InsertParams, MatchPrefixParams, PagedTokenToKVPoolAllocator, RadixCache, RadixKey
from engine_cache.tree.node import (
    TreeNode,
    compute_node_hash_values,
    compute_node_sequence_hashes,
    iter_nodes,
    split_node_hash_value,
    split_rows,
)
from kv_events.errors import InvalidValueError
from kv_events.limits import MAX_EXTRA_KEY_BYTES
from tests.models.cache_checks import check_cache

PLAIN = RadixKey([1, 2, 3, 4, 5])
BIGRAM = RadixKey([1, 2, 3, 4, 5], is_bigram=True)
NUMBERS = [7, 0, 2**32 - 1]


# --- keys ---


@pytest.mark.parametrize(
    "tokens",
    [
        NUMBERS,
        tuple(NUMBERS),
        array("q", NUMBERS),
        np.array(NUMBERS, dtype=np.int64),
        np.array(NUMBERS, dtype=np.uint32),
        np.array([7, 5, 0, 5, 2**32 - 1, 5], dtype=np.uint64)[::2],
    ],
)
def test_any_sequence_of_integers_makes_the_same_key(tokens):
    key = RadixKey(tokens)
    assert (key.token_ids, list(key)) == (array("q", NUMBERS), NUMBERS)


@pytest.mark.parametrize(
    ("tokens", "extra_key", "named"),
    [
        ([1, -1], None, r"token_ids\[1\]: got -1"),
        ([1, 2, 2**32], None, r"token_ids\[2\]: got 4294967296"),
        ([2**70], None, r"token_ids\[0\]"),
        ([1, 2.5], None, r"token_ids\[1\]: got 2.5"),
        (["1"], None, r"token_ids\[0\]: got '1'"),
        (b"12345678", None, "token_ids"),
        (np.array([3, -4]), None, r"token_ids\[1\]: got -4"),
        (np.array([2**63], dtype=np.uint64), None, r"token_ids\[0\]: got 9223372036854775808"),
        (np.array([1.0]), None, "float64"),
        (np.array([[1]]), None, "one dimension"),
        ([1], "lora\ud800", "extra_key.*UTF-8"),
        ([1], "x" * (MAX_EXTRA_KEY_BYTES + 1), f"extra_key.*{MAX_EXTRA_KEY_BYTES + 1} bytes"),
        ([1], "ü" * (MAX_EXTRA_KEY_BYTES // 2 + 1), f"extra_key.*{MAX_EXTRA_KEY_BYTES + 2} bytes"),
        ([1], 7, "extra_key.*text"),
        ([1], 0, "extra_key.*text"),
        ([1], b"a", "extra_key.*text"),
    ],
)
def test_what_is_no_token_or_no_namespace_is_named_with_its_position(tokens, extra_key, named):
    with pytest.raises(InvalidValueError, match=named):
        RadixKey(tokens, extra_key)


@pytest.mark.parametrize("extra_key", ["", "x" * MAX_EXTRA_KEY_BYTES, "ü" * (MAX_EXTRA_KEY_BYTES // 2), "日本語 🙂"])
def test_the_shortest_longest_and_oddest_namespaces_are_kept(extra_key):
    assert RadixKey([1, 2], extra_key).extra_key == extra_key


def test_a_key_does_not_follow_a_caller_that_reuses_its_buffer():
    buffer = np.array([1, 2, 3], dtype=np.uint32)
    key = RadixKey(buffer)
    buffer[:] = 9
    assert list(key) == [1, 2, 3]


def test_units_are_tokens_or_pairs_of_neighbours():
    assert (len(PLAIN), list(PLAIN)) == (5, [1, 2, 3, 4, 5])
    assert (len(BIGRAM), list(BIGRAM)) == (4, [(1, 2), (2, 3), (3, 4), (4, 5)])
    for num_tokens in (0, 1):
        key = RadixKey([1] * num_tokens, is_bigram=True)
        assert (len(key), list(key)) == (0, [])


def test_slices_keep_namespace_and_kind_of_unit():
    part = RadixKey([1, 2, 3, 4, 5], "lora", is_bigram=True)[1:3]
    assert (list(part.token_ids), part.extra_key, part.is_bigram) == ([2, 3, 4], "lora", True)
    assert len(BIGRAM[2:2].raw) == len(BIGRAM[3:1].raw) == 0
    with pytest.raises(ValueError, match="step"):
        PLAIN[::2]


def test_an_index_gives_a_key_of_one_unit():
    for i in (0, 2, -1, -4):
        assert (list(PLAIN[i]), list(BIGRAM[i])) == ([list(PLAIN)[i]], [list(BIGRAM)[i]])
    for i in (4, -5):
        with pytest.raises(IndexError, match="length 4"):
            BIGRAM[i]


def test_page_alignment_cuts_to_whole_pages_of_units():
    assert list(PLAIN.page_aligned(2).token_ids) == [1, 2, 3, 4]
    assert list(BIGRAM.page_aligned(3).token_ids) == [1, 2, 3, 4]
    assert len(PLAIN.page_aligned(6)) == 0
    assert list(PLAIN[:4].pages(2)) == [[1, 2], [3, 4]]
    assert list(BIGRAM.pages(2)) == [[(1, 2), (2, 3)], [(3, 4), (4, 5)]]


def test_the_bigram_view_cuts_the_value_and_leaves_the_callers_key_alone():
    value = np.arange(5)
    key, cut = PLAIN.maybe_to_bigram_view(True, value)
    for _ in range(2):
        assert (list(key), cut.tolist()) == (list(BIGRAM), [0, 1, 2, 3])
        key, cut = key.maybe_to_bigram_view(True, cut)
    assert not PLAIN.is_bigram
    key, same = PLAIN.maybe_to_bigram_view(False, value)
    assert (key is PLAIN, same is value) == (True, True)


@pytest.mark.parametrize(
    ("other", "page_size", "expected"),
    [([1, 2, 3, 9], 2, 2), ([1, 2, 3, 9], 1, 3), ([9], 1, 0), ([], 1, 0), ([1, 2, 3, 4, 5, 6, 7], 2, 4)],
)
def test_a_match_counts_whole_equal_pages(other, page_size, expected):
    assert PLAIN.match(RadixKey(other), page_size) == RadixKey(other).match(PLAIN, page_size) == expected


@pytest.mark.parametrize("page_size", [1, 2])
def test_a_bigram_match_counts_pairs_both_of_whose_tokens_agree(page_size):
    assert BIGRAM.match(RadixKey([1, 2, 3, 9, 9], is_bigram=True), page_size) == 2
    assert BIGRAM.match(RadixKey([1], is_bigram=True), page_size) == 0


@pytest.mark.parametrize("at", [64, 65, 127, 1024, 1999])
def test_long_keys_match_up_to_the_token_where_they_differ(at):
    tokens = np.random.default_rng(5).integers(0, 2**32, 2000)
    other = tokens.copy()
    other[at] ^= 1
    assert RadixKey(tokens).match(RadixKey(other), 1) == at
    assert RadixKey(tokens).match(RadixKey(other[64:]), 1, start=64) == at - 64


@pytest.mark.parametrize(("other", "field"), [(RadixKey([1], "a"), "extra_key"), (BIGRAM, "is_bigram")])
def test_keys_of_two_namespaces_or_kinds_of_unit_do_not_compare(other, field):
    with pytest.raises(ValueError, match=field):
        PLAIN.match(other, 1)


def test_child_keys_are_the_first_page_in_its_namespace():
    keys = [key.child_key(size) for key in (PLAIN, BIGRAM, RadixKey([1, 2, 3], "L")) for size in (1, 2)]
    assert keys == [1, (1, 2), (1, 2), ((1, 2), (2, 3)), ("L", 1), ("L", (1, 2))]


@pytest.mark.parametrize("is_bigram", [False, True])
def test_page_keys_are_equal_exactly_when_child_keys_are(is_bigram):
    rng = np.random.default_rng(1)
    keys = [RadixKey(rng.integers(0, 2, 5), extra, is_bigram) for extra in (None, "a", "b") for _ in range(12)]
    for a in keys:
        for b in keys:
            assert (a.page_key(2, 1) == b.page_key(2, 1)) == (a[1:].child_key(2) == b[1:].child_key(2))


def test_the_hash_of_a_page_chains_to_the_prior_one():
    first = PLAIN.hash_page(0, 2)
    assert first == sha256(np.array([1, 2], "<u4").tobytes()).hexdigest()
    second = BIGRAM.hash_page(2, 4, first)
    assert second == sha256(bytes.fromhex(first) + np.array([3, 4, 4, 5], "<u4").tobytes()).hexdigest()
    with pytest.raises(ValueError, match="page"):
        PLAIN.hash_page(4, 6)


# --- namespaces in a tree ---


def test_an_empty_extra_key_is_a_namespace_of_its_own():
    cache = RadixCache(page_size=1, enable_kv_cache_events=True)
    cache.take_events()
    for extra_key in (None, ""):
        assert len(cache.match_prefix(MatchPrefixParams(RadixKey([1, 2], ""))).device_indices) == 0
        cache.insert(InsertParams(RadixKey([1, 2], extra_key)))
    cache.evict(EvictParams(2))
    namespaces = [event.extra_key for event in cache.take_events()]  # type: ignore[union-attr]
    assert namespaces == [None, None, "", "", None, None]
    assert len(cache.match_prefix(MatchPrefixParams(RadixKey([1, 2], ""))).device_indices) == 2


def test_pages_that_cannot_be_named_for_events_leave_the_tree_as_it_was():
    seeds, pool = dict[str, int](), PagedTokenToKVPoolAllocator(16, 2)
    cache = RadixCache(
        page_size=2, allocator=pool, enable_kv_cache_events=True, seed_of_extra_key=lambda key: seeds[key]
    )
    cache.take_events()
    key, rows = RadixKey([1, 2, 3, 4], "tenant"), pool.alloc(4)
    with pytest.raises(KeyError, match="tenant"):
        cache.insert(InsertParams(key, rows))
    assert (cache.root_node.children, cache.take_events(), cache.evictable_size()) == ({}, [], 0)
    check_cache(cache, rows)
    seeds["tenant"] = 7
    assert cache.insert(InsertParams(key, rows)).prefix_len == 0
    assert (len(cache.take_events()), cache.evict(EvictParams(4)).num_tokens_evicted) == (2, 4)
    assert len(cache.take_events()) == 2


# --- hashes of nodes ---

V1 = "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72"
V2 = [
    "4ebfa8a1f3c341517621838c6e1b9aa350307e3f00b3cbd1a07ef740f54396d6",
    "eddb4ab93695109cc0853fa0167c53aa0dc373ece757e530a734981168bdeebc",
]
V3 = [
    "ede8ef26a097f0fd889f9f39f6f5af921370630b164c4a4fa28eb716b2df9269",
    "678c5307f2a02a2aaf8edbeb80ebac13663f70e14a4fc8d5d62b77e702841e4b",
]
V4 = [
    "df3f619804a92fdb4057192dc43dd748ea778adc52bc498ce80524c014b81119",
    "629b8876c77404bf98189b363cecd93ccad38f46741403e7d66d5a872ab84048",
    "058edae57149580624a45761f2d230c4768752900d5f640e8384620a8d04066d",
]
V5 = [
    "34fb5c825de7ca4aea6e712f19d439c1da0c92c37b423936c5f618545ca4fa1f",
    "09a03256b6804b3b8ac83c302159e0be1a7825b2534ca239ee68e6d6ffb623e7",
    "7d11367acb8c9543b49f21e066fce3f10730ad23f05186aac9c46463d7bf9744",
]
# rolling hashes of tokens 1 to 16, block size 4, seed 1337, computed by another implementation
ROLLING = [0xCB38E4D7FB2DCA5C, 0x44A2B2379D6D3C3D, 0xAEA1E67A6C80CF84, 0x1AAA5EB6E2524A3B]


def child(parent, tokens, page_size, **key):
    """Return a new node below a node, or below a new root."""
    if parent is None:
        parent = TreeNode(0, RadixKey([]), np.empty(0, np.int64), None, 0, 0)
        parent.hash_value = []
    radix_key = RadixKey(tokens, **key)
    node = TreeNode(parent.id + 1, radix_key, np.arange(len(radix_key)), parent, 0, 0)
    parent.children[radix_key.page_key(page_size)] = node
    return node


@pytest.mark.parametrize(
    ("tokens", "page_size", "key", "expected"),
    [
        ([1, 2, 3, 4], 4, {}, [V1]),
        ([1, 2, 3, 4, 5], 2, {"is_bigram": True}, V3),
        ([0, 128000, 4294967295], 1, {}, V4),
        ([1, 2, 3, 4], 1, {"is_bigram": True}, V5),
        ([1, 2, 3, 4], 4, {"extra_key": "lora-7"}, [V1]),
    ],
)
def test_pages_below_the_root_have_the_engines_hashes(tokens, page_size, key, expected):
    assert compute_node_hash_values(child(None, tokens, page_size, **key), page_size) == expected


def test_pages_further_down_chain_to_their_parents_which_get_missing_hashes_first():
    upper = child(None, [1, 2, 3, 4], 4)
    lower = child(upper, range(5, 13), 4)
    assert (compute_node_hash_values(lower, 4), upper.hash_value) == (V2, [V1])
    upper.hash_value = ["00" * 32]
    assert compute_node_hash_values(upper, 4) == ["00" * 32], "it is kept"


def test_sequence_hashes_roll_from_the_root_down():
    upper = child(None, range(1, 5), 4)
    lower = child(upper, range(5, 17), 4)
    assert compute_node_sequence_hashes(lower, 4, 1337).tolist() == ROLLING[1:]
    assert upper.sequence_hash.tolist() == ROLLING[:1]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_split_cuts_hashes_between_pages(page_size):
    assert split_node_hash_value(V2, page_size, page_size) == ([V2[0]], [V2[1]])
    upper, lower = split_rows(np.array([5, 6, 7], np.uint64), 2)
    assert (upper.tolist(), lower.tolist()) == ([5, 6], [7])
    assert split_node_hash_value(None, page_size, page_size) == (None, None)
    assert split_rows(None, 1) == (None, None)


def test_a_split_inside_a_page_cannot_happen():
    with pytest.raises(AssertionError):
        split_node_hash_value(V2, 3, 2)


def test_nodes_come_parents_first():
    upper = child(None, [1], 1)
    left, right = child(upper, [2], 1), child(upper, [3], 1)
    first, *others = iter_nodes(upper.parent)
    assert (first, set(others)) == (upper, {left, right})
