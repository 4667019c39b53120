import pytest

from engine_cache import EvictParams, StoragePolicy
from kv_events.errors import InvalidValueError
from kv_events.schema import StorageMedium
from tests.support.caches.prefetch_steps import PROMPT, attach, nothing_is_left, page_hashes, prefetch
from tests.support.caches.tier_rig import Rig

pytestmark = pytest.mark.torch
CPU = StorageMedium.CPU


def test_nothing_is_begun_without_a_store_or_for_too_little(rig):
    assert prefetch(Rig()) is None
    assert prefetch(rig, [1]) is None
    rig.cache.store.io.policy = StoragePolicy()
    assert prefetch(rig) is None
    assert rig.cache.root_node.host_ref_counter == 0


def test_a_request_prefetches_once_at_a_time(rig):
    prefetch(rig)
    with pytest.raises(InvalidValueError, match="'r'"):
        prefetch(rig)


@pytest.mark.parametrize("debug", [False, True])
def test_a_wrong_last_hash_is_reported(rig, monkeypatch, debug):
    """Otherwise pages of another prompt would be fetched."""
    monkeypatch.setattr("engine_cache.settings.CHECK_FREES", debug)
    rig.insert(PROMPT[:2])
    rig.settle()
    right, another = page_hashes(PROMPT)[0], page_hashes([9, 9])[0]
    for anchor, tokens in ((rig.cache.root_node, PROMPT), (rig.match(PROMPT).last_host_node, PROMPT[2:])):
        with pytest.raises(InvalidValueError, match=f"last_hash: got '{another}'"):
            rig.cache.prefetch_from_storage("r", anchor, tokens, last_hash=another)
    assert nothing_is_left(rig)
    assert prefetch(rig, last_hash=right) is not None


def test_a_namespace_that_is_not_the_anchors_is_reported(rig):
    rig.insert(PROMPT[:2], "tenant")
    rig.insert(PROMPT[:2])
    rig.settle()
    own, common = (rig.match(PROMPT, extra_key).last_host_node for extra_key in ("tenant", None))
    foreign = ((own, "other", "'tenant'"), (own, "", "'tenant'"), (common, "", "None"), (common, "tenant", "None"))
    for anchor, extra_key, expected in foreign:
        with pytest.raises(InvalidValueError, match=f"extra_key: got '{extra_key}', expected .*{expected}"):
            rig.cache.prefetch_from_storage("r", anchor, PROMPT[2:], extra_key=extra_key)
    rig.cache.prefetch_from_storage("a", own, [3, 4], extra_key="tenant")
    rig.cache.prefetch_from_storage("b", own, [3, 4])
    rig.cache.prefetch_from_storage("c", common, [3, 4])
    namespaces = {req_id: operation.key.extra_key for req_id, operation in rig.cache.ongoing_prefetch.items()}
    assert namespaces == {"a": "tenant", "b": "tenant", "c": None}


def test_prefetches_are_limited_by_what_the_host_has_beyond_the_device(store):
    rig = attach(Rig(device_pages=8, host_pages=12), store)
    assert prefetch(rig, [9, 9, 8, 8, 7, 7], "a") is not None  # 6 of int(0.8 * 8) units
    assert rig.cache.prefetch_tokens_occupied == 6
    assert prefetch(rig, PROMPT, "b") is None
    rig.cache.release_aborted_request("a")
    assert prefetch(rig, PROMPT, "b") is not None


def test_a_prefetch_evicts_from_the_host_but_not_its_anchor(store):
    rig = attach(Rig(device_pages=2, host_pages=5), store)
    rig.insert(PROMPT[:4])
    rig.settle()
    rig.cache.evict(EvictParams(4))
    rig.cache.store.io.policy = StoragePolicy(prefetch_threshold=2, batch_pages=2)
    held = rig.host.alloc(rig.host.available_size())
    assert prefetch(rig) is None
    assert len(rig.held(CPU)) == 2
    rig.host.free(held)


def test_a_prefetch_is_cut_to_the_pages_that_are_free_without_evicting_twice(store, monkeypatch):
    rig = attach(Rig(), store)
    held = rig.host.alloc(rig.host.size - 6)
    evictions = []
    monkeypatch.setattr(rig.cache.host.leaves, "evict", lambda units: evictions.append(units) or 0)  # type: ignore[func-returns-value]
    operation = prefetch(rig)
    assert (len(operation.key), evictions) == (6, [8])
    assert rig.cache.prefetch_tokens_occupied == 6
    rig.settle()
    rig.cache.check_prefetch_progress("r")
    assert rig.cache.pop_prefetch_loaded_tokens("r") == 6
    assert rig.held(CPU) == {(None, tuple(PROMPT[:end])) for end in (2, 4, 6)}
    assert nothing_is_left(rig)
    rig.host.free(held)


def test_a_prefetch_that_would_be_cut_below_the_threshold_is_abandoned(store):
    rig = attach(Rig(), store, prefetch_threshold=6)
    held = rig.host.alloc(rig.host.size - 4)
    assert prefetch(rig) is None
    assert rig.cache.root_node.host_ref_counter == 0
    assert rig.host.available_size() == 4
    rig.host.free(held)
