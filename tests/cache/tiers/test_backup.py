"""Backups: copies to the host, their acknowledgements, room for them and failures. Data that comes after its KV."""

import numpy as np
import pytest

from engine_cache import InsertParams, Lane, RadixKey
from tests.models.cache_checks import check_cache
from tests.rigs.cache import AB, ABC, CPU, FAILED, GPU, A, CacheRig, refuse, removed, rigs, stored
from tests.rigs.cache_content import POOLS, is_pending
from tests.rigs.cache_steps import host_evict, is_free, on_host

ALL = ("hiradix", "himamba", "unified", "unified+mamba+swa")
STATES = ("himamba", "unified+mamba")
KINDS = [("hiradix", "full"), ("himamba", "full"), ("himamba", "mamba"), ("unified", "full")]
KINDS += [("unified+mamba+swa", "mamba"), ("unified+mamba+swa", "swa")]
of_each_kind = pytest.mark.parametrize(("rig", "kind"), [((name, {}), kind) for name, kind in KINDS], indirect=["rig"])


# --- copies and their acknowledgements ---


@rigs(*ALL)
def test_a_page_is_on_the_host_when_its_copy_is_acknowledged_and_not_before(rig):
    rig.insert(AB)
    assert rig.events() == stored(GPU, [1, 1], [2, 2])
    assert rig.engine.num_queued(Lane.WRITE) == 1, "all kinds in one operation"
    rig.cache.writing_check()
    rig.engine.step(Lane.WRITE)
    assert list(rig.cache.iter_resident(CPU)) == rig.events() == []
    rig.cache.flush_write_through_acks()
    assert rig.events() == stored(CPU, [1, 1], [2, 2])
    assert [page.token_ids for page in rig.cache.iter_resident(CPU)] == [[1, 1], [2, 2]]
    assert on_host(rig, AB) == ["full", *rig.kinds]
    rig.cache.writing_check()
    assert rig.events() == []


@rigs("hiradix", "himamba", "unified", write_policy="write_through_selective")
def test_the_selective_policy_waits_for_the_second_hit(rig):
    for chunked, number in ((False, 0), (True, 0), (False, 1)):
        rig.insert(A, chunked=chunked)
        assert rig.engine.num_queued(Lane.WRITE) == number


@rigs("unified+mamba", write_policy="write_through_selective")
def test_parents_without_a_copy_go_first_in_a_unified_tree(rig):
    rig.insert(A)
    rig.insert(AB)
    rig.insert(ABC, chunked=True)
    assert rig.cache.ongoing_write_through.keys() == {0}  # A was hit twice
    assert rig.cache.write_backup(rig.node_of(ABC)) == 2
    nodes = [operation.node for operation in rig.cache.ongoing_write_through.values()]
    assert nodes == [rig.node_of(tokens) for tokens in (A, AB, ABC)]
    rig.cache.take_events()
    rig.settle()
    assert rig.events() == stored(CPU, [1, 1], [2, 2], [3, 3])


@rigs("unified", write_policy="write_through_selective", host_pages=9)
def test_without_room_for_a_parent_nothing_below_it_goes(rig):
    rig.insert(AB)
    rig.match(A)
    taken = rig.host.alloc(18)
    assert rig.cache.write_backup(rig.node_of(AB)) == 0
    assert on_host(rig, A) == on_host(rig, AB) == []
    rig.host.free(taken)


# --- room ---


@of_each_kind
def test_without_room_for_one_kind_none_is_taken_and_nothing_is_reported(rig, kind):
    pool = rig.host_pools[POOLS[kind]]
    taken = pool.alloc(pool.size)
    rig.insert(A)
    node = rig.node_of(A)
    assert rig.cache.write_backup(node) == 0
    assert (on_host(rig, A), node.lock_ref, node.write_through_pending_id) == ([], 0, None)
    assert all(each is pool or each.available_size() == each.size for each in rig.host_pools.values())
    rig.settle()
    assert rig.events() == stored(GPU, [1, 1])
    assert (rig.cache.num_refused_backups, rig.cache.num_failed_backups) == (2, 0)
    pool.free(taken)
    assert rig.cache.write_backup(node) == 2
    assert on_host(rig, A) == ["full", *rig.kinds]


@rigs("hiradix", "himamba", "unified", device_pages=2, host_pages=3)
def test_a_backup_makes_room_by_evicting_from_the_host_once(rig):
    rig.demoted(AB)
    rig.insert([5, 5, 6, 6])
    assert rig.events() == stored(GPU, [5, 5], [6, 6]) + removed(CPU, 2)
    rig.settle()
    assert rig.events() == stored(CPU, [5, 5], [6, 6])


@rigs("hiradix", "unified", page_size=1, device_pages=8, host_pages=9)
def test_a_backup_evicts_its_whole_length_from_the_host_or_in_a_unified_tree_what_is_missing(rig):
    rig.demoted(*([token] for token in range(7)))
    rig.insert([20, 21, 22])
    rig.settle()
    evicted = 1 if rig.cls == "unified" else 3
    assert rig.events().count(*removed(CPU)) == evicted
    assert rig.host.available_size() == evicted - 1


@pytest.mark.parametrize("depth", [1, 30])
def test_an_insert_along_a_path_that_found_no_room_looks_for_it_once(depth):
    rig = CacheRig(page_size=1, device_pages=2 * depth, host_pages=2 * depth + 1)
    taken = rig.host.alloc(rig.host.size)
    keys = [RadixKey(list(range(length + 1))) for length in range(depth)]
    for key in keys:
        rig.cache.insert(InsertParams(key, rig.alloc(len(key)), chunked=True))
    asked, evict = [], rig.cache.host.leaves.evict
    rig.cache.host.leaves.evict = lambda num: asked.append(num) or evict(num)  # type: ignore[func-returns-value]
    rig.cache.insert(InsertParams(keys[-1], rig.alloc(depth)))
    assert asked == [1]
    rig.host.free(taken)
    check_cache(rig.cache)


# --- failures ---


@of_each_kind
@pytest.mark.parametrize("is_split", [False, True])
def test_a_copy_that_fails_emits_nothing_frees_all_it_took_and_heals(rig, kind, is_split):
    rig.insert(AB)
    if is_split:
        rig.match(A)
    rig.host_pools[POOLS[kind]].write_faults = 2
    rig.settle()
    assert rig.events() == stored(GPU, [1, 1], [2, 2])
    assert (rig.cache.num_failed_backups, rig.cache.num_refused_backups, rig.held(CPU)) == (1, 0, set())
    assert (set(rig.used().values()), rig.cache.protected_size()) == ({0}, 0)
    rig.insert(AB)
    rig.settle()
    assert rig.events() == stored(CPU, [1, 1], [2, 2])
    assert on_host(rig, AB) == ["full", *rig.kinds]


@rigs("hiradix", "himamba", "unified", write_policy="write_through_selective")
def test_a_backup_that_the_engine_refuses_leaves_the_node_as_it_was_and_heals(rig, monkeypatch):
    rig.insert(A)
    node, free = rig.node_of(A), (rig.used(), rig.pool.available_size(), rig.slots.available_size())
    with monkeypatch.context() as patch:
        patch.setattr(rig.engine, "submit", refuse)
        with pytest.raises(RuntimeError, match=FAILED):
            rig.cache.write_backup(node)
    assert (rig.used(), rig.pool.available_size(), rig.slots.available_size()) == free
    assert (node.host_value, node.write_through_pending_id, node.lock_ref, node.host_ref_counter) == (None, None, 0, 0)
    assert rig.cache.ongoing_write_through == {}
    rig.insert(A)
    rig.settle()
    assert rig.events() == stored(GPU, [1, 1]) + stored(CPU, [1, 1])


@of_each_kind
def test_copies_below_a_failed_one_are_dropped_and_their_rows_are_freed_when_they_are_written(rig, kind):
    rig.insert(A)
    rig.insert(AB)
    rig.cache.take_events()
    dropped, host = set(rig.data(rig.node_of(AB), kind).host_value), rig.host_pools[POOLS[kind]]
    rig.host.write_faults = 2
    rig.engine.step(Lane.WRITE)  # the backup of A, which the one below depends on
    rig.cache.writing_check()
    assert on_host(rig, A) == on_host(rig, AB) == []
    rig.check()
    taken = host.alloc(host.available_size())
    assert not dropped & set(taken)
    rig.engine.step(Lane.WRITE)
    assert host.available_size() == 0  # the cache does not know yet that the copy has ended
    rig.cache.writing_check()
    assert set(host.alloc(host.available_size())) == dropped
    host.free(np.array([*taken, *sorted(dropped)]))
    assert (rig.events(), rig.cache.protected_size()) == ([], 0)


# --- states that are inserted after the KV of their node was backed up ---


@pytest.fixture
def late(rig):
    """A on both tiers, without a state, above B with one."""
    rig.insert(AB)
    rig.match(A)
    rig.settle()
    rig.cache.take_events()
    return rig.node_of(A)


@pytest.fixture
def in_flight(rig, late):
    """The same, with a backup of the state of A in flight."""
    rig.insert(A)
    assert rig.data(late, "mamba").host_value is not None
    return late


@rigs(*STATES)
def test_a_late_state_takes_no_page_and_no_event(rig, late):
    used = rig.used()
    rig.insert(A)
    assert rig.engine.num_queued(Lane.WRITE) == 1
    rig.settle()
    assert rig.used() == used | {"mamba": used["mamba"] + 1}
    assert (rig.events(), late.write_through_pending_id, on_host(rig, A)) == ([], None, ["full", "mamba"])


@rigs(*STATES)
def test_a_state_is_copied_once_at_a_time_and_not_again(rig, in_flight):
    rig.insert(A)
    assert not rig.cache.host.backups.write_late(in_flight)
    assert rig.engine.num_queued(Lane.WRITE) == 1
    rig.settle()
    assert not rig.cache.host.backups.write_late(in_flight)
    assert rig.engine.num_queued(Lane.WRITE) == 0


@rigs("himamba", write_policy="write_through_selective")
def test_a_late_state_waits_for_as_many_hits_as_kv_does(rig):
    rig.turns(A, A)
    node = rig.node_of(A)
    host_evict(rig, "mamba", 1)
    node.hit_count = 0
    for is_copied in (False, True):
        rig.insert(A)
        assert (rig.data(node, "mamba").host_value is not None) == is_copied
    rig.settle()


@rigs(*STATES)
def test_a_chunk_of_a_prompt_starts_no_copy(rig, late):
    rig.insert(A, chunked=True)
    assert rig.has(A, "mamba") == (True, False)


@rigs(*STATES)
def test_a_copy_of_a_state_alone_that_fails_leaves_kv_where_it_is_and_heals(rig, in_flight):
    rig.host_states.write_faults = 2
    free = rig.host_states.available_size()
    rig.settle()
    assert (rig.cache.num_failed_backups, rig.host_states.available_size()) == (1, free + 1)
    assert (on_host(rig, A), is_free(rig, A), rig.has(A, "mamba")) == (["full"], True, (True, False))
    rig.insert(A)
    rig.settle()
    assert (on_host(rig, A), rig.events()) == (["full", "mamba"], [])


# --- the same, while its KV is copied ---


@pytest.fixture
def both_pending(rig):
    """Backups of A in flight: its KV, and then its state, which was inserted later."""
    rig.insert(AB)
    rig.match(A)
    rig.insert(A)
    assert is_pending(rig.node_of(A))
    assert rig.engine.num_queued(Lane.WRITE) == 1 + (rig.name == "himamba"), "in a unified tree the state waits"
    rig.cache.take_events()
    return rig.node_of(A)


@rigs(*STATES)
def test_a_state_that_comes_while_kv_is_copied_follows_it(rig, both_pending):
    rig.engine.step(Lane.WRITE)
    rig.cache.writing_check()
    assert rig.events() == stored(CPU, [1, 1], [2, 2])
    if rig.name == "himamba":
        assert both_pending.host_mamba_ref_counter == 1
        assert rig.cache.evict_mamba_host(5) == 1  # the leaf's
    rig.settle()
    rig.insert(A)
    rig.settle()
    assert (on_host(rig, A), is_free(rig, A), rig.events()) == (["full", "mamba"], True, [])
