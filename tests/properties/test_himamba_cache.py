"""HiMambaRadixCache under random operations with transfers in flight, failing copies and storage, and little room.

A match is compared with a walk over the whole tree; a state, on any tier, with the tokens that it was computed from.
"""

import pytest
from hypothesis import settings

from engine_cache import WRITE_POLICIES, EvictParams, Lane, PoolExhaustedError, ThreadCopyEngine
from engine_cache.tree.node import iter_nodes
from kv_events.schema import BlockRemoved, BlockStored, StorageMedium
from tests.support.caches.cache_machine import operation, soak
from tests.support.caches.hybrid_rig import HybridRig
from tests.support.caches.storage_machine import is_stepped
from tests.support.caches.tier_rig import LAYOUTS
from tests.support.caches.tiered_machine import EVERYTHING, OldMatches
from tests.support.effort import num_examples

pytestmark = pytest.mark.torch


class HiMambaCacheMachine(OldMatches):
    OPTIONS = OldMatches.STORE_OPTIONS | {
        "page_size": (1, 2, 3),
        "is_eagle": (False, True),
        "write_policy": WRITE_POLICIES,
        "enable_kv_cache_events": (True, True, True, False),
        "attention": ("mha", "mla"),
        "layout": LAYOUTS,
    }

    def make_rig(self, **options):
        return HybridRig(**options, emit_group_events=options.get("enable_kv_cache_events", True))

    def held_group(self, group, medium):
        return self.rig.usable_states(medium)

    def checked_match(self, tokens, extra_key):
        """Check that a match covers everything in the tree up to the last state on either tier."""
        in_tree = {(namespace, raw) for _, namespace, prefixes in self.rig.walk() for raw in prefixes}
        on_device = self.rig.held(StorageMedium.GPU)
        device_states, host_states = self.rig.state_ends()
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
        tokens, extra_key = self.prompt(draw)
        match = self.checked_match(tokens, extra_key)
        locked = match.last_device_node
        self.cache.inc_lock_ref(locked)
        try:
            result = self.rig.load_back(tokens, extra_key, with_request=draw.random() < 0.5)
        except PoolExhaustedError:
            assert self.rig.slots.available_size() == 0
            self.cache.dec_lock_ref(locked)
            return
        assert (result is None) == (not match.host_hit_length and not match.mamba_host_hit_length)
        if result is not None:
            rows, node = result
            assert len(rows) in (0, match.host_hit_length)
            assert node is self.cache.root_node or node.mamba_value is not None
        self.cache.dec_lock_ref(locked)

    @operation(weight=2, when=lambda machine: machine.rig.loaded)
    def end_a_loaded_request(self, draw):
        self.rig.end_request()

    @operation(weight=2)
    def serve(self, draw):
        self.rig.serve(*self.prompt(draw))

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

    def restart_empty(self):
        super().restart_empty()
        self.rig.slots.clear()
        self.rig.loaded.clear()

    def let_go(self):
        super().let_go()
        self.rig.host_states.write_faults = 0
        while self.rig.loaded:
            self.rig.end_request()

    def end(self):
        super().end()
        assert self.cache.states.protected_size == 0

    def settle(self):
        super().settle()
        anchors = self.anchors()
        for node in (self.cache.root_node, *iter_nodes(self.cache.root_node)):
            assert node.host_mamba_ref_counter == anchors[node]

    def evict_all(self):
        states = self.checked_evict(EvictParams(EVERYTHING, mamba_num=EVERYTHING)).mamba_num_evicted
        return states + super().evict_all()

    def check_all_free(self):
        super().check_all_free()
        for pool in (self.rig.slots, self.rig.host_states):
            assert pool.available_size() == pool.size


TestHiMambaCache = HiMambaCacheMachine.TestCase
TestHiMambaCache.settings = settings(max_examples=num_examples(150), stateful_step_count=50)


@pytest.mark.soak
@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
def test_ten_thousand_operations_leave_everything_in_order(write_policy):
    machine = HiMambaCacheMachine()
    machine.begin(write_policy=write_policy)
    soak(machine, 10_000, seed=write_policy)
    assert machine.cache.num_failed_backups > 0
    assert machine.num_fetched > 0
    for medium in (StorageMedium.GPU, StorageMedium.CPU, StorageMedium.DISK):
        assert min(machine.told[kind, medium] for kind in (BlockStored, BlockRemoved)) > 10


def test_three_thousand_operations_with_copies_on_threads_leave_everything_in_order():
    machine = HiMambaCacheMachine()
    machine.begin(engine=ThreadCopyEngine(), store="directory")
    soak(machine, 3000, seed=1)
