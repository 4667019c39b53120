"""HiMambaRadixCache with transfers in flight, copies and a store that fail, and hardly any room, in random order.

After every operation tree, tiers, lists and pools are recounted, every byte of KV and state on every tier is compared
with what the tokens say it is, and the events are replayed: the pages they leave on each medium are those that are
there.
"""

import random

import pytest
from hybrid_rig import HybridRig
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tier_driver import Driver

from engine_cache import WRITE_POLICIES, EvictParams, Lane
from engine_cache.node import iter_nodes
from engine_cache.storage.base import PoolName

pytestmark = pytest.mark.torch

# few different pages, so that prompts often share, leave and extend each other
PROMPTS = st.tuples(
    st.lists(st.integers(0, 1), max_size=6), st.integers(0, 3), st.sampled_from([None, None, None, "a"])
)
CLOSE_CALLS = st.sampled_from([Lane.WRITE, Lane.WRITE, Lane.LOAD, Lane.PREFETCH, Lane.PREFETCH, Lane.ARCHIVE])


@pytest.fixture(autouse=True, scope="module")
def _watched_pools():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSIGHT_DEBUG_POOLS", "1")
        yield


class HybridDriver(Driver):
    def match(self, prompt):
        """What is matched is what is in the tree up to the last state on either tier."""
        tokens, extra_key = self.tokens(prompt), prompt[2]
        on_device, in_tree = set(), set()
        for node, namespace, prefixes in self.rig.walk():
            in_tree |= {(namespace, raw) for raw in prefixes}
            if node.value is not None:
                on_device |= {(namespace, raw) for raw in prefixes}
        device_states, host_states = self.rig.state_ends()
        path = [(extra_key, raw) for raw in self.rig.prefixes(tokens)]
        matched = next((i for i, page in enumerate(path) if page not in in_tree), len(path))
        usable = next((i for i in range(matched, 0, -1) if path[i - 1] in device_states | host_states), 0)
        used = path[:usable]
        match = self.rig.match(tokens, extra_key)
        assert len(match.device_indices) == self.page_size * len(on_device.intersection(used))
        assert match.host_hit_length == self.page_size * len(set(used) - on_device)
        assert match.mamba_host_hit_length == bool(used and used[-1] not in device_states)
        beyond = matched * self.page_size // 2 * 2 or None
        assert match.mamba_branching_seqlen == (beyond if matched > usable else None)
        return match

    def load_back(self, prompt, with_request):
        match = self.match(prompt)
        locked = match.last_device_node
        self.cache.inc_lock_ref(locked)
        result = self.rig.load_back(self.tokens(prompt), prompt[2], with_request=with_request)
        assert (result is None) == (not match.host_hit_length and not match.mamba_host_hit_length)
        if result is not None:
            rows, node = result
            assert len(rows) in (0, match.host_hit_length)
            assert node is self.cache.root_node or node.mamba_value is not None
        self.cache.dec_lock_ref(locked)

    def evict_mamba(self, num, write_faults):
        free = self.rig.slots.available_size(), self.rig.pool.available_size()
        self.rig.host_states.write_faults = write_faults
        result = self.cache.evict(EvictParams(0, mamba_num=num))
        self.rig.host_states.write_faults = 0
        freed = self.rig.slots.available_size() - free[0], self.rig.pool.available_size() - free[1]
        assert freed == (result.mamba_num_evicted, result.num_tokens_evicted)

    def serve(self, prompt):
        self.rig.serve(self.tokens(prompt), prompt[2])

    def step(self, lane, position, write_faults=0, load_faults=0, state_faults=0):
        self.rig.host_states.write_faults = state_faults
        super().step(lane, position, write_faults, load_faults)
        self.rig.host_states.write_faults = 0

    def reset(self):
        super().reset()
        self.rig.slots.clear()
        self.rig.loaded.clear()

    def end(self):
        """All that was begun ends, and nothing is left behind."""
        cache = self.cache
        for _ in range(len(cache.ongoing_prefetch)):
            self.abort(0)
        self.rig.settle()
        assert cache.prefetch_tokens_occupied == 0
        assert not any((cache.ongoing_write_through, cache.ongoing_load_back, cache.ongoing_backup))
        for node in (cache.root_node, *iter_nodes(cache.root_node)):
            assert node.host_ref_counter == node.host_mamba_ref_counter == 0
        if cache.storage is not None:
            assert not any((cache.storage.prefetches, cache.storage.release_queue))
        self.check()


class HiMambaCacheMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 3]),
        is_bigram=st.booleans(),
        write_policy=st.sampled_from(WRITE_POLICIES),
        events=st.sampled_from([True, True, True, False]),
        stop=st.sampled_from(["best_effort", "wait_complete"]),
        storage=st.sampled_from([True, True, True, False]),
    )
    def start(self, events, stop, storage, is_bigram, **options):
        rig = HybridRig(is_eagle=is_bigram, enable_kv_cache_events=events, **options)
        self.driver = HybridDriver(rig, events=events, stop=stop, storage=storage)

    @rule(prompt=PROMPTS, chunked=st.booleans(), priority=st.integers(0, 3))
    def insert(self, prompt, chunked, priority):
        self.driver.insert(prompt, chunked and priority > 1, priority)

    @rule(prompt=PROMPTS)
    def serve(self, prompt):
        self.driver.serve(prompt)

    @rule(prompt=PROMPTS)
    def match(self, prompt):
        self.driver.match(prompt)

    @rule(prompt=PROMPTS)
    def lock(self, prompt):
        self.driver.lock(prompt)

    @precondition(lambda self: self.driver.locks)
    @rule(position=st.integers(0, 5))
    def unlock(self, position):
        self.driver.unlock(position)

    @rule(num_tokens=st.integers(0, 8), faults=st.sampled_from([0, 0, 0, 1, 2]))
    def evict(self, num_tokens, faults):
        self.driver.evict(num_tokens, faults)

    @rule(num=st.integers(0, 3), faults=st.sampled_from([0, 0, 0, 1, 2]))
    def evict_mamba(self, num, faults):
        self.driver.evict_mamba(num, faults)

    @rule(num_tokens=st.integers(0, 8))
    def evict_host(self, num_tokens):
        self.driver.cache.evict_host(num_tokens)

    @rule(num=st.integers(0, 3))
    def evict_mamba_host(self, num):
        self.driver.cache.evict_mamba_host(num)

    @rule(prompt=PROMPTS, with_request=st.booleans())
    def load_back(self, prompt, with_request):
        self.driver.load_back(prompt, with_request)

    @precondition(lambda self: self.driver.rig.loaded)
    @rule()
    def end_a_loaded_request(self):
        self.driver.rig.end_request()

    @rule()
    def start_loading(self):
        self.driver.cache.ready_to_load_host_cache()

    @rule(lane=CLOSE_CALLS, position=st.sampled_from([0, 0, 0, 1]))
    def step(self, lane, position):
        self.driver.step(lane, position)

    @rule(faults=st.sampled_from([1, 2, 2]), of_states=st.booleans())
    def step_with_a_failing_write(self, faults, of_states):
        self.driver.step(Lane.WRITE, 0, **{"state_faults" if of_states else "write_faults": faults})

    @rule()
    def step_with_a_load_that_works_the_second_time(self):
        self.driver.step(Lane.LOAD, 0, load_faults=1)

    @rule()
    def check_hicache_events(self):
        self.driver.cache.check_hicache_events()

    @rule(prompt=PROMPTS)
    def prefetch(self, prompt):
        self.driver.prefetch(prompt)

    @precondition(lambda self: self.driver.cache.ongoing_prefetch)
    @rule(position=st.integers(0, 3))
    def check_prefetch_progress(self, position):
        self.driver.progress(position)

    @precondition(lambda self: self.driver.cache.ongoing_prefetch)
    @rule(position=st.integers(0, 3))
    def abort(self, position):
        self.driver.abort(position)

    @precondition(lambda self: self.driver.store is not None)
    @rule(broken=st.booleans(), full=st.booleans())
    def the_store_fails_or_recovers(self, broken, full):
        self.driver.store.broken, self.driver.store.full = broken, full

    @precondition(lambda self: self.driver.store is not None and self.driver.store.pages)
    @rule(data=st.data())
    def the_store_loses_a_page_or_a_state(self, data):
        name, key = data.draw(st.sampled_from(list(self.driver.store.pages)))
        self.driver.store.lose(key, name)

    @precondition(lambda self: len(list(iter_nodes(self.driver.cache.root_node))) > 5)
    @rule()
    def reset(self):
        self.driver.reset()

    @invariant()
    def everything_recounts(self):
        self.driver.check()

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.end()


TestHiMambaCache = HiMambaCacheMachine.TestCase
TestHiMambaCache.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
def test_ten_thousand_operations_leave_everything_in_order(write_policy):
    rng = random.Random(write_policy)
    driver = HybridDriver(HybridRig(write_policy=write_policy))
    cache, rig = driver.cache, driver.rig

    def prompt():
        pages = [rng.choice((0, 0, 1)) for _ in range(rng.randrange(1, 7))]
        return pages, rng.randrange(4), rng.choice((None, None, "a"))

    def step():
        lane = rng.choice(list(Lane))
        faults = [rng.choice((0, 0, 0, 1, 2)), rng.choice((0, 0, 1)), rng.choice((0, 0, 0, 1, 2))]
        driver.step(lane, rng.choice((0, 0, 1)), *faults)

    def lock_or_unlock():
        if len(driver.locks) > rng.randrange(3):
            driver.unlock(rng.randrange(3))
        else:
            driver.lock(prompt())

    def take_prefetch():
        if cache.ongoing_prefetch:
            rng.choice((driver.progress, driver.progress, driver.abort))(rng.randrange(3))

    def end_request():
        if rig.loaded:
            rig.end_request()

    def change_storage():
        driver.store.broken, driver.store.full = rng.random() < 0.1, rng.random() < 0.1
        if driver.store.pages and rng.random() < 0.2:
            name, key = rng.choice(sorted(driver.store.pages, key=str))
            driver.store.lose(key, name)

    operations = [
        *2 * [lambda: driver.insert(prompt())],
        *2 * [lambda: driver.serve(prompt())],
        lambda: driver.evict(rng.randrange(9), rng.choice((0, 0, 1, 2))),
        lambda: driver.evict_mamba(rng.randrange(3), rng.choice((0, 0, 1, 2))),
        lambda: cache.evict_host(rng.randrange(5)),
        lambda: cache.evict_mamba_host(rng.randrange(2)),
        *2 * [lambda: driver.load_back(prompt(), rng.random() < 0.5)],
        *2 * [end_request],
        cache.ready_to_load_host_cache,
        cache.check_hicache_events,
        *6 * [step],
        *2 * [lambda: driver.prefetch(prompt())],
        take_prefetch,
        lock_or_unlock,
        change_storage,
    ]
    for turn in range(10_000):
        rng.choice(operations)()
        driver.check_events()
        if turn % 10 == 0:
            rig.check()
    assert cache.num_failed_backups > 0
    assert {name for name, _ in driver.store.pages} == {PoolName.KV, PoolName.MAMBA}
    while rig.loaded:
        rig.end_request()
    driver.end()
