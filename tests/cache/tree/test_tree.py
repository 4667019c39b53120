"""Insert, match and split: what a tree adopts, frees, restores and returns, for each kind of state."""

import threading

import numpy as np
import pytest

from engine_cache import EvictParams, InsertParams, Lane, MatchPrefixParams, RadixKey, ThreadCopyEngine
from tests.rigs.cache import AB, ABC, ABCD, CPU, GPU, NOTHING, A, CacheRig, rigs, stored

DEVICE = ("radix", "mamba")
HOST = ("hiradix", "himamba", "unified")


def path(rig, tokens, kind="full"):
    """Return (units, has device data of the kind) of the nodes along a prefix, starting at the root."""
    nodes = list(rig.up(rig.node_of(tokens)))
    return [(len(node.key), rig.data(node, kind).value is not None) for node in reversed(nodes)]


def uses(rig):
    return [(len(place.node.key), place.node.priority, place.node.hit_count) for place in rig.walk()]


# --- a tree of KV alone ---


@rigs("radix")
def test_a_split_copies_lock_hits_and_priority(rig):
    for _ in range(2):
        rig.insert(AB, priority=7)
    old = rig.node_of(AB)
    rig.cache.inc_lock_ref(old)
    upper = rig.match(A).last_device_node
    assert (upper.lock_ref, upper.hit_count, old.hit_count, upper.priority) == (1, 2, 2, 7)
    assert rig.cache.protected_size() == 4
    rig.cache.dec_lock_ref(old)
    assert upper.lock_ref == 0


@rigs("radix")
def test_priority_rises_along_the_path_and_never_falls(rig):
    for tokens, priority in ((A, 3), (AB, 5), (A, 1)):
        rig.insert(tokens, priority=priority)
    assert rig.node_of(A).priority == 5


@rigs("radix")
def test_hits_count_inserts_unless_chunked(rig):
    hits = []
    for chunked in (True, False, True):
        rig.insert(A, chunked=chunked)
        hits.append(rig.node_of(A).hit_count)
    assert hits == [0, 1, 1]


@rigs("radix")
def test_insert_copies_the_rows(rig):
    rows = rig.alloc(2)
    expected = rows.tolist()
    rig.compute(rows, None, rig.prefixes(A))
    rig.cache.insert(InsertParams(RadixKey(A), rows))
    rows[:] = 0
    rig.match(A).device_indices[:] = 0
    assert rig.match(A).device_indices.tolist() == expected


@rigs("radix")
def test_a_key_of_other_units_is_refused(rig):
    with pytest.raises(ValueError, match="is_bigram"):
        rig.cache.match_prefix(MatchPrefixParams(RadixKey([1, 2, 3], is_bigram=True)))


@rigs(*DEVICE, *HOST, "unified+mamba", disable=True)
def test_a_disabled_cache_takes_nothing(rig):
    assert rig.insert(AB)[:2] == (0, 0)
    result = rig.match(AB)
    assert result.best_match_node is rig.cache.root_node
    assert rig.cache.inc_lock_ref(result.last_device_node).delta == 0
    assert rig.cache.dec_lock_ref(result.last_device_node) == (0,)
    rig.tokens.clear()  # the caller keeps its rows
    is_taken = rig.cls in ("radix", "hiradix")
    assert rig.cache.insert(InsertParams(RadixKey(AB), np.arange(4), mamba_value=np.array([1]))) == (0, 0, not is_taken)


# --- what an insert adopts ---


@rigs(*HOST)
def test_a_prompt_that_is_computed_again_is_reported_again_and_its_rows_are_taken(rig):
    rig.demoted(AB)
    free = rig.pool.available_size()
    result = rig.insert(ABC)
    known = 4 if rig.cls == "unified" else 0
    assert (result.prefix_len, result.total_len, result.mamba_exist) == (known, 6, False)
    assert rig.events() == stored(GPU, [1, 1], [2, 2], [3, 3])
    assert (rig.pool.available_size(), len(rig.held(GPU))) == (free - 6, 3)


@rigs(*HOST)
def test_an_insert_is_a_hit_of_evicted_nodes_but_not_in_a_tree_of_kv_alone(rig):
    rig.demoted(A)
    hits = rig.node_of(A).hit_count
    rig.insert(A)
    assert rig.node_of(A).hit_count - hits == int(rig.cls != "hiradix")
    rig.settle()


@pytest.mark.parametrize("was_evicted", [False, True])
@rigs("unified+swa")
def test_a_node_is_cut_where_its_swa_rows_begin(rig, was_evicted):
    if was_evicted:
        rig.demoted(ABC)
    rig.insert(ABC, evicted=1)
    assert path(rig, ABC, "swa") == [(2, False), (4, True)]
    assert rig.match(ABC).last_device_node is rig.node_of(ABC)
    assert rig.match(AB).last_device_node is rig.cache.root_node
    rig.settle()


@rigs("unified+swa", tiers=1)
def test_a_leaf_longer_than_the_window_is_cut_so_that_a_lock_holds_one_window(rig):
    tokens = [*ABCD, 5, 5]
    rig.insert(tokens)
    assert path(rig, tokens, "swa") == [(6, True), (4, True)]
    lock = rig.cache.inc_lock_ref(rig.node_of(tokens))
    assert rig.cache.evict(EvictParams(100, swa_num_tokens=100)) == (0, 0, 6)
    rig.cache.release(lock)


@pytest.mark.parametrize(("evicted", "expected"), [(3, (0, 0, True)), (5, (0, 0, True)), (2, (0, 6, False))])
@rigs("unified+swa+mamba")
def test_a_leaf_outside_the_window_is_not_made(rig, evicted, expected):
    assert tuple(rig.insert(ABC, evicted=evicted)) == expected
    rig.settle()


@pytest.mark.parametrize(("evicted", "expected"), [(0, [(6, True)]), (1, [(2, False), (4, True)]), (3, [(6, False)])])
@rigs("unified+swa", window=6, device_pages=12, swa_pages=12, tiers=1)
def test_a_tombstone_inside_the_window_takes_over_the_swa_rows_of_the_caller(rig, evicted, expected):
    rig.turns(ABC, ABCD)
    node = rig.node_of(ABC)
    rig.cache.auxiliaries[0].free_on_device(node)
    kept = node.value.tolist()
    lock = rig.cache.inc_lock_ref(node)  # a reader of these rows
    rig.insert(ABCD, evicted=evicted)
    rig.cache.release(lock)
    assert path(rig, ABC, "swa") == expected
    assert rig.match(ABC).device_indices.tolist() in (kept, [])
    assert [row for step in reversed(list(rig.up(rig.node_of(ABC)))) for row in step.value] == kept


@rigs("mamba", "unified+mamba")
def test_a_key_without_a_unit_takes_nothing(rig):
    assert tuple(rig.cache.insert(InsertParams(RadixKey([]), NOTHING))) == (0, 0, True)


# --- splits ---


@pytest.mark.parametrize("evicted", [0, 2])
@rigs("unified+swa", page_size=1, window=2, device_pages=8, swa_pages=8, host_pages=10, swa_host_pages=10)
def test_a_leaf_that_is_cut_is_backed_up_as_a_whole(rig, evicted):
    rig.insert([1, 2, 3, 4, 5], evicted=evicted, priority=3)
    assert len(uses(rig)) > 1
    assert [use[1:] for use in uses(rig)] == [(3, 0)] * (len(uses(rig)) - 1) + [(3, 1)]
    rig.settle()
    assert all(place.node.host_value is not None for place in rig.walk())


# --- copies on threads ---


@pytest.mark.parametrize("name", ["hiradix", "himamba"])
def test_no_caller_waits_for_copies_on_threads(name):
    rig, gate = CacheRig(name, engine=ThreadCopyEngine()), threading.Event()
    rig.engine.submit(Lane.WRITE, [gate.wait])
    rig.insert(A)
    rig.cache.check_hicache_events()
    assert rig.held(CPU) == set()
    gate.set()
    rig.settle()
    assert rig.held(CPU) == {(None, tuple(A))}
    rig.engine.close()
