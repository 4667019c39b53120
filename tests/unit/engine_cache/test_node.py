import numpy as np
import pytest

from engine_cache.tree.key import RadixKey
from engine_cache.tree.node import (
    TreeNode,
    compute_node_hash_values,
    compute_node_sequence_hashes,
    iter_nodes,
    split_node_hash_value,
    split_rows,
)
from kv_events.hashing import hash_str_to_int64

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


def root():
    node = TreeNode(0, RadixKey([]), np.empty(0, np.int64), None, 0, 0)
    node.hash_value = []
    return node


def child(parent, tokens, page_size, **key):
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
    assert compute_node_hash_values(child(root(), tokens, page_size, **key), page_size) == expected


def test_pages_further_down_chain_to_their_parents():
    upper = child(root(), [1, 2, 3, 4], 4)
    lower = child(upper, range(5, 13), 4)
    upper.hash_value = [V1]
    assert compute_node_hash_values(lower, 4) == V2
    assert hash_str_to_int64(V2[0]) == 5674439469042975057


def test_ancestors_without_hashes_get_theirs_first():
    upper = child(root(), [1, 2, 3, 4], 4)
    lower = child(upper, range(5, 13), 4)
    assert compute_node_hash_values(lower, 4) == V2
    assert upper.hash_value == [V1]


def test_hashes_once_computed_are_kept():
    node = child(root(), [1, 2, 3, 4], 4)
    node.hash_value = ["00" * 32]
    assert compute_node_hash_values(node, 4) == ["00" * 32]


def test_sequence_hashes_roll_from_the_root_down():
    upper = child(root(), range(1, 5), 4)
    lower = child(upper, range(5, 17), 4)
    assert compute_node_sequence_hashes(lower, 4, 1337).tolist() == ROLLING[1:]
    assert upper.sequence_hash.tolist() == ROLLING[:1]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_split_cuts_hashes_between_pages(page_size):
    assert split_node_hash_value(V2, page_size, page_size) == ([V2[0]], [V2[1]])
    upper, lower = split_rows(np.array([5, 6, 7], np.uint64), 2)
    assert (upper.tolist(), lower.tolist()) == ([5, 6], [7])


def test_splitting_no_hashes_gives_no_hashes():
    assert split_node_hash_value(None, 16, 16) == (None, None)
    assert split_rows(None, 1) == (None, None)


def test_a_split_inside_a_page_cannot_happen():
    with pytest.raises(AssertionError):
        split_node_hash_value(V2, 3, 2)


def test_nodes_come_parents_first():
    top = root()
    upper = child(top, [1], 1)
    left, right = child(upper, [2], 1), child(upper, [3], 1)
    order = list(iter_nodes(top))
    assert order[0] is upper
    assert set(order[1:]) == {left, right}
