"""The state machine of a prefix cache of any class, and its part for the device.

A machine runs operations in random order on a `CacheRig`. After each one it recounts tree and pools, compares the bytes
of every tier with the tokens that they were computed from, and replays the events. Matches and locks are compared with
brute force. Operations draw from a `random.Random`: one of hypothesis, which shrinks failures, or a plain one in
`soak`, which runs many operations on one cache.
"""

import inspect
import random
from collections import Counter
from collections.abc import Mapping
from time import process_time
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_cache import EvictParams
from engine_cache.tree.node import iter_nodes
from kv_events.schema import StorageMedium
from tests.models.cache_oracle import lost_windows, needed_on_device, num_usable, pages_along, states_of_windows
from tests.models.event_replay import GroupReplay, PageNames, Replay
from tests.rigs.cache import CPU, EVERYTHING, GPU, CacheRig
from tests.rigs.cache_requests import Requests
from tests.support.log.reuse_oracle import num_reusable

MOST_SOAK_CPU_S = 60
_RANDOMS = st.randoms(use_true_random=False, note_method_calls=True)


def operation(weight=1, when=None):
    """Mark a method `(self, draw)` as an operation. weight: frequency in a soak. when(machine): whether it may run."""

    def mark(method):
        marked = rule(draw=_RANDOMS)(method)
        if when is not None:
            marked = precondition(when)(marked)
        vars(marked).update(weight=weight, when=when)
        return marked

    return mark


def has_nodes(machine):
    return len(list(iter_nodes(machine.cache.root_node))) > 5


class CacheMachine(RuleBasedStateMachine):
    """A cache with one tier."""

    CLASS = "unified"
    KINDS: tuple[str, ...] = ()
    """Kinds of state besides KV, of a unified cache or "indexer"."""
    TIERS = 1
    OPTIONS: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Arguments of `begin`: possible values by name."""
    MEDIA: ClassVar[tuple[StorageMedium, ...]] = (GPU,)

    @initialize(draw=_RANDOMS)
    def start(self, draw):
        self.begin(**{name: draw.choice(values) for name, values in self.OPTIONS.items()})

    def begin(self, **options):
        """Create the cache. options: those of the rig."""
        self.rig = rig = CacheRig("+".join((self.CLASS, *self.KINDS)), tiers=self.TIERS, **options)
        self.cache, self.engine, self.page_size, self.served = rig.cache, rig.engine, rig.page_size, Requests(rig)
        self.variant = self.cache.variant
        self.events = self.cache.enable_kv_cache_events
        host = self.cache.host
        is_closed = host is not None and host.backups.write_policy != "write_back"
        self.names = PageNames(self.page_size, rig.is_bigram)
        self.replay = Replay(self.page_size, ordered={GPU, CPU} if is_closed else {GPU})
        self.groups = {group: GroupReplay(self.page_size) for group in self.cache.event_groups}
        self.told: Counter[Any] = Counter()  # (kind of event, medium) -> number of events
        self.locks = []
        self.seen = set[Any]()  # prefixes of all prompts
        self.inserted = list[Any](), None  # the last prompt

    def prompt(self, draw):
        """Draw tokens and a namespace: pages of equal tokens, then a tail. There are few different pages, so that
        prompts often share prefixes, diverge and extend each other."""
        pages = [draw.choice((0, 0, 1)) for _ in range(draw.randrange(7))]
        tokens = [page for page in pages for _ in range(self.page_size)] + [1] * draw.randrange(4)
        return self.noted(tokens, draw.choice((None, None, None, "a")))

    def noted(self, tokens, extra_key):
        self.seen.update(self.names.prefixes(tokens, extra_key))
        return tokens, extra_key

    # --- inserts and matches ---

    @operation(weight=5)
    def insert(self, draw):
        tokens, extra_key = self.inserted = self.prompt_to_insert(draw)
        known = len(pages_along(self.rig, tokens, extra_key))
        evicted = draw.choice((0, 0, 0, 1, 2, 5)) if self.rig.swa else 0
        chunked, priority = draw.random() < 0.25, draw.randrange(4)
        self.rig.host.refusals = draw.choice((0, 0, 0, 1, 2, 2))
        result = self.rig.insert(tokens, extra_key, evicted=evicted, chunked=chunked, priority=priority)
        self.rig.host.refusals = 0
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
        usable = num_usable(self.rig, pages, {"d", "h"})
        on_device = num_usable(self.rig, pages, {"d"})
        if not self.variant.device_match_needs_states:
            on_device = sum("d" in page.full for page in pages[:usable])
        self.check_reusable(tokens, extra_key, usable)
        match = self.rig.match(tokens, extra_key)
        assert len(match.device_indices) == on_device * self.page_size
        assert match.host_hit_length == (usable - on_device) * self.page_size
        best = usable
        if self.cache.host is not None and self.variant.match_ends_on_host:
            copied = [
                n for n in range(1, usable + 1) if "h" in pages[n - 1].full and (n == usable or pages[n - 1].ends_node)
            ]
            best = max(copied, default=0)
        for node, num_pages in ((match.last_device_node, on_device), (match.best_match_node, best)):
            assert sum(len(step.key) for step in self.rig.up(node)) == num_pages * self.page_size
        needs_state = usable > 0 and "mamba" in self.rig.kinds and "d" not in pages[usable - 1].mamba
        assert match.mamba_host_hit_length == int(needs_state)
        self.check_branching(match, pages, usable)
        return match

    def check_reusable(self, tokens, extra_key, usable):
        """Check that the reusable length can be determined from the events alone."""
        if not self.events or self.cache.kv_event_queue or any(self.cache.events.group_queues.values()):
            return
        prompt = [self.names.named(prefix)[0] for prefix in self.names.prefixes(tokens, extra_key)]
        held = self.replay.pages[GPU].keys() | self.replay.pages[CPU].keys()
        groups = {name: replay.pages[GPU].keys() | replay.pages[CPU].keys() for name, replay in self.groups.items()}
        assert num_reusable(prompt, held, groups, self.page_size) == usable

    def check_branching(self, match, pages, usable):
        expected, cached = None, sum("d" in page.full for page in pages)
        is_reported = self.cache.host is None or not self.variant.device_match_needs_states
        if "mamba" in self.rig.kinds and is_reported and cached > usable:
            expected = cached * self.page_size // 2 * 2 or None
        assert match.mamba_branching_seqlen == expected

    @operation(weight=2, when=lambda machine: machine.rig.requests)
    def end_requests(self, draw):
        self.rig.end_requests(draw.choice((None, 1)))

    # --- locks and eviction ---

    @operation()
    def lock(self, draw):
        if len(self.locks) < 3:
            node = self.checked_match(*self.prompt(draw)).last_device_node
            if draw.random() < 0.3:  # any node, which may lack data
                has_tickets = self.variant.locks_have_tickets
                nodes = [place.node for place in self.rig.walk() if has_tickets or place.node.value is not None]
                node = draw.choice([node, *nodes])
            self.locks.append(self.checked_lock(node))

    def checked_lock(self, node):
        """Lock a node and check that the lock holds one window and one state, and nothing above them."""
        kinds, nodes = ("mamba", "swa"), [place.node for place in self.rig.walk()]
        before = {(kind, step): self.rig.data(step, kind).lock_ref for kind in kinds for step in nodes}
        protected = self.cache.protected_size()
        expected = {(kind, step) for kind, steps in needed_on_device(self.rig, node).items() for step in steps}
        lock = self.cache.inc_lock_ref(node)
        for (kind, step), count in before.items():
            assert self.rig.data(step, kind).lock_ref - count == ((kind, step) in expected)
        assert lock.delta == protected - self.cache.protected_size()
        return lock

    @operation(weight=2, when=lambda machine: machine.locks)
    def unlock(self, draw):
        protected = self.cache.protected_size()
        released = self.cache.release(self.locks.pop(draw.randrange(len(self.locks))))
        assert released.delta == protected - self.cache.protected_size()

    @operation(weight=2)
    def evict(self, draw):
        self.fail(draw.choice((0, 0, 1, 2)))
        self.checked_evict(EvictParams(*(draw.choice((0, 1, 4, 8, 1000)) for _ in range(3))))
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

    @operation(when=has_nodes)
    def reset(self, draw):
        if draw.random() < 0.1:
            self.restart_empty()

    def restart_empty(self):
        self.rig.reset()
        self.served.forget()
        self.locks = []

    # --- requests, from their match to their end ---

    def one_request(self, draw):
        return draw.choice(list(self.served.running))

    @operation(weight=4)
    def begin_a_request(self, draw):
        req = self.served.begin(*self.prompt_to_run(draw))
        if req is not None and draw.random() < 0.6:
            self.load_the_match_of(req, draw)

    def prompt_to_run(self, draw):
        """Draw a prompt. Most of them have been evicted from the device."""
        away = sorted(self.rig.held(CPU) - self.rig.held(GPU), key=str)
        if away and draw.random() < 0.7:
            extra_key, raw = draw.choice(away)
            return self.noted([*raw, *[1] * draw.randrange(4)], extra_key)
        return self.prompt(draw)

    @operation(weight=2, when=lambda machine: machine.served.matched)
    def load_an_old_match(self, draw):
        self.load_the_match_of(draw.choice(list(self.served.matched)), draw)

    def load_the_match_of(self, req, draw):
        self.served.load_back(req, draw.choice((None, None, None, 0, 2)))

    @operation(weight=4, when=lambda machine: machine.served.running)
    def compute_some(self, draw):
        req = self.one_request(draw)
        tokens = self.served.running[req]
        self.served.compute(req, tokens[: draw.randrange(len(tokens) + 1)])
        if self.rig.swa and req in self.served.running and draw.random() < 0.5:
            self.served.slide_window(req)

    @operation(weight=2, when=lambda machine: machine.served.running)
    def share_what_is_computed(self, draw):
        self.served.share(self.one_request(draw), chunked=draw.random() < 0.3)

    @operation(weight=3, when=lambda machine: machine.served.running)
    def end_a_request(self, draw):
        self.served.end(self.one_request(draw), is_insert=draw.random() < 0.7)

    @operation(weight=2, when=lambda machine: machine.served.waiting)
    def abort_before_it_runs(self, draw):
        self.served.end(draw.choice(list(self.served.waiting)), is_insert=False)

    # --- invariants after each operation ---

    @invariant()
    def all_promises_hold(self):
        self.check_events()
        self.check()

    def check(self):
        self.rig.check()

    def check_events(self, all_taken=False):
        """Check that the events replay to the content of the cache."""
        if not self.events:
            assert self.cache.kv_event_queue == []
            assert self.cache.take_group_events() == {}
            return
        for event in self.cache.take_events():
            self.check_event(event)
            self.replay.apply(event)
            self.told[type(event), getattr(event, "medium", None)] += 1
        places = list(self.rig.walk())
        for medium in self.MEDIA:
            assert self.replay.pages[medium] == dict(map(self.names.named, self.rig.held(medium, places)))
        for group, events in self.cache.take_group_events().items():
            for event in events:
                self.groups[group].apply(event)
            for medium in StorageMedium:
                named = map(self.names.named, self.rig.held_group(group, medium, places))
                expected = {page: facts.sequence_hash for page, facts in named}
                assert self.groups[group].pages[medium] == expected, (group, medium)

    def check_event(self, event):
        """Check an event beyond the rules of `Replay`. The preceding events have been applied."""

    # --- the end ---

    def teardown(self):
        if hasattr(self, "rig"):
            try:
                self.end()
            finally:
                self.engine.close()

    def end(self):
        """Release and evict everything, and check that nothing is left."""
        self.let_go()
        assert self.cache.protected_size() == 0
        self.checked_evict(EVERYTHING)
        self.check_events()
        assert list(iter_nodes(self.cache.root_node)) == []
        self.check_all_free()

    def let_go(self):
        """Release everything that requests hold."""
        self.rig.end_requests()
        for req in list(self.served.running):
            self.served.end(req, is_insert=False)
        while self.locks:
            self.cache.release(self.locks.pop())

    def check_all_free(self):
        pools = [self.rig.pool, self.rig.slots, *self.rig.host_pools.values()]
        for pool in [*pools, *([self.rig.swa.swa] if self.rig.swa else [])]:
            assert pool.available_size() == pool.size


def soak(machine, num_operations, seed, recount_every=10):
    """Run operations on a machine after `begin`, then tear it down. Fails after `MOST_SOAK_CPU_S` of CPU time."""
    began = process_time()
    run_some(machine, num_operations, random.Random(seed), recount_every)
    machine.teardown()
    assert process_time() - began < MOST_SOAK_CPU_S


def run_some(machine, num_operations, draw, recount_every=10):
    """Run operations by weight. Checks events after each operation and recounts after every `recount_every`th."""
    operations = [each for _, each in inspect.getmembers(type(machine), inspect.isfunction) if hasattr(each, "weight")]
    weights = [each.weight for each in operations]
    for turn in range(num_operations):
        (chosen,) = draw.choices(operations, weights)
        if chosen.when is None or chosen.when(machine):
            chosen(machine, draw)
            machine.check_events()
            if turn % recount_every == 0:
                machine.check()
