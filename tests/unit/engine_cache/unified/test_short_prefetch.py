"""Prefetches of less than one sliding window. Fetched pages can be matched; other pages are not fetched at all."""

import pytest

from engine_cache import Lane, StoragePolicy
from tests.support.caches.tier_rig import MemoryStorage
from tests.support.caches.unified_rig import UnifiedRig

pytestmark = pytest.mark.torch

A, AB, ABC, ABCD = [1, 1], [1, 1, 2, 2], [1, 1, 2, 2, 3, 3], [1, 1, 2, 2, 3, 3, 4, 4]
SIZES = {"device_pages": 8, "swa_pages": 8, "host_pages": 16, "swa_host_pages": 10}


class CountingStorage(MemoryStorage):
    num_pages_asked = 0

    def batch_get_v1(self, keys, host_indices):
        self.num_pages_asked += len(keys)
        return super().batch_get_v1(keys, host_indices)


def attached(store, **params):
    rig = UnifiedRig(("swa",), **(SIZES | params))
    assert rig.cache.attach_storage_backend(store, StoragePolicy(1))[0]
    return rig


def archived(tokens, **params):
    store = CountingStorage()
    rig = attached(store, **params)
    rig.insert(tokens)
    rig.settle()
    assert rig.cache.detach_storage_backend()[0]
    return store


def fetch(rig, tokens):
    anchor = rig.match(tokens).last_host_node
    start = sum(len(node.key) for node in rig.up(anchor))
    rig.cache.prefetch_from_storage("r", anchor, tokens[start:])
    is_begun = "r" in rig.cache.ongoing_prefetch
    while rig.engine.step(Lane.PREFETCH):
        pass
    rig.cache.check_hicache_events()
    assert rig.cache.check_prefetch_progress("r")
    rig.cache.check_hicache_events()
    rig.check()
    return is_begun


@pytest.mark.parametrize("window", [3, 5, 8, 100])
@pytest.mark.parametrize("prompt", [A, AB, ABC], ids=len)
def test_a_prompt_shorter_than_the_window_is_matched_after_one_prefetch(window, prompt):
    store = archived(prompt, window=window)
    rig = attached(store, window=window)
    assert fetch(rig, prompt)
    match = rig.match(prompt)
    assert (match.host_hit_length, match.swa_host_hit_length) == (len(prompt), min(len(prompt), -(-window // 2) * 2))
    (rows, _), _, _ = rig.load_back(match)
    rig.settle()
    assert rig.match(prompt).device_indices.tolist() == rows.tolist()
    rig.check()
    fetch(rig, prompt)
    assert store.num_pages_asked == len(prompt) // 2


@pytest.mark.parametrize("window", [3, 8])
def test_a_store_with_less_than_was_asked_for_is_enough(window):
    rig = attached(archived(AB, window=window), window=window)
    fetch(rig, ABCD)
    assert rig.match(ABCD).host_hit_length == 4
    rig.check()


@pytest.mark.parametrize("window", [3, 5, 8])
def test_the_rest_of_the_window_is_what_the_anchor_has(window):
    rig = attached(archived(ABC, window=window), window=window)
    rig.insert(AB)
    rig.settle()
    assert fetch(rig, ABC)
    match = rig.match(ABC)
    assert (match.best_match_node, match.host_hit_length) == (rig.node_of(ABC), 2)
    rig.check()


def test_nothing_is_begun_below_an_anchor_that_has_lost_its_window():
    rig = attached(archived(ABC, window=5), window=5)
    rig.insert(AB)
    rig.settle()
    (swa,) = rig.cache.auxiliaries
    anchor = rig.match(ABC).last_host_node
    swa.free_on_device(anchor)
    swa.free_on_host(anchor)
    rig.cache.prefetch_from_storage("r", anchor, [3, 3])
    assert (rig.cache.ongoing_prefetch, rig.cache.prefetch_tokens_occupied, anchor.host_ref_counter) == ({}, 0, 0)
    rig.check()


def test_rows_of_which_one_was_not_read_are_all_given_back():
    store = archived(AB, window=8)
    rig = attached(store, window=8)
    read = store.batch_get_v2
    store.batch_get_v2 = lambda transfers: {name: [False, *done[1:]] for name, done in read(transfers).items()}
    fetch(rig, AB)
    assert rig.match(AB).host_hit_length == 0
    store.batch_get_v2 = read
    fetch(rig, AB)
    assert rig.match(AB).host_hit_length == 4
