"""Prefetches: from a store to the host, what stops or refuses them, and how they end."""

import pytest

from engine_cache import EvictParams, Lane, StoragePolicy
from kv_events.errors import InvalidValueError
from tests.rigs.cache import AB, ABCD, CPU, A, CacheRig, rigs, stored
from tests.rigs.cache_steps import archived
from tests.rigs.cache_stores import MemoryStorage, is_idle, page_hashes, set_policy

CLASSES = ("hiradix", "himamba", "unified")
ALL = (*CLASSES, "unified+mamba", "unified+swa", "unified+mamba+swa")
SIZES = {"swa_pages": 8, "host_pages": 16}
PAGES = [[token, token] for token in (1, 2, 3, 4)]


@pytest.fixture
def store(rig):
    """A store with AB and ABCD, to which the rig is attached."""
    store = archived(rig, AB, ABCD)
    store.batches.clear()
    return store


# --- what is fetched ---


@rigs(*ALL, **SIZES)
def test_fetched_pages_are_reported_before_any_request_uses_them_and_load_back_equals(rig, store):
    rig.prefetch(ABCD)
    assert rig.cache.prefetch_tokens_occupied == 8
    rig.run(Lane.PREFETCH)
    assert rig.events() == []
    assert rig.cache.check_prefetch_progress("r")
    assert rig.events() == stored(CPU, *PAGES)
    assert [rig.cache.pop_prefetch_loaded_tokens("r") for _ in range(2)] == [8, 0]
    match = rig.match(ABCD)
    assert (len(match.device_indices), match.host_hit_length) == (0, 8)
    rig.check()
    rows, _ = rig.load(ABCD)
    rig.settle()
    assert rig.match(ABCD).device_indices.tolist() == rows.tolist()
    assert is_idle(rig)
    rig.end_requests()


@rigs("hiradix", "unified", **SIZES)
def test_a_node_that_came_to_the_host_concurrently_is_no_leaf_once_pages_are_fetched_below_it(rig, store):
    rig.prefetch(ABCD)
    rig.run(Lane.PREFETCH)
    rig.demoted(A)
    assert rig.fetched() == 6
    rig.check()
    assert rig.cache.evict_host(6) == 6
    assert rig.match(ABCD).host_hit_length == 2


@rigs("hiradix")
def test_pages_that_came_concurrently_are_freed_or_adopted(rig, store):
    rig.prefetch(ABCD)
    rig.run(Lane.PREFETCH)
    rig.insert(A, chunked=True)  # on the device only
    rig.cache.take_events()
    assert rig.fetched() == 6
    assert rig.events() == stored(CPU, *PAGES)
    assert rig.prefetch(A, "too late") is None


@pytest.mark.parametrize(
    ("inserted", "overtakes"), [((A, [9, 9]), False), (([9, 9],), False), (([9, 9], A), True)], ids=str
)
@rigs(*CLASSES)
def test_backups_on_the_path_are_waited_for_and_others_only_if_one_overtook_them(rig, store, inserted, overtakes):
    rig.prefetch(ABCD)
    rig.run(Lane.PREFETCH)
    for tokens in inserted:
        rig.insert(tokens)
    if overtakes:
        rig.engine.step(Lane.WRITE, 1)
    rig.cache.take_events()
    assert rig.cache.check_prefetch_progress("r")
    assert rig.engine.num_queued(Lane.WRITE) == len(rig.cache.ongoing_write_through) == 1 - overtakes
    assert overtakes or rig.events() == stored(CPU, *PAGES)
    rig.settle()


@rigs("hiradix", "himamba")
def test_a_prefetch_of_which_nothing_arrived_waits_for_no_copy(rig):
    rig.attach(MemoryStorage())
    rig.insert(A)
    anchor = rig.node_of(A)
    rig.prefetch(ABCD)
    assert rig.cache.check_prefetch_progress("r")
    assert rig.cache.pop_prefetch_loaded_tokens("r") == 0
    assert (rig.engine.num_queued(Lane.WRITE), anchor.write_through_pending_id is None) == (1, False)
    rig.settle()
    assert is_idle(rig)


@rigs("hiradix")
def test_an_anchor_that_lost_its_copy_gets_nothing(rig, store):
    rig.insert(AB)
    rig.host.write_faults = 2
    rig.prefetch(ABCD)
    rig.run(Lane.PREFETCH)
    assert rig.fetched() == 0
    assert (rig.used(), rig.held(CPU), is_idle(rig)) == ({"kv": 0}, set(), True)


@rigs("unified+mamba+swa", **SIZES)
def test_an_anchor_that_leaves_the_tree_gives_back_what_it_held_above(rig, store):
    """Its own backup fails after the prefetch was begun, and then it is evicted."""
    rig.turns(A)
    rig.insert(AB)
    rig.prefetch(ABCD)
    assert rig.data(rig.node_of(A), "swa").host_lock_ref == 1
    rig.host.write_faults = 2
    rig.run(Lane.WRITE)
    rig.cache.check_hicache_events()
    assert rig.cache.evict(EvictParams(2)).num_tokens_evicted == 2
    assert rig.fetched() == 0
    assert is_idle(rig)


# --- less than was asked for ---


@rigs("hiradix")
def test_a_hit_that_is_shorter_gives_its_tail_back_at_once(rig, store):
    store.lose(page_hashes(ABCD)[2])
    rig.prefetch(ABCD)
    rig.engine.step(Lane.PREFETCH)
    rig.cache.store.check_events()
    assert rig.used() == {"kv": 4}
    assert rig.fetched() == 4


@pytest.mark.parametrize("steps", [0, 1, 2])
@rigs("hiradix")
def test_a_store_that_breaks_costs_the_rest_of_the_prefetch_only(rig, store, steps):
    rig.prefetch(ABCD)
    for _ in range(steps):
        rig.engine.step(Lane.PREFETCH)
    store.broken = True
    assert rig.fetched() == (4 if steps == 2 else 0)
    assert (rig.cache.store.io.num_errors, is_idle(rig)) == (1, True)


# --- ends ---


@pytest.mark.parametrize("way_out", ["abort", "revoke", "reset", "detach"])
@rigs("hiradix", "himamba", "unified+mamba+swa", **SIZES)
def test_every_end_of_a_prefetch_frees_everything(rig, store, way_out):
    if way_out == "revoke":
        store.clear()
    rig.prefetch(ABCD)
    expected = {"kv": 8, "swa": 4, "mamba": 1}
    assert rig.used() == {name: expected[name] for name in rig.used()}
    if way_out != "revoke":
        rig.engine.step(Lane.PREFETCH)
    tier = rig.cache.store
    if way_out == "abort":
        rig.cache.release_aborted_request("r")
    elif way_out == "reset":
        rig.cache.reset()
    elif way_out == "detach":
        assert rig.cache.detach_storage_backend() == (True, "detached")
    rig.settle()
    assert rig.cache.check_prefetch_progress("r")
    assert (set(rig.used().values()), tier.ongoing_archives, rig.cache.ongoing_prefetch) == ({0}, {}, {})
    assert (rig.cache.prefetch_tokens_occupied, rig.cache.root_node.host_ref_counter) == (0, 0)


# --- refusals ---


@rigs("hiradix")
def test_nothing_is_begun_without_a_store_or_for_too_little(rig, store):
    assert CacheRig("hiradix").prefetch(ABCD) is None
    set_policy(rig, 2)
    assert rig.prefetch([1]) is None
    rig.cache.store.io.policy = StoragePolicy()
    assert rig.prefetch(ABCD) is None
    assert is_idle(rig)


@rigs("hiradix")
def test_a_request_prefetches_once_at_a_time(rig, store):
    rig.prefetch(ABCD)
    with pytest.raises(InvalidValueError, match="'r'"):
        rig.prefetch(ABCD)


@pytest.mark.parametrize("debug", [False, True])
@rigs("hiradix")
def test_a_wrong_last_hash_is_reported(rig, store, monkeypatch, debug):
    """Otherwise pages of another prompt would be fetched."""
    monkeypatch.setattr("engine_cache.settings.CHECK_FREES", debug)
    (node,) = rig.turns(A)
    right, another = page_hashes(A)[0], page_hashes([9, 9])[0]
    for anchor, tokens in ((rig.cache.root_node, ABCD), (node, ABCD[2:])):
        with pytest.raises(InvalidValueError, match=f"last_hash: got '{another}'"):
            rig.cache.prefetch_from_storage("r", anchor, tokens, last_hash=another)
    assert is_idle(rig)
    assert rig.prefetch(ABCD, last_hash=right) is not None


@rigs("hiradix")
def test_a_namespace_that_is_not_the_anchors_is_reported(rig, store):
    rig.insert(A, "tenant")
    rig.turns(A)
    own, common = (rig.match(A, extra_key).last_host_node for extra_key in ("tenant", None))
    foreign = ((own, "other", "'tenant'"), (own, "", "'tenant'"), (common, "", "None"), (common, "tenant", "None"))
    for anchor, extra_key, expected in foreign:
        with pytest.raises(InvalidValueError, match=f"extra_key: got '{extra_key}', expected .*{expected}"):
            rig.cache.prefetch_from_storage("r", anchor, [3, 4], extra_key=extra_key)
    rig.cache.prefetch_from_storage("a", own, [3, 4], extra_key="tenant")
    rig.cache.prefetch_from_storage("b", own, [3, 4])
    rig.cache.prefetch_from_storage("c", common, [3, 4])
    namespaces = {req_id: operation.key.extra_key for req_id, operation in rig.cache.ongoing_prefetch.items()}
    assert namespaces == {"a": "tenant", "b": "tenant", "c": None}


@rigs("hiradix")
def test_prefetches_are_limited_by_what_the_host_has_beyond_the_device(rig, store):
    assert rig.prefetch([9, 9, 8, 8, 7, 7], "a") is not None  # 6 of int(0.8 * 8) units
    assert rig.cache.prefetch_tokens_occupied == 6
    assert rig.prefetch(ABCD, "b") is None
    rig.cache.release_aborted_request("a")
    assert rig.prefetch(ABCD, "b") is not None


@rigs("hiradix", device_pages=2, host_pages=5)
def test_a_prefetch_evicts_from_the_host_but_not_its_anchor(rig, store):
    rig.demoted(AB)
    held = rig.host.alloc(rig.host.available_size())
    assert rig.prefetch(ABCD) is None
    assert len(rig.held(CPU)) == 2
    rig.host.free(held)


@rigs(*ALL, **SIZES)
def test_a_prefetch_is_cut_to_the_pages_that_are_free_without_a_second_eviction(rig, store):
    taken = rig.host.alloc(rig.host.size - 6)
    evictions, evict = [], rig.cache.host.leaves.evict
    rig.cache.host.leaves.evict = lambda num: evictions.append(num) or evict(num)  # type: ignore[func-returns-value]
    operation = rig.prefetch(ABCD)
    assert (len(operation.key), rig.cache.prefetch_tokens_occupied, evictions) == (6, 6, [8])
    length = 4 if "mamba" in rig.kinds else 6  # states were archived at the ends of AB and ABCD
    assert rig.fetched() == length
    assert rig.match(ABCD).host_hit_length == length
    assert is_idle(rig)
    rig.host.free(taken)


@rigs("hiradix", "unified")
def test_a_prefetch_that_would_be_cut_below_the_threshold_is_abandoned(rig, store):
    set_policy(rig, 6)
    taken = rig.host.alloc(rig.host.size - 4)
    assert rig.prefetch(ABCD) is None
    assert (is_idle(rig), rig.host.available_size()) == (True, 4)
    rig.host.free(taken)


@rigs("hiradix")
def test_a_page_that_went_between_query_and_read_ends_the_prefix(rig, store):
    rig.prefetch(ABCD)
    rig.engine.step(Lane.PREFETCH)
    store.lose(page_hashes(ABCD)[1])
    assert rig.fetched() == 2
    assert (is_idle(rig), rig.used()) == (True, {"kv": 2})
