import pytest

from engine_cache import CacheStateError, RadixKey
from engine_cache.tree.lru import LruList
from engine_cache.tree.node import TreeNode


@pytest.fixture
def nodes():
    return [TreeNode(i, RadixKey([i]), None, None, 0, 0, has_states=True) for i in range(4)]


@pytest.fixture
def lru(nodes):
    lru = LruList(0)
    for node in nodes[:3]:
        lru.append(node)
    yield lru
    lru.check()


def ids(lru):
    return [node.id for node in lru]


def test_nodes_come_in_the_order_of_their_last_use(lru, nodes):
    assert ids(lru) == [0, 1, 2]
    lru.move_to_newest(nodes[0])
    assert ids(lru) == [1, 2, 0]
    assert (lru.oldest(), lru.newer_than(nodes[2]), lru.newer_than(nodes[0])) == (nodes[1], nodes[0], None)


def test_a_node_can_be_put_right_below_another(lru, nodes):
    lru.insert_below(nodes[3], nodes[0])
    assert ids(lru) == [3, 0, 1, 2]


def test_a_removed_node_can_come_back(lru, nodes):
    lru.remove(nodes[1])
    assert (ids(lru), len(lru), nodes[1] in lru) == ([0, 2], 2, False)
    lru.append(nodes[1])
    assert (ids(lru), len(lru), nodes[1] in lru) == ([0, 2, 1], 3, True)


def test_an_empty_list_has_no_oldest():
    lru = LruList(1)
    assert (lru.oldest(), len(lru), ids(lru)) == (None, 0, [])
    lru.check()


def test_lists_of_two_kinds_do_not_see_each_other(lru, nodes):
    other = LruList(1)
    other.append(nodes[2])
    other.append(nodes[0])
    lru.remove(nodes[2])
    assert (ids(lru), ids(other)) == ([0, 1], [2, 0])
    other.check()


def test_a_node_is_in_a_list_at_most_once(lru, nodes):
    with pytest.raises(CacheStateError, match="node 1 is in list 0 already"):
        lru.append(nodes[1])
    assert len(lru) == 3


def test_what_is_not_there_is_neither_removed_nor_moved_nor_a_place(lru, nodes):
    for refused in (lru.remove, lru.move_to_newest, lambda node: lru.insert_below(nodes[1], node)):
        with pytest.raises(CacheStateError, match="node 3 is not in list 0"):
            refused(nodes[3])
    assert ids(lru) == [0, 1, 2]


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda lru, n: n[1].older.__setitem__(0, n[2]), "neighbour of node 0"),
        (lambda lru, n: n[2].newer.__setitem__(0, None), "neighbour of node 2"),
        (lambda lru, n: setattr(lru, "_len", 7), "3 nodes linked != 7 counted"),
    ],
)
def test_check_finds_damage(nodes, damage, what):
    lru = LruList(0)
    for node in nodes[:3]:
        lru.append(node)
    damage(lru, nodes)
    with pytest.raises(CacheStateError, match=what):
        lru.check()
