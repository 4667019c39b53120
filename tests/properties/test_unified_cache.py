"""UnifiedRadixCache of each combination of kinds, on the device alone and with tiers, transfers in flight, copies and a
store that fail, and hardly any room, in random order.

After every operation tree, lists and pools are recounted, every row of every kind on every tier is compared with what
the tokens say it is, the events are replayed, and matches are compared with brute force.
"""

import time

import pytest
from cache_machine import soak
from hypothesis import settings
from unified_machine import UnifiedCacheMachine, UnifiedDeviceMachine

from engine_cache import EVICTION_POLICIES, WRITE_POLICIES
from engine_cache.storage_operations import STOP_POLICIES

pytestmark = pytest.mark.torch

KINDS = [(), ("mamba",), ("swa",), ("mamba", "swa"), ("swa", "mamba")]
DEVICE = {
    "page_size": (1, 2, 3),
    "window": (1, 3, 4, 8),
    "is_eagle": (False, True),
    "eviction_policy": tuple(EVICTION_POLICIES),
    "enable_kv_cache_events": (True, True, True, False),
}
TIERS = {
    **DEVICE,
    "write_policy": WRITE_POLICIES,
    "load_back_threshold": (1, 1, 4),
    "store": ("memory", "memory", None),
    "stop": STOP_POLICIES,
    "emit": (True, True, False),
}


def _machine(base, kinds, options, examples):
    name = "".join(["Test", base.__name__.removesuffix("Machine"), *(kind.title() for kind in kinds)])
    machine = type(name + "Machine", (base,), {"KINDS": kinds, "OPTIONS": options})
    case = machine.TestCase
    case.settings = settings(max_examples=examples, stateful_step_count=40, deadline=None)
    return case


TestDevice = _machine(UnifiedDeviceMachine, (), DEVICE, 15)
TestDeviceMamba = _machine(UnifiedDeviceMachine, ("mamba",), DEVICE, 25)
TestDeviceSwa = _machine(UnifiedDeviceMachine, ("swa",), DEVICE, 25)
TestDeviceBoth = _machine(UnifiedDeviceMachine, ("mamba", "swa"), DEVICE, 25)
TestTiers = _machine(UnifiedCacheMachine, (), TIERS, 25)
TestTiersMamba = _machine(UnifiedCacheMachine, ("mamba",), TIERS, 50)
TestTiersSwa = _machine(UnifiedCacheMachine, ("swa",), TIERS, 50)
TestTiersBoth = _machine(UnifiedCacheMachine, ("mamba", "swa"), TIERS, 50)
TestTiersBothTheOtherWay = _machine(UnifiedCacheMachine, ("swa", "mamba"), TIERS, 50)


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
@pytest.mark.parametrize(
    ("base", "options"),
    [
        (UnifiedDeviceMachine, {}),
        (UnifiedCacheMachine, {"store": None, "write_policy": "write_through_selective"}),
        (UnifiedCacheMachine, {"write_policy": "write_through"}),
        (UnifiedCacheMachine, {"write_policy": "write_back", "stop": "wait_complete"}),
    ],
    ids=["device", "host", "write_through", "write_back"],
)
def test_ten_thousand_operations_leave_everything_in_order(base, options, kinds):
    began = time.process_time()
    machine = base()
    machine.KINDS = kinds
    machine.begin(**options)
    soak(machine, 10_000, str((base.__name__, kinds)))
    assert time.process_time() - began < 60
