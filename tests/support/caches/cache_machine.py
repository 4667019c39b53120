"""The base of the state machines for prefix caches.

A machine runs operations in random order and checks all invariants after each one. The machine of a cache class adds a
factory (`begin`, which receives one value of each of `OPTIONS`), the content of the cache (`held`), operations and
invariants. Operations draw from a `random.Random`: one of hypothesis, which shrinks failures, or a plain one in `soak`,
which runs many operations on one cache.
"""

from __future__ import annotations

import inspect
import random
from collections import Counter
from time import process_time
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_events.schema import StorageMedium
from tests.models.event_replay import GroupReplay, PageNames, Replay

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


class CacheMachine(RuleBasedStateMachine):
    """Base class of the machines. `begin` must set `cache` and call `watch`."""

    OPTIONS: ClassVar[dict[str, tuple[object, ...]]] = {}
    """Arguments of `begin`: possible values by name."""
    MEDIA: ClassVar[tuple[StorageMedium, ...]] = (StorageMedium.GPU,)
    """Media that `held` supports."""

    cache: Any
    """The cache under test, created by `begin`."""

    @initialize(draw=_RANDOMS)
    def start(self, draw):
        self.begin(**{name: draw.choice(values) for name, values in self.OPTIONS.items()})

    def begin(self, **options):
        """Create the cache. options: one value of each of `OPTIONS`."""
        raise NotImplementedError

    def watch(self, page_size, *, is_bigram, events, ordered=frozenset({StorageMedium.GPU})):
        """Start to replay the events of the cache. ordered: see `Replay`."""
        self.page_size, self.is_bigram, self.events = page_size, is_bigram, events
        self.names = PageNames(page_size, is_bigram)
        self.replay = Replay(page_size, ordered)
        self.groups = {group: GroupReplay(page_size) for group in self.cache.event_groups}
        self.locks = []
        self.told: Counter[Any] = Counter()  # (kind of event, medium) -> number of events

    def held(self, medium):
        """Return `(namespace, raw tokens)` of every prefix whose last page is on the medium."""
        raise NotImplementedError

    def held_group(self, group, medium):
        """Like `held`, for one group of a cache with `event_groups`."""
        raise NotImplementedError

    def check(self):
        """Recount tree and pools."""
        raise NotImplementedError

    # --- random values ---

    def prompt(self, draw):
        """Draw tokens and a namespace: pages of equal tokens, then a tail. There are few different pages, so that
        prompts often share prefixes, diverge and extend each other."""
        pages = [draw.choice((0, 0, 1)) for _ in range(draw.randrange(7))]
        tokens = [page for page in pages for _ in range(self.page_size)] + [1] * draw.randrange(4)
        return tokens, draw.choice((None, None, None, "a"))

    # --- invariants after each operation ---

    @invariant()
    def all_promises_hold(self):
        self.check_events()
        self.check()

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
        for medium in self.MEDIA:
            assert self.replay.pages[medium] == dict(map(self.names.named, self.held(medium)))

        self.check_group_events()

    def check_group_events(self):
        """Check the same for each group."""
        for group, events in self.cache.take_group_events().items():
            for event in events:
                self.groups[group].apply(event)
            for medium in StorageMedium:
                named = map(self.names.named, self.held_group(group, medium))
                expected = {page: facts.sequence_hash for page, facts in named}
                assert self.groups[group].pages[medium] == expected, (group, medium)

    def check_event(self, event):
        """Check an event beyond the rules of `Replay`. The preceding events have been applied."""


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
