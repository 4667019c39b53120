"""State machines of the cache classes for one kind of model, on device and host, with a store."""

from __future__ import annotations

from typing import ClassVar

from engine_cache import EVICTION_POLICIES, WRITE_POLICIES, EvictParams, InitLoadBackParams, Lane, Request
from engine_cache.tree.node import iter_nodes
from kv_events.schema import StorageMedium
from tests.rigs.cache_requests import Requests
from tests.support.caches.cache_machine import operation
from tests.support.caches.request_steps import RequestSteps
from tests.support.caches.storage_machine import is_stepped
from tests.support.caches.tiered_machine import EVERYTHING, TieredCacheMachine

LAYOUTS = ("layer_first", "page_first", "page_first_direct")


class OldMatches(RequestSteps, TieredCacheMachine):
    """Runs requests, and loads back old matches, whose nodes may have been split, evicted or deleted; the device part
    is locked."""

    OPTIONS: ClassVar = TieredCacheMachine.STORE_OPTIONS | {
        "page_size": (1, 2, 3),
        "is_eagle": (False, True),
        "write_policy": WRITE_POLICIES,
        "enable_kv_cache_events": (True, True, True, False),
        "layout": LAYOUTS,
    }

    def begin(self, **options):  # type: ignore[override]
        self.old_matches = []
        super().begin(**options)

    def make_rig(self, **options):
        rig = super().make_rig(**options)
        Requests(rig)
        return rig

    @operation(weight=2, when=lambda machine: len(machine.old_matches) < 2)
    def keep_match(self, draw):
        match = self.checked_match(*self.prompt(draw))
        self.cache.inc_lock_ref(match.last_device_node)
        self.old_matches.append(match)

    @operation(weight=2, when=lambda machine: machine.old_matches)
    def load_back_an_old_match(self, draw):
        match = self.old_matches.pop(draw.randrange(len(self.old_matches)))
        anchor = match.last_device_node
        rows, node = self.cache.init_load_back(InitLoadBackParams(match.best_match_node, match.host_hit_length))
        path = self.path_to(node)
        assert all(step.value is not None for step in path)
        assert anchor in path or node in self.path_to(anchor)
        assert not len(rows) or (path[0] is match.best_match_node and len(rows) <= sum(len(step.key) for step in path))
        self.cache.dec_lock_ref(anchor)

    def path_to(self, node):
        """Return the node and its ancestors, which must be in the tree."""
        path = [node]
        while path[-1] is not self.cache.root_node:
            assert path[-1] in path[-1].parent.children.values()
            path.append(path[-1].parent)
        return path

    def restart_empty(self):
        super().restart_empty()
        self.old_matches.clear()
        self.rig.slots.clear()
        self.rig.requests.clear()
        self.rig.loaded.clear()
        self.rig.served.forget()

    def let_go(self):
        super().let_go()
        for req in list(self.rig.served.running):
            self.rig.served.end(req, is_insert=False)
        while self.old_matches:
            self.cache.dec_lock_ref(self.old_matches.pop().last_device_node)


class HiRadixMachine(OldMatches):
    NAME = "hiradix"
    OPTIONS: ClassVar = OldMatches.OPTIONS | {
        "eviction_policy": tuple(sorted(EVICTION_POLICIES)),
        "pools": ("mha", "mla"),
    }


class NsaMachine(OldMatches):
    """Sparse attention: KV is always accompanied by the index of the same tokens."""

    NAME = "hiradix+indexer"


class HiMambaMachine(OldMatches):
    """A match is compared with a walk over the whole tree; a state, on any tier, with the tokens that it was computed
    from."""

    NAME = "himamba"
    OPTIONS: ClassVar = OldMatches.OPTIONS | {"pools": ("mha", "mla")}

    def held_group(self, group, medium):
        return self.rig.held_group(group, medium)

    def ends(self, field):
        """Return (namespace, raw tokens) of every prefix with a state."""
        places = self.rig.walk()
        return {
            (place.extra_key, place.prefixes[-1])
            for place in places
            if getattr(self.rig.data(place.node, "mamba"), field) is not None
        }

    def checked_match(self, tokens, extra_key):
        """Check that a match covers everything in the tree up to the last state on either tier."""
        in_tree = {(namespace, raw) for _, namespace, prefixes in self.rig.walk() for raw in prefixes}
        on_device = self.rig.held(StorageMedium.GPU)
        device_states, host_states = self.ends("value"), self.ends("host_value")
        path = self.names.prefixes(tokens, extra_key)
        matched = next((i for i, page in enumerate(path) if page not in in_tree), len(path))
        usable = next((i for i in range(matched, 0, -1) if path[i - 1] in device_states | host_states), 0)
        used = path[:usable]
        match = self.rig.match(tokens, extra_key)
        assert len(match.device_indices) == self.page_size * len(on_device.intersection(used))
        assert match.host_hit_length == self.page_size * len(set(used) - on_device)
        assert match.mamba_host_hit_length == bool(used and used[-1] not in device_states)
        on_gpu = len(on_device.intersection(path[:matched]))
        beyond = on_gpu * self.page_size // 2 * 2 or None
        assert match.mamba_branching_seqlen == (beyond if on_gpu > usable else None)
        return match

    @operation(weight=2)
    def load_back(self, draw):
        match = self.checked_match(*self.prompt(draw))
        req = Request(f"r{len(self.rig.requests)}", [], 0) if draw.random() < 0.5 else None
        if match.host_hit_length or match.mamba_host_hit_length:
            (rows, node), _, lock = self.rig.load_back(match, req=req)
            assert len(rows) in (0, match.host_hit_length)
            is_state = node is self.cache.root_node or self.rig.data(node, "mamba").value is not None
            assert is_state or not self.rig.slots.available_size()
            self.cache.release(lock)

    @operation(weight=2, when=lambda machine: machine.rig.requests)
    def end_a_loaded_request(self, draw):
        self.rig.end_requests(1)

    @operation()
    def evict_mamba(self, draw):
        self.rig.host_states.write_faults = draw.choice((0, 0, 1, 2))
        self.checked_evict(EvictParams(0, mamba_num=draw.randrange(4)))
        self.rig.host_states.write_faults = 0

    def checked_evict(self, params):
        free = self.rig.slots.available_size()
        result = super().checked_evict(params)
        assert self.rig.slots.available_size() - free == result.mamba_num_evicted
        return result

    @operation()
    def evict_mamba_host(self, draw):
        self.cache.evict_mamba_host(draw.randrange(4))

    @operation(when=is_stepped)
    def step_with_a_failing_write_of_a_state(self, draw):
        self.rig.host_states.write_faults = draw.choice((1, 2, 2))
        self.engine.step(Lane.WRITE)
        self.rig.host_states.write_faults = 0

    def let_go(self):
        self.rig.host_states.write_faults = 0
        self.rig.end_requests()
        super().let_go()

    def end(self):
        super().end()
        assert self.cache.states.protected_size == 0

    def settle(self):
        super().settle()
        anchors = self.anchors()
        for node in (self.cache.root_node, *iter_nodes(self.cache.root_node)):
            assert self.rig.data(node, "mamba").host_lock_ref == anchors[node]

    def evict_all(self):
        states = self.checked_evict(EvictParams(EVERYTHING, mamba_num=EVERYTHING)).mamba_num_evicted
        return states + super().evict_all()

    def check_all_free(self):
        super().check_all_free()
        for pool in (self.rig.slots, self.rig.host_states):
            assert pool.available_size() == pool.size
