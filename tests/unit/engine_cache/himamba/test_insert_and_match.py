import pytest

from engine_cache import EvictParams, EvictResult, HiMambaRadixCache, KVCacheEventMixin, ThreadCopyEngine
from engine_cache.tree import events
from tests.support.caches.hybrid_rig import HybridRig
from tests.support.caches.hybrid_steps import CPU, GPU, PROMPT, demoted, node_of, stored, two_turns

pytestmark = pytest.mark.torch


def test_events_come_from_the_mixin_that_all_caches_share():
    assert HiMambaRadixCache.take_events is KVCacheEventMixin.take_events


def test_a_prompt_that_is_computed_again_is_reported_again_and_its_pages_and_state_are_taken(rig):
    demoted(rig, [1, 2, 3, 4])
    free = rig.pool.available_size()
    result = rig.insert([1, 2, 3, 4])
    assert (result.prefix_len, result.total_len, result.mamba_exist) == (0, 4, False)
    assert rig.events() == stored(GPU, [1, 2], [3, 4])
    assert rig.pool.available_size() == free - 4


def test_what_is_on_the_device_counts_and_its_duplicates_are_freed(rig):
    two_turns(rig)
    rig.cache.evict(EvictParams(2))
    free = rig.pool.available_size()
    result = rig.insert([1, 2, 3, 4, 5, 6])
    assert (result.prefix_len, result.total_len) == (2, 6)
    assert rig.pool.available_size() == free - 4


@pytest.mark.parametrize("is_evicted", [False, True])
def test_a_split_is_silent_and_leaves_the_states_below(rig, is_evicted):
    rig.insert(PROMPT)
    rig.settle()
    if is_evicted:
        rig.cache.evict(EvictParams(8))
    before = [page.block_hash for page in rig.cache.iter_resident(CPU)]
    rig.cache.take_events()
    rig.match([1, 2, 3, 4])
    assert rig.events() == []
    assert [page.block_hash for page in rig.cache.iter_resident(CPU)] == before
    upper, lower = node_of(rig, [1, 2, 3, 4]), node_of(rig, PROMPT)
    assert [len(node.hash_value) for node in (upper, lower)] == [2, 2]
    assert (upper.mamba_value, upper.mamba_host_value) == (None, None)
    assert lower.mamba_host_value is not None


def test_a_node_on_no_tier_ends_a_match(rig):
    upper, _ = two_turns(rig)
    rig.cache.evict(EvictParams(4))
    kept, upper.host_value = upper.host_value, None
    assert rig.match([1, 2, 3, 4]).best_match_node is rig.cache.root_node
    upper.host_value = kept


def test_the_anchor_on_the_host_is_above_what_was_not_backed_up():
    rig = HybridRig(write_policy="write_through_selective")
    rig.insert([1, 2])
    rig.insert([1, 2, 3, 4])
    match = rig.match([1, 2, 3, 4])
    assert match.last_device_node is node_of(rig, [1, 2, 3, 4])
    assert match.last_host_node is node_of(rig, [1, 2])
    assert match.mamba_host_hit_length == 0


@pytest.mark.parametrize("is_eagle", [False, True])
@pytest.mark.parametrize("page_size", [1, 2])
def test_requests_of_a_hybrid_model_run_through_both_tiers(is_eagle, page_size):
    rig = HybridRig(is_eagle=is_eagle, page_size=page_size, device_pages=12, host_pages=20)
    tokens = [*PROMPT, 9]
    first, whole = (len(rig.prefixes(turn)) * page_size for turn in (tokens[:5], tokens))
    assert rig.serve(tokens[:5]) == 0
    rig.settle()
    assert rig.serve(tokens) == first
    rig.settle()
    assert rig.cache.evict(EvictParams(100)) == EvictResult(whole, 2)
    assert rig.serve(tokens) == whole
    rig.settle()
    rig.check()


def test_events_off_cost_no_hash(monkeypatch):
    calls = []
    monkeypatch.setattr(events, "compute_node_hash_values", lambda *args: calls.append(args))
    rig = HybridRig(enable_kv_cache_events=False)
    two_turns(rig)
    rig.cache.evict(EvictParams(4))
    rig.load_back([1, 2, 3, 4])
    rig.settle()
    assert calls == []
    assert rig.cache.take_events() == []
    assert all(node.hash_value is None for node, _, _ in rig.walk())


def test_after_a_reset_nothing_that_began_before_is_reported(rig):
    rig.insert([1, 2])
    rig.cache.take_events()
    rig.cache.reset()
    rig.pool.clear()
    rig.slots.clear()
    rig.settle()
    assert rig.events() == [("AllBlocksCleared", None, None)]
    assert rig.host_states.available_size() == rig.host_states.size


def test_copies_on_threads_end_as_those_by_hand_do():
    rig = HybridRig(engine=ThreadCopyEngine())
    rig.insert([1, 2, 3, 4])
    rig.settle()
    rig.cache.evict(EvictParams(4))
    rig.load_back([1, 2, 3, 4])
    rig.settle()
    rig.check()
    rig.engine.close()
