"""Data that is inserted after the KV of its node was backed up is copied to the host separately."""

import pytest

from engine_cache import Lane
from tests.rigs.cache import AB, CPU, A, rigs, stored
from tests.rigs.cache_content import is_pending
from tests.rigs.cache_steps import evict_on_host, is_free, on_host

pytestmark = pytest.mark.torch

STATES = ("himamba", "unified+mamba")


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
    evict_on_host(rig, 1)
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
