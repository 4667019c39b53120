"""HiRadixCache with transfers in flight, copies and a store that fail, and hardly any room, in random order.

After every operation the tree and the pools are recounted, every byte on every tier is compared with what the tokens
say it is, and the events are replayed: the pages they leave on each medium are the pages that are there.
"""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tier_driver import Driver
from tier_rig import Rig

from engine_cache import EVICTION_POLICIES, WRITE_POLICIES, Lane
from engine_cache.node import iter_nodes

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


class HiRadixCacheMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 3]),
        is_bigram=st.booleans(),
        write_policy=st.sampled_from(WRITE_POLICIES),
        eviction_policy=st.sampled_from(sorted(EVICTION_POLICIES)),
        events=st.sampled_from([True, True, True, False]),
        stop=st.sampled_from(["best_effort", "wait_complete"]),
        storage=st.sampled_from([True, True, True, False]),
    )
    def start(self, events, stop, storage, is_bigram, **options):
        rig = Rig(is_eagle=is_bigram, enable_kv_cache_events=events, **options)
        self.driver = Driver(rig, events=events, stop=stop, storage=storage)

    @rule(prompt=PROMPTS, chunked=st.booleans(), priority=st.integers(0, 3))
    def insert(self, prompt, chunked, priority):
        self.driver.insert(prompt, chunked and priority > 1, priority)

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

    @rule(num_tokens=st.integers(0, 8))
    def evict_host(self, num_tokens):
        self.driver.cache.evict_host(num_tokens)

    @rule(prompt=PROMPTS, quota=st.sampled_from([None, None, 0, 2, 4]))
    def load_back(self, prompt, quota):
        self.driver.load_back(prompt, quota)

    @rule()
    def start_loading(self):
        self.driver.cache.ready_to_load_host_cache()

    @rule(lane=CLOSE_CALLS, position=st.sampled_from([0, 0, 0, 1]))
    def step(self, lane, position):
        self.driver.step(lane, position)

    @rule(faults=st.sampled_from([1, 2, 2]))
    def step_with_a_failing_write(self, faults):
        self.driver.step(Lane.WRITE, 0, write_faults=faults)

    @rule()
    def step_with_a_load_that_works_the_second_time(self):
        self.driver.step(Lane.LOAD, 0, load_faults=1)

    @rule()
    def check_hicache_events(self):
        driver = self.driver
        driver.cache.check_hicache_events()
        if driver.store is not None:
            assert all(driver.store.is_held(key) for key in driver.cache._announced)

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
    def the_store_loses_a_page(self, data):
        _, key = data.draw(st.sampled_from(list(self.driver.store.pages)))
        self.driver.store.lose(key)

    @precondition(lambda self: self.driver.store is not None)
    @rule()
    def clear_storage(self):
        self.driver.cache.clear_storage_backend()

    @precondition(lambda self: len(list(iter_nodes(self.driver.cache.root_node))) > 5)
    @rule()
    def reset(self):
        self.driver.reset()

    @invariant()
    def everything_recounts(self):
        self.driver.check()

    def teardown(self):
        """All that was begun ends, and nothing is left behind."""
        if not hasattr(self, "driver"):
            return
        driver, cache = self.driver, self.driver.cache
        for position in range(len(cache.ongoing_prefetch)):
            driver.abort(position)
        driver.rig.settle()
        assert cache.prefetch_tokens_occupied == 0
        assert not any((cache.ongoing_write_through, cache.ongoing_load_back, cache.ongoing_backup))
        assert all(node.host_ref_counter == 0 for node in iter_nodes(cache.root_node))
        if cache.storage is not None:
            assert not any((cache.storage.prefetches, cache.storage.release_queue))
        driver.check()


TestHiRadixCache = HiRadixCacheMachine.TestCase
TestHiRadixCache.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
def test_ten_thousand_operations_leave_everything_in_order(write_policy):
    rng = random.Random(write_policy)
    driver = Driver(Rig(write_policy=write_policy))

    def prompt():
        pages = [rng.choice((0, 0, 1)) for _ in range(rng.randrange(1, 7))]
        return pages, rng.randrange(4), rng.choice((None, None, "a"))

    def prefetch():
        driver.prefetch(prompt())

    def step():
        lane = rng.choice(list(Lane))
        driver.step(lane, rng.choice((0, 0, 1)), rng.choice((0, 0, 0, 1, 2)), rng.choice((0, 0, 1)))

    def lock_or_unlock():
        if len(driver.locks) > rng.randrange(3):
            driver.unlock(rng.randrange(3))
        else:
            driver.lock(prompt())

    def take_prefetch():
        if driver.cache.ongoing_prefetch:
            rng.choice((driver.progress, driver.progress, driver.abort))(rng.randrange(3))

    def change_storage():
        driver.store.broken, driver.store.full = rng.random() < 0.1, rng.random() < 0.1
        if driver.store.pages and rng.random() < 0.2:
            driver.store.lose(rng.choice(sorted(key for _, key in driver.store.pages)))

    operations = [
        *3 * [lambda: driver.insert(prompt())],
        lambda: driver.evict(rng.randrange(9), rng.choice((0, 0, 1, 2))),
        lambda: driver.cache.evict_host(rng.randrange(5)),
        *2 * [lambda: driver.load_back(prompt(), rng.choice((None, 2, 4)))],
        driver.cache.ready_to_load_host_cache,
        driver.cache.check_hicache_events,
        *6 * [step],
        *2 * [prefetch],
        take_prefetch,
        lock_or_unlock,
        change_storage,
    ]
    for turn in range(10_000):
        rng.choice(operations)()
        driver.check_events()
        if turn % 10 == 0:
            driver.rig.check()
    assert driver.cache.num_failed_backups > 0
