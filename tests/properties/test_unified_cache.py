"""UnifiedRadixCache with each combination of components, on the device alone and with tiers, under random operations
with transfers in flight, failing copies and storage, and little room.

After every operation tree, lists and pools are recounted, every row of every kind on every tier is compared with the
tokens that it was computed from, the events are replayed, and matches are compared with brute force. Mooncake stores
are tested in their own file.
"""

import pytest
from hypothesis import settings

from tests.support.caches.cache_machine import soak
from tests.support.caches.unified_matrix import machine_of
from tests.support.effort import num_examples

pytestmark = pytest.mark.torch

MAMBA, SWA, DSA = ("mamba",), ("swa",), ("indexer",)
BOTH, BOTH_THE_OTHER_WAY = ("mamba", "swa"), ("swa", "mamba")


def _machine(kinds, tiers, examples, **attributes):
    case = machine_of(kinds, tiers, **attributes).TestCase
    case.settings = settings(max_examples=num_examples(examples), stateful_step_count=40)
    return case


TestRadix = _machine((), "device", 25, CLASS="radix")
TestDevice = _machine((), "device", 15)
TestDeviceMamba = _machine(MAMBA, "device", 25)
TestDeviceSwa = _machine(SWA, "device", 25)
TestDeviceDsa = _machine(DSA, "device", 15)
TestDeviceBoth = _machine(BOTH, "device", 25)
TestHost = _machine((), "host", 15)
TestHostMamba = _machine(MAMBA, "host", 25)
TestHostSwa = _machine(SWA, "host", 25)
TestHostDsa = _machine(DSA, "host", 25)
TestMemory = _machine((), "host+memory", 25)
TestMemoryMamba = _machine(MAMBA, "host+memory", 50)
TestMemorySwa = _machine(SWA, "host+memory", 50)
TestMemoryDsa = _machine(DSA, "host+memory", 50)
TestMemoryBoth = _machine(BOTH, "host+memory", 50)
TestMemoryBothTheOtherWay = _machine(BOTH_THE_OTHER_WAY, "host+memory", 50)
TestDirectory = _machine((), "host+directory", 25)
TestDirectoryMamba = _machine(MAMBA, "host+directory", 50)
TestDirectorySwa = _machine(SWA, "host+directory", 50)
TestDirectoryDsa = _machine(DSA, "host+directory", 50)
TestDirectoryBoth = _machine(BOTH, "host+directory", 50)


@pytest.mark.soak
@pytest.mark.parametrize("kinds", [BOTH, BOTH_THE_OTHER_WAY], ids="+".join)
@pytest.mark.parametrize(
    ("tiers", "options"),
    [
        ("device", {}),
        ("host+memory", {"write_policy": "write_through"}),
        ("host+memory", {"write_policy": "write_back", "stop": "wait_complete"}),
    ],
    ids=["device", "write_through", "write_back"],
)
def test_ten_thousand_operations_leave_everything_in_order(kinds, tiers, options):
    machine = machine_of(kinds, tiers)()
    machine.begin(**options)
    soak(machine, 10_000, str((tiers, kinds)))


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["lru", "mru", "slru"])
def test_ten_thousand_operations_on_a_radix_cache_leave_everything_in_order(policy):
    machine = machine_of((), "device", CLASS="radix")()
    machine.begin(eviction_policy=policy, is_eagle=policy == "slru")
    soak(machine, 10_000, policy)
