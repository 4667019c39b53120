"""The state machine of caches with tiers: transfers in flight, failing copies and stores, nearly full pools.

Device and host content is read from the
tree and compared byte by byte with the content computed from its tokens. The content of the store is read directly.
According to the events, exactly those pages must be on each medium.
"""

from __future__ import annotations

from typing import Any

import pytest

from engine_cache import EvictParams, InitLoadBackParams, Lane, TransferError
from engine_cache.tree.node import iter_nodes
from kv_events.schema import BlockRemoved, StorageMedium
from tests.rigs.cache import CacheRig
from tests.support.caches.cache_machine import operation
from tests.support.caches.storage_machine import CPU, StorageMachine, is_stepped

GPU = StorageMedium.GPU
EVERYTHING = 10**6
_LANES = (Lane.WRITE, Lane.WRITE, Lane.LOAD, Lane.PREFETCH, Lane.PREFETCH, Lane.PREFETCH, Lane.ARCHIVE, Lane.ARCHIVE)


class TieredCacheMachine(StorageMachine):
    MEDIA = (GPU, CPU)

    NAME = ""
    """Name of the `CacheRig`."""

    def make_rig(self, **options):
        """Return a rig with these options, except those in `STORE_OPTIONS`."""
        return CacheRig(self.NAME, **options)

    def begin(self, store="memory", stop="best_effort", emit=True, **options):
        self.rig = rig = self.make_rig(**options)
        self.cache, self.engine = rig.cache, rig.engine
        self.is_write_back = self.cache.host.backups.write_policy == "write_back"
        ordered = {GPU} if self.is_write_back else {GPU, CPU}
        events = self.cache.enable_kv_cache_events
        self.watch(rig.page_size, is_bigram=rig.is_bigram, events=events, ordered=ordered)
        self.num_requests = self.num_stores = self.num_fetched = 0
        self.seen, self.facts = set[Any](), dict[Any, Any]()  # prefixes of all prompts, their expected event fields
        self.fetched = self.inserted = list[Any](), None  # the prompts of the last requests
        self.on_host = set()
        self.store = None
        self.forget_store()
        if store is not None:
            self.attach(store, stop, emit)

    def held(self, medium):
        return self.rig.held(medium)

    def prompt(self, draw):
        tokens, extra_key = super().prompt(draw)
        self.seen.update(self.names.prefixes(tokens, extra_key))
        return tokens, extra_key

    # --- device ---

    @operation(weight=5)
    def insert(self, draw):
        tokens, extra_key = self.prompt(draw)
        if draw.random() < 0.4:  # conflicts with a running prefetch, or extends the last prompt
            tokens, extra_key = draw.choice((self.fetched, self.inserted))
            tokens = tokens[: draw.randrange(len(tokens) + 1)] + [1] * draw.randrange(2) * self.page_size
            self.seen.update(self.names.prefixes(tokens, extra_key))
        self.inserted = tokens, extra_key
        known = sum(prefix in self.rig.held(GPU) for prefix in self.names.prefixes(tokens, extra_key))
        chunked, priority = draw.random() < 0.25, draw.randrange(4)
        self.rig.host.refusals = draw.choice((0, 0, 0, 1, 2, 2))
        result = self.rig.insert(tokens, extra_key, chunked=chunked, priority=priority)
        self.rig.host.refusals = 0
        if result is not None:  # the allocation may have evicted some of the known pages
            assert result.prefix_len <= known * self.page_size

    @operation()
    def match(self, draw):
        self.checked_match(*self.prompt(draw))

    def checked_match(self, tokens, extra_key):
        """Match and compare with the tree."""
        on_device = self.rig.held(GPU)
        match = self.rig.match(tokens, extra_key)
        hit = sum(prefix in on_device for prefix in self.names.prefixes(tokens, extra_key))
        assert len(match.device_indices) == self.page_size * hit
        return match

    @operation()
    def lock(self, draw):
        if len(self.locks) < 3:
            node = self.checked_match(*self.prompt(draw)).last_device_node
            self.cache.inc_lock_ref(node)
            self.locks.append(node)

    @operation(weight=2, when=lambda machine: machine.locks)
    def unlock(self, draw):
        self.cache.dec_lock_ref(self.locks.pop(draw.randrange(len(self.locks))))

    @operation()
    def evict(self, draw):
        self.rig.host.write_faults = draw.choice((0, 0, 1, 2))
        self.checked_evict(EvictParams(draw.randrange(9)))
        self.rig.host.write_faults = 0

    def checked_evict(self, params):
        free = self.rig.pool.available_size()
        result = self.cache.evict(params)
        assert self.rig.pool.available_size() - free == result.num_tokens_evicted
        return result

    @operation(when=lambda machine: len(list(iter_nodes(machine.cache.root_node))) > 5)
    def reset(self, draw):
        if draw.random() < 0.1:
            self.restart_empty()

    def restart_empty(self):
        self.cache.reset()
        self.rig.pool.clear()
        self.locks = []
        self.forget_store()

    # --- device and host ---

    @operation()
    def evict_host(self, draw):
        self.cache.evict_host(draw.randrange(9))

    @operation(weight=3)
    def load_back(self, draw):
        match = self.checked_match(*self.prompt(draw))
        if match.best_match_node.value is not None:
            return
        quota = draw.choice((None, None, 0, 2, 4))
        locked = match.last_device_node
        self.cache.inc_lock_ref(locked)
        params = InitLoadBackParams(match.best_match_node, match.host_hit_length, mem_quota=quota)
        rows, node = self.cache.init_load_back(params)
        assert len(rows) in (0, match.host_hit_length)
        assert node is (match.best_match_node if len(rows) else match.last_device_node)
        if quota is not None:
            assert len(rows) <= quota
        self.cache.dec_lock_ref(locked)

    @operation()
    def start_loading(self, draw):
        self.cache.ready_to_load_host_cache()

    @operation(weight=7, when=is_stepped)
    def step(self, draw):
        self.engine.step(draw.choice(_LANES), draw.choice((0, 0, 0, 1)))

    @operation(weight=4, when=is_stepped)
    def run_lane(self, draw):
        fast_path = draw.choice(_LANES)
        while self.engine.step(fast_path):
            pass

    @operation(when=is_stepped)
    def step_with_a_failing_write(self, draw):
        self.rig.host.write_faults = draw.choice((1, 2, 2))
        self.engine.step(Lane.WRITE)
        self.rig.host.write_faults = 0

    @operation(when=is_stepped)
    def step_with_a_load_that_works_the_second_time(self, draw):
        self.rig.host.load_faults = 1
        self.engine.step(Lane.LOAD)
        self.rig.host.load_faults = 0

    @operation(weight=2, when=lambda machine: is_stepped(machine) and machine.cache.ongoing_load_back)
    def a_load_fails_permanently(self, draw):
        """Make a load fail, so that its device rows are undefined. The cache raises and is reset."""
        if draw.random() < 0.7:
            return
        self.cache.ready_to_load_host_cache()
        self.rig.host.load_faults = 2
        while self.engine.step(Lane.LOAD):
            pass
        if self.rig.host.load_faults == 0:
            with pytest.raises(TransferError, match="injected load fault"):
                self.cache.check_hicache_events()
            self.restart_empty()
        self.rig.host.load_faults = 0

    @operation(weight=8)
    def check_hicache_events(self, draw):
        self.cache.check_hicache_events()
        self.check_events(all_taken=is_stepped(self))

    @operation()
    def everything_settles(self, draw):
        if draw.random() < 0.3:
            self.settle()

    @operation(when=lambda machine: not is_stepped(machine))
    def copies_will_fail(self, draw):
        """Make one of the next copies fail, on a thread. Only writes may fail twice in a row, so everything settles
        first."""
        self.settle()
        self.rig.host.write_faults, self.rig.host.load_faults = draw.choice((0, 1, 2, 3)), draw.choice((0, 1))

    def settle(self):
        self.rig.settle()
        assert not any((self.cache.ongoing_write_through, self.cache.ongoing_load_back, self.cache.ongoing_backup))
        self.check_events(all_taken=True)
        self.rig.check()
        self.check()

    # --- invariants after each operation ---

    def check(self):
        if is_stepped(self):
            self.rig.check()
        else:
            self.rig.check_bytes()
        self.check_host_references()

    def check_events(self, all_taken=False):
        """all_taken: whether all earlier losses of the store have just been processed."""
        if self.events:
            self.on_host = {self.names.named(prefix)[0] for prefix in self.rig.held(CPU)}
        super().check_events()
        if self.events:
            self.check_store(all_taken)
        elif self.num_stores == 0:
            assert all(node.hash_value is None for node in iter_nodes(self.cache.root_node))

    def check_event(self, event):
        """Check that a page that moves to a slower tier is always on at least one tier."""
        if isinstance(event, BlockRemoved) and event.medium is GPU:
            page = (event.extra_key, *event.block_hashes)
            assert page not in self.on_host or page in self.replay.pages[CPU]

    # --- the end ---

    def teardown(self):
        if hasattr(self, "rig"):
            try:
                self.end()
            finally:
                self.engine.close()
                if self.store is not None:
                    self.store.discard()

    def end(self):
        """Finish everything, evict everything, and check that nothing is left."""
        cache = self.cache
        self.let_go()
        self.settle()
        assert cache.prefetch_tokens_occupied == 0
        assert cache.protected_size() == 0
        assert all(node.lock_ref == 0 for node in iter_nodes(cache.root_node))
        if cache.store is not None:
            assert not cache.store.io.prefetches
        while list(iter_nodes(cache.root_node)):
            assert self.evict_all()
            self.settle()
        assert self.replay.pages[GPU] == self.replay.pages[CPU] == {}
        self.check_all_free()
        if self.store is not None:
            self.detach()
            self.check_events()

    def let_go(self):
        """Release everything that requests hold."""
        self.rig.host.write_faults = self.rig.host.load_faults = 0
        while self.locks:
            self.cache.dec_lock_ref(self.locks.pop())
        for request in list(self.cache.ongoing_prefetch):
            self.cache.release_aborted_request(request)

    def evict_all(self):
        """Evict everything. Returns whether anything was evicted."""
        return self.checked_evict(EvictParams(EVERYTHING)).num_tokens_evicted + self.cache.evict_host(EVERYTHING)

    def check_all_free(self):
        for pool in (self.rig.pool, self.rig.host):
            assert pool.available_size() == pool.size
