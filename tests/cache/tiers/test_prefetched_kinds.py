"""Prefetches of states and sliding windows with their KV, and when a request stops waiting."""

import pytest

from engine_cache import EvictParams, Lane, StoragePolicy
from engine_cache.storage.base import PoolName
from kv_events.errors import InvalidValueError
from tests.rigs.cache import AB, ABC, ABCD, CPU, A, removed, rigs
from tests.rigs.cache_steps import archived
from tests.rigs.cache_stores import is_idle, set_policy

MAMBA, SWA = PoolName.MAMBA, PoolName.SWA
SIZES = {"swa_pages": 8, "host_pages": 16}


# --- states ---


@pytest.mark.parametrize("is_held", [False, True])
@rigs("himamba")
def test_a_state_that_could_not_be_read_is_given_to_the_node_by_the_next_prefetch(rig, is_held):
    """is_held: the node is the start node of another prefetch, so its state cannot be evicted."""
    store = archived(rig, ABCD)
    read, store.batch_get_v2 = store.batch_get_v2, lambda transfers: {each.name: [False] for each in transfers}
    rig.prefetch(ABCD)
    assert (rig.fetched(), rig.match(ABCD).host_hit_length) == (8, 0)
    store.batch_get_v2 = read
    if is_held:
        rig.cache.prefetch_from_storage("other", rig.node_of(ABCD), [9, 9])
    for _ in range(2):  # the second one leaves the state as it is
        rig.cache.prefetch_from_storage("r", rig.cache.root_node, ABCD)
        assert rig.fetched() == 0
        match = rig.match(ABCD)
        assert (match.host_hit_length, match.mamba_host_hit_length, rig.used()["mamba"]) == (8, 1, 1)
    rig.load(ABCD)
    rig.settle()


@pytest.mark.parametrize(
    ("rig", "pool"),
    [
        (("himamba", {}), MAMBA),
        (("unified+mamba", {}), MAMBA),
        (("unified+swa", SIZES), SWA),
        (("unified+swa+mamba", SIZES), MAMBA),
    ],
    indirect=["rig"],
)
def test_without_room_for_a_kind_nothing_is_begun(rig, pool):
    archived(rig, ABCD)
    taken = rig.host_pools[pool].alloc(rig.host_pools[pool].size)
    before = rig.used()
    assert rig.prefetch(ABCD) is None
    assert (rig.used(), rig.cache.prefetch_tokens_occupied) == (before, 0)
    root = rig.cache.root_node
    assert [rig.data(root, kind).host_lock_ref for kind in ("full", "mamba", "swa")] == [0, 0, 0]
    rig.host_pools[pool].free(taken)


@rigs("himamba", slots=1, host_slots=2)
def test_a_prefetch_takes_the_slot_of_the_least_recent_state_but_not_of_its_anchor(rig):
    archived(rig, AB, ABCD)
    rig.demoted([9, 9])
    rig.demoted(A)
    rig.prefetch(ABCD)
    assert rig.events() == removed(CPU)
    anchor = rig.node_of(A)
    assert (anchor.host_ref_counter, rig.data(anchor, "mamba").host_lock_ref) == (1, 1)
    assert rig.cache.evict_mamba_host(2) == 0
    rig.fetched()


# --- sliding windows ---


@rigs("unified+swa", **SIZES)
def test_swa_rows_of_one_window_are_fetched_and_no_more(rig):
    archived(rig, ABCD)
    rig.prefetch(ABCD)
    rig.fetched()
    assert rig.used() == {"kv": 8, "swa": 4}
    (leaf,) = [place.node for place in rig.walk() if rig.data(place.node, "swa").host_value is not None]
    assert len(leaf.key) == 4


@pytest.mark.parametrize("prompt", [A, AB, ABC], ids=len)
@rigs(*(("unified+swa", {"window": window}) for window in (3, 5, 8, 100)), **SIZES)
def test_a_prompt_shorter_than_the_window_is_matched_after_one_prefetch(rig, prompt):
    store = archived(rig, prompt)
    rig.prefetch(prompt)
    assert rig.fetched() == len(prompt)
    match = rig.match(prompt)
    window = min(len(prompt), -(-rig.window // 2) * 2)
    assert (match.host_hit_length, match.swa_host_hit_length) == (len(prompt), window)
    rows, _ = rig.load(prompt)
    rig.settle()
    assert rig.match(prompt).device_indices.tolist() == rows.tolist()
    asked = sum(number for name, number in store.calls("get") if name is PoolName.KV)
    rig.prefetch(prompt)
    rig.run(Lane.PREFETCH)
    assert (asked, store.calls("get")) == (len(prompt) // 2, [])


@rigs(*(("unified+swa", {"window": window}) for window in (3, 5, 8)), **SIZES)
def test_the_rest_of_the_window_is_what_the_anchor_has(rig):
    archived(rig, ABC)
    rig.turns(AB)
    assert rig.prefetch(ABC) is not None
    rig.fetched()
    match = rig.match(ABC)
    assert (match.best_match_node, match.host_hit_length) == (rig.node_of(ABC), 2)


@rigs("unified+swa", window=5, **SIZES)
def test_nothing_is_begun_below_an_anchor_that_has_lost_its_window(rig):
    archived(rig, ABC)
    (anchor,) = rig.turns(AB)
    rig.cache.auxiliaries[0].free_on_device(anchor)
    rig.cache.auxiliaries[0].free_on_host(anchor)
    rig.cache.prefetch_from_storage("r", anchor, [3, 3])
    assert (rig.cache.ongoing_prefetch, rig.cache.prefetch_tokens_occupied, anchor.host_ref_counter) == ({}, 0, 0)


# --- when a request stops waiting ---


@rigs("hiradix")
def test_best_effort_takes_what_is_there(rig):
    archived(rig, ABCD)
    rig.prefetch(ABCD)
    for _ in range(2):
        rig.engine.step(Lane.PREFETCH)
    assert rig.cache.check_prefetch_progress("r")
    assert rig.cache.pop_prefetch_loaded_tokens("r") == 4
    rig.check()
    rig.run(Lane.PREFETCH)
    assert (is_idle(rig), rig.used()) == (True, {"kv": 4})


@rigs("hiradix")
def test_wait_complete_waits_for_all_of_the_hit(rig):
    archived(rig, ABCD)
    set_policy(rig, stop="wait_complete")
    rig.prefetch(ABCD)
    while rig.engine.num_queued(Lane.PREFETCH):
        assert not rig.cache.check_prefetch_progress("r")
        rig.engine.step(Lane.PREFETCH)
    assert rig.fetched() == 8


@rigs("hiradix")
def test_a_timeout_is_waited_for(rig):
    archived(rig, ABCD)
    set_policy(rig, stop="timeout", timeout_base_s=1000)
    rig.prefetch(ABCD)
    rig.engine.step(Lane.PREFETCH)
    assert not rig.cache.check_prefetch_progress("r")
    set_policy(rig, stop="timeout", timeout_base_s=0, timeout_per_1024_s=0)
    assert rig.cache.check_prefetch_progress("r")
    rig.run(Lane.PREFETCH)
    assert is_idle(rig)


def test_the_timeout_grows_with_the_hit_up_to_its_cap():
    times = [StoragePolicy().timeout_s(units) for units in (0, 10 * 1024, 10**9)]
    assert times == [2.0, pytest.approx(3.0), 30.0]


BAD = {"stop": "never", "prefetch_threshold": 0, "batch_pages": 0, "timeout_base_s": -1, "timeout_cap_s": -1}


@pytest.mark.parametrize(("field", "value"), [*BAD.items(), *(("archive_share", share) for share in (0, -1, 1.1))])
def test_a_bad_policy_is_refused(field, value):
    with pytest.raises(InvalidValueError, match=f"{field}: got {value!r}"):
        StoragePolicy(**{field: value})


# --- the number of tokens that a prefetch added ---


@rigs("hiradix")
def test_only_what_was_added_is_noted(rig):
    archived(rig, ABCD)
    for req_id, tokens in (("nothing", [9, 9, 8, 8]), ("all", ABCD), ("again", ABCD)):
        rig.prefetch(tokens, req_id)
        rig.run(Lane.PREFETCH)
        assert rig.cache.check_prefetch_progress(req_id)
        rig.cache.check_hicache_events()
    assert rig.cache.prefetch_loaded_tokens_by_reqid == {"all": 8}
    assert [rig.cache.pop_prefetch_loaded_tokens(req_id) for req_id in ("nothing", "all", "all")] == [0, 8, 0]


@rigs("hiradix")
def test_notes_that_no_caller_asks_for_go_oldest_first(rig, monkeypatch):
    archived(rig, ABCD)
    monkeypatch.setattr("engine_cache.cache._MOST_LOADED_NOTES", 2)
    for req_id in ("a", "b", "a", "c"):
        rig.prefetch(ABCD, req_id)
        rig.run(Lane.PREFETCH)
        assert rig.cache.check_prefetch_progress(req_id)
        rig.cache.evict_host(100)
    assert rig.cache.prefetch_loaded_tokens_by_reqid == {"a": 8, "c": 8}


@pytest.mark.parametrize(
    ("rig", "is_begun"),
    [(("unified+swa", {"window": 6, "swa_pages": 2, "swa_host_pages": n, "host_pages": 14}), n > 3) for n in (3, 4)],
    indirect=["rig"],
)
def test_the_window_of_the_anchor_stays(rig, is_begun):
    """A prompt that was used later has one page of SWA rows, which cannot go; the anchor, used before, another."""
    archived(rig, A, AB, ABC)
    rig.cache.store.io.policy = StoragePolicy(2, "wait_complete")
    rig.insert([9, 9])
    rig.insert(A)
    rig.settle()
    rig.cache.evict(EvictParams(8, 8))
    anchor = rig.match(ABC).last_host_node
    release = rig.hold_on_host(rig.match([9, 9]).best_match_node)
    rig.cache.prefetch_from_storage("r", anchor, ABC[2:])
    assert ("r" in rig.cache.ongoing_prefetch) == is_begun
    rig.fetched()
    match = rig.match(ABC)
    assert len(match.device_indices) + match.host_hit_length == (6 if is_begun else 2)
    release()
