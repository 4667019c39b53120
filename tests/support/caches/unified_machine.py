"""State machines of a UnifiedRadixCache with any kinds of state: the shared part, and the machine for one tier."""

from __future__ import annotations

from engine_cache import EvictParams, PoolExhaustedError, Request
from engine_cache.tree.node import iter_nodes
from tests.models.cache_oracle import (
    lost_windows,
    needed_on_device,
    num_usable,
    pages_along,
    states_of_windows,
)
from tests.rigs.cache import CacheRig
from tests.rigs.cache_requests import Requests
from tests.support.caches.cache_machine import CacheMachine, operation
from tests.support.caches.request_steps import RequestSteps
from tests.support.caches.tiered_machine import CPU, EVERYTHING, GPU
from tests.support.log.reuse_oracle import num_reusable


class UnifiedSteps(RequestSteps):
    """Operations on one tier or several. A machine has `rig` and `cache`."""

    CLASS = "unified"
    KINDS: tuple[str, ...] = ()

    # --- match and insert -------------------------------------------------------------------------------------------

    @operation(weight=5)
    def insert(self, draw):
        tokens, extra_key = self.prompt_to_insert(draw)
        known = len(pages_along(self.rig, tokens, extra_key))
        evicted = draw.choice((0, 0, 0, 1, 2, 5)) if "swa" in self.KINDS else 0
        chunked, priority = draw.random() < 0.25, draw.randrange(4)
        result = self.rig.insert(tokens, extra_key, evicted=evicted, chunked=chunked, priority=priority)
        if result is not None:  # the allocation may have evicted some of the known pages
            assert result.prefix_len <= known * self.page_size
            assert result.total_len in (result.prefix_len, len(self.rig.prefixes(tokens)) * self.page_size)

    def prompt_to_insert(self, draw):
        return self.prompt(draw)

    @operation(weight=2)
    def match(self, draw):
        self.checked_match(*self.prompt(draw))

    def checked_match(self, tokens, extra_key):
        """Match and compare with the brute-force reference."""
        pages = pages_along(self.rig, tokens, extra_key)
        any_tier, on_device = (num_usable(self.rig, pages, tiers) for tiers in ({"d", "h"}, {"d"}))
        self.check_reusable(tokens, extra_key, any_tier)
        match = self.rig.match(tokens, extra_key)
        assert len(match.device_indices) == on_device * self.page_size
        assert match.host_hit_length == (any_tier - on_device) * self.page_size
        for node, num_pages in ((match.last_device_node, on_device), (match.best_match_node, any_tier)):
            assert sum(len(step.key) for step in self.rig.up(node)) == num_pages * self.page_size  # type: ignore[misc]
        assert match.last_device_node in [*self.rig.up(match.best_match_node), self.cache.root_node]
        needs_state = any_tier > 0 and "mamba" in self.KINDS and "d" not in pages[any_tier - 1].mamba
        assert match.mamba_host_hit_length == int(needs_state)
        self.check_branching(match, pages, any_tier)
        return match

    def check_reusable(self, tokens, extra_key, usable):
        """Check that the reusable length can be determined from the events alone."""
        if not self.events or self.cache.kv_event_queue or any(self.cache.events.group_queues.values()):
            return
        prompt = [self.names.named(prefix)[0] for prefix in self.names.prefixes(tokens, extra_key)]
        held = self.replay.pages[GPU].keys() | self.replay.pages[CPU].keys()
        groups = {name: replay.pages[GPU].keys() | replay.pages[CPU].keys() for name, replay in self.groups.items()}
        assert num_reusable(prompt, held, groups, self.page_size) == usable

    def held_group(self, group, medium):
        return self.rig.held_group(group, medium)

    def check_branching(self, match, pages, usable):
        if self.cache.cache_controller is not None or "mamba" not in self.KINDS:
            assert match.mamba_branching_seqlen is None
        else:
            beyond = len(pages) * self.page_size // 2 * 2 or None
            assert match.mamba_branching_seqlen == (beyond if len(pages) > usable else None)

    @operation(when=lambda machine: "mamba" in machine.KINDS)
    def match_for_a_request(self, draw):
        """Match for a request, which gets a slot for its initial state."""
        tokens, extra_key = self.prompt(draw)
        req = Request(f"c{len(self.rig.requests)}", [], 0, extra_key)
        try:
            match = self.rig.match(tokens, extra_key, cow_mamba=True, req=req)
        except PoolExhaustedError:
            return
        state = self.rig.data(match.best_match_node, "mamba").value
        assert (req.mamba_cow_src_index is None) == (state is None)
        if req.mamba_pool_idx is not None:
            self.rig.requests.append(req)

    @operation(weight=2, when=lambda machine: machine.rig.requests)
    def end_requests(self, draw):
        self.rig.end_requests()

    # --- locks and eviction -----------------------------------------------------------------------------------------

    @operation()
    def lock(self, draw):
        if len(self.locks) < 3:
            match = self.checked_match(*self.prompt(draw))
            self.locks.append(
                self.checked_lock(match.best_match_node if draw.random() < 0.3 else match.last_device_node)
            )

    def checked_lock(self, node):
        """Lock a node and check that the lock holds one window and one state, and nothing above them."""
        kinds, nodes = ("mamba", "swa"), [place.node for place in self.rig.walk()]
        before = {(kind, step): self.rig.data(step, kind).lock_ref for kind in kinds for step in nodes}
        expected = {(kind, step) for kind, steps in needed_on_device(self.rig, node).items() for step in steps}
        lock = self.cache.inc_lock_ref(node)
        for (kind, step), count in before.items():
            assert self.rig.data(step, kind).lock_ref - count == ((kind, step) in expected)
        return lock

    @operation(weight=2, when=lambda machine: machine.locks)
    def unlock(self, draw):
        self.cache.release(self.locks.pop(draw.randrange(len(self.locks))))

    @operation()
    def evict(self, draw):
        self.fail(draw.choice((0, 0, 1, 2)))
        self.checked_evict(EvictParams(*(draw.choice((0, 1, 4, 8)) for _ in range(3))))
        self.fail(0)

    def checked_evict(self, params):
        before, with_states = self.free_rows(), states_of_windows(self.rig, "value")
        result = self.cache.evict(params)
        assert lost_windows(self.rig, with_states, "value") == []
        assert tuple(new - old for old, new in zip(before, self.free_rows(), strict=True)) == tuple(result)
        return result

    def free_rows(self):
        """Return the numbers of free rows, in the order of `EvictResult`."""
        swa = self.rig.swa.swa.available_size() if self.rig.swa else 0
        return self.rig.pool.available_size(), self.rig.slots.available_size(), swa

    def fail(self, num_writes):
        for pool in self.rig.host_pools.values():
            pool.write_faults = num_writes

    def forget_requests(self):
        self.rig.tokens.clear()
        self.rig.slots.clear()
        self.rig.requests.clear()
        self.rig.loaded.clear()
        self.rig.served.forget()

    def release_all(self):
        self.rig.end_requests()
        for req in list(self.rig.served.running):
            self.rig.served.end(req, is_insert=False)
        while self.locks:
            self.cache.release(self.locks.pop())

    def check_all_free(self):
        pools = [self.rig.pool, self.rig.slots, *self.rig.host_pools.values()]
        for pool in [*pools, *([self.rig.swa.swa] if self.rig.swa else [])]:
            assert pool.available_size() == pool.size


class UnifiedDeviceMachine(UnifiedSteps, CacheMachine):
    """The machine for a cache with one tier."""

    def begin(self, **options):
        self.rig = CacheRig("+".join((self.CLASS, *self.KINDS)), tiers=1, **options)
        Requests(self.rig)
        self.cache = self.rig.cache
        events = self.cache.enable_kv_cache_events
        self.watch(self.rig.page_size, is_bigram=self.rig.is_bigram, events=events)

    def held(self, medium):
        return self.rig.held(medium)

    def check(self):
        self.rig.check()

    @operation(when=lambda machine: len(list(iter_nodes(machine.cache.root_node))) > 5)
    def reset(self, draw):
        if draw.random() < 0.1:
            self.cache.reset()
            self.locks = []
            self.forget_requests()

    def teardown(self):
        if hasattr(self, "rig"):
            self.release_all()
            assert self.cache.protected_size() == 0
            self.checked_evict(EvictParams(EVERYTHING))
            self.check_events()
            assert list(iter_nodes(self.cache.root_node)) == []
            self.check_all_free()
