"""The data that an insert adopts, frees, restores and splits, for each kind of state."""

import numpy as np
import pytest

from engine_cache import EvictParams, InsertParams, RadixKey
from kv_events.errors import InvalidValueError
from tests.support.caches.checks import check_cache
from tests.support.caches.unified_rig import UnifiedRig

pytestmark = pytest.mark.torch

A, AB, ABC = [1, 1], [1, 1, 2, 2], [1, 1, 2, 2, 3, 3]
LONG = [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def lengths(rig, tokens, kind):
    """Return (units, has device data) of the nodes along a prefix, starting at the root."""
    path = list(rig.up(rig.match(tokens).last_device_node)) or list(rig.up(rig.node_of(tokens)))
    return [(len(node.key), rig.data(node, kind).value is not None) for node in reversed(path)]


@pytest.mark.parametrize("tiers", [1, 2])
def test_duplicates_behind_the_prefix_of_the_caller_are_freed_by_the_tree(tiers):
    rig = UnifiedRig(tiers=tiers)
    rig.insert(AB)
    held = rig.node_of(AB).value
    rows = rig.alloc(4)
    own = np.concatenate((held, rows))
    rig.compute(rows, None, rig.prefixes([*ABC, 4, 4])[2:])
    key = RadixKey([*ABC, 4, 4])
    result = rig.cache.insert(InsertParams(key, own, prev_prefix_len=4))
    assert (result.prefix_len, result.total_len) == (4, 8)
    rig.check()


def test_an_evicted_node_takes_fresh_rows_and_counts_as_known():
    rig = UnifiedRig()
    rig.insert(AB)
    rig.settle()
    rig.cache.evict(EvictParams(4))
    rig.events()
    assert rig.insert(AB).prefix_len == 4
    assert rig.events() == [("BlockStored", "GPU", page) for page in ([1, 1], [2, 2])]
    rig.check()


def test_a_state_goes_to_the_exact_end_of_a_key_and_is_left_to_the_caller_where_there_is_one():
    rig = UnifiedRig(("mamba",))
    assert not rig.insert(ABC).mamba_exist
    assert not rig.insert(AB).mamba_exist  # splits: the upper part has none yet
    assert rig.insert(AB).mamba_exist
    assert [rig.data(rig.node_of(tokens), "mamba").value is not None for tokens in (AB, ABC)] == [True, True]
    rig.check()


def test_a_tombstone_with_a_state_on_the_host_moves_to_the_list_of_the_device():
    rig = UnifiedRig(("mamba",))
    rig.insert(A)
    rig.insert(AB)
    rig.settle()
    (mamba,) = rig.cache.auxiliaries
    node = rig.node_of(A)
    mamba.free_on_device(node)
    assert node in mamba.host_lru_list
    rig.insert(A)
    assert node in mamba.device_lru_list
    assert node not in mamba.host_lru_list
    rig.check()


def test_a_leaf_gets_the_swa_rows_that_are_mapped_to_its_own():
    rig = UnifiedRig(("swa",))
    rig.insert(AB)
    node = rig.node_of(AB)
    assert rig.data(node, "swa").value.tolist() == rig.swa.translate(node.value).tolist()


def test_a_leaf_is_cut_where_its_swa_rows_begin():
    rig = UnifiedRig(("swa",))
    rig.insert(ABC, evicted=1)
    assert lengths(rig, ABC, "swa") == [(2, False), (4, True)]
    assert rig.match(ABC).last_device_node is rig.node_of(ABC)
    assert rig.match(AB).last_device_node is rig.cache.root_node
    rig.check()


def test_a_leaf_longer_than_the_window_is_cut_so_that_a_lock_holds_one_window():
    rig = UnifiedRig(("swa",), window=3, tiers=1)
    rig.insert(LONG)
    assert lengths(rig, LONG, "swa") == [(6, True), (4, True)]
    lock = rig.cache.inc_lock_ref(rig.node_of(LONG))
    assert rig.cache.evict(EvictParams(100, swa_num_tokens=100)) == (0, 0, 6)
    rig.cache.release(lock)
    rig.check()


@pytest.mark.parametrize(("evicted", "expected"), [(3, (0, 0, True)), (5, (0, 0, True)), (2, (0, 6, False))])
def test_a_leaf_outside_the_window_is_not_made(evicted, expected):
    rig = UnifiedRig(("swa", "mamba"))
    result = rig.insert(ABC, evicted=evicted)
    assert tuple(result) == expected
    rig.check()


def test_what_is_known_of_a_vetoed_leaf_is_reported():
    rig = UnifiedRig(("swa",))
    rig.insert(A)
    assert tuple(rig.insert(ABC, evicted=3)) == (2, 2, True)
    assert rig.match(ABC).device_indices.tolist() == rig.node_of(A).value.tolist()
    rig.check()


@pytest.mark.parametrize(("evicted", "expected"), [(0, [(6, True)]), (1, [(2, False), (4, True)]), (3, [(6, False)])])
def test_a_tombstone_inside_the_window_takes_over_the_swa_rows_of_the_caller(evicted, expected):
    rig = UnifiedRig(("swa",), window=6, device_pages=12, swa_pages=12, tiers=1)
    rig.insert(ABC)
    rig.insert([*ABC, 4, 4])
    (swa,) = rig.cache.auxiliaries
    node = rig.node_of(ABC)
    swa.free_on_device(node)
    kept = node.value.tolist()
    lock = rig.cache.inc_lock_ref(node)  # a reader of these rows
    rig.insert([*ABC, 4, 4], evicted=evicted)
    rig.cache.release(lock)
    path = list(reversed(list(rig.up(rig.node_of(ABC)))))
    assert [(len(step.key), rig.data(step, "swa").value is not None) for step in path] == expected
    assert [row for step in path for row in step.value] == kept
    rig.check()


def test_an_evicted_node_gets_swa_rows_from_where_the_caller_has_them():
    rig = UnifiedRig(("swa",))
    rig.insert(ABC)
    rig.settle()
    rig.cache.evict(EvictParams(100))
    rig.insert(ABC, evicted=1)
    assert lengths(rig, ABC, "swa") == [(2, False), (4, True)]
    rig.check()


@pytest.mark.parametrize(
    ("kinds", "params", "error"),
    [
        ((), {"value": np.arange(2, 5)}, "value"),
        ((), {"value": None}, "value"),
        (("mamba",), {"key": RadixKey([1]), "value": np.arange(1), "mamba_value": np.array([1])}, "value"),
        (("mamba",), {}, "mamba_value"),
        (("mamba",), {"mamba_value": np.array([1, 2])}, "mamba_value"),
        (("swa",), {"swa_evicted_seqlen": 1}, "swa_evicted_seqlen"),
        (("swa",), {"swa_evicted_seqlen": -2}, "swa_evicted_seqlen"),
        (("swa",), {}, "without an SWA row"),
    ],
)
def test_an_insert_that_lacks_something_changes_nothing(kinds, params, error):
    rig = UnifiedRig(kinds)
    rows = rig.pool.alloc(4)
    with pytest.raises(InvalidValueError, match=error):
        rig.cache.insert(InsertParams(**{"key": RadixKey(AB), "value": rows} | params))
    rig.pool.free(rows)
    assert rig.cache.root_node.children == {}
    rig.check()


def test_the_rows_of_a_page_that_is_not_whole_stay_the_callers():
    rig = UnifiedRig(tiers=1)
    rows = rig.pool.alloc(6)
    assert tuple(rig.cache.insert(InsertParams(RadixKey([1, 1, 2, 2, 3]), rows[:5]))) == (0, 4, False)
    check_cache(rig.cache, rows[4:])


@pytest.mark.parametrize("disable", [True, False])
def test_an_empty_key_and_a_disabled_cache_take_nothing(disable):
    rig = UnifiedRig(("mamba",), tiers=1, disable=disable)
    key = RadixKey(AB if disable else [])
    assert tuple(rig.cache.insert(InsertParams(key, np.arange(4 * disable)))) == (0, 0, True)
    assert len(rig.match(AB).device_indices) == 0
    assert rig.cache.inc_lock_ref(rig.cache.root_node).delta == 0


def test_a_split_is_silent_and_leaves_the_state_below():
    rig = UnifiedRig(("mamba", "swa"), window=6)
    rig.insert(ABC)
    rig.settle()
    rig.events()
    rig.match(AB)
    assert rig.events() == []
    upper, lower = rig.node_of(AB), rig.node_of(ABC)
    assert (rig.data(upper, "mamba").value, rig.data(upper, "mamba").host_value) == (None, None)
    assert rig.data(lower, "mamba").host_value is not None
    assert [len(rig.data(node, "swa").host_value) for node in (upper, lower)] == [4, 2]
    rig.check()
