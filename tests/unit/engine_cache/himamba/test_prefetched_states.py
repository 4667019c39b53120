"""A prefetched prefix whose state could not be read. The next prefetch adds the state."""

import pytest

from engine_cache import EvictParams, Lane, StoragePolicy
from engine_cache.storage.base import PoolName
from tests.support.caches.hybrid_rig import HybridRig
from tests.support.caches.hybrid_steps import PROMPT, node_of
from tests.support.caches.tier_rig import MemoryStorage

pytestmark = pytest.mark.torch


def attached(store):
    rig = HybridRig()
    assert rig.cache.attach_storage_backend(store, StoragePolicy(prefetch_threshold=2, batch_pages=2))[0]
    return rig


@pytest.fixture
def store():
    """A store with the pages of another worker."""
    store = MemoryStorage()
    rig = attached(store)
    rig.insert(PROMPT)
    rig.settle()
    assert rig.cache.detach_storage_backend()[0]
    return store


def fetch(rig):
    rig.cache.prefetch_from_storage("r", rig.match(PROMPT).last_host_node, PROMPT)
    while rig.engine.step(Lane.PREFETCH):
        pass
    assert rig.cache.check_prefetch_progress("r")
    rig.settle()
    rig.check()
    return rig.cache.pop_prefetch_loaded_tokens("r")


def test_the_state_is_given_to_the_node_that_is_there(store):
    rig = attached(store)
    read = store.batch_get_v2
    store.batch_get_v2 = lambda transfers: {each.name: [False] for each in transfers}
    assert fetch(rig) == len(PROMPT)
    assert rig.match(PROMPT).host_hit_length == 0
    store.batch_get_v2 = read
    assert fetch(rig) == 0
    match = rig.match(PROMPT)
    assert (match.host_hit_length, match.mamba_host_hit_length) == (len(PROMPT), 1)
    assert rig.load_back(PROMPT)[1] is match.best_match_node
    rig.settle()
    rig.check()


def test_a_state_that_is_there_stays(store):
    rig = attached(store)
    fetch(rig)
    node = node_of(rig, PROMPT)
    slot, free = node.mamba_host_value, rig.host_states.available_size()
    rig.cache.prefetch_from_storage("r", rig.cache.root_node, PROMPT)
    while rig.engine.step(Lane.PREFETCH):
        pass
    assert rig.cache.check_prefetch_progress("r")
    rig.settle()
    assert node.mamba_host_value is slot
    assert rig.host_states.available_size() == free
    rig.check()


def test_a_node_that_is_held_concurrently_gets_its_state_too(store):
    """The node is the start node of another prefetch, so its state cannot be evicted."""
    rig = attached(store)
    read = store.batch_get_v2
    store.batch_get_v2 = lambda transfers: {each.name: [False] for each in transfers}
    fetch(rig)
    store.batch_get_v2 = read
    rig.cache.prefetch_from_storage("other", node_of(rig, PROMPT), [9, 9])
    fetch_others = rig.cache.ongoing_prefetch["other"]
    rig.cache.prefetch_from_storage("r", rig.cache.root_node, PROMPT)
    while not rig.cache.ongoing_prefetch["r"].extra_pool_hit_pages.get(PoolName.MAMBA):
        assert rig.engine.step(Lane.PREFETCH)
    while rig.engine.step(Lane.PREFETCH):
        pass
    assert rig.cache.check_prefetch_progress("r")
    rig.check()
    assert fetch_others.start_node.mamba_host_value is not None
    rig.settle()
    rig.check()
    rig.cache.evict(EvictParams(100))
