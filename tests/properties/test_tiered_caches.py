"""Caches of the classes for one kind of model under random operations and requests, with transfers in flight, failing
copies and storage, and little room."""

import pytest
from hypothesis import settings

from engine_cache import WRITE_POLICIES, ThreadCopyEngine
from kv_events.schema import BlockRemoved, BlockStored, StorageMedium
from tests.support.caches.cache_machine import soak
from tests.support.caches.class_machines import HiMambaMachine, HiRadixMachine, NsaMachine
from tests.support.effort import num_examples

pytestmark = pytest.mark.torch

MACHINES = [HiRadixMachine, HiMambaMachine, NsaMachine]


def _case(machine, examples):
    case = machine.TestCase
    case.settings = settings(max_examples=num_examples(examples), stateful_step_count=50)
    return case


TestHiRadix = _case(HiRadixMachine, 150)
TestHiMamba = _case(HiMambaMachine, 150)
TestNsa = _case(NsaMachine, 40)


@pytest.mark.soak
@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
@pytest.mark.parametrize("machine", MACHINES)
def test_ten_thousand_operations_leave_everything_in_order(machine, write_policy):
    machine = machine()
    machine.begin(write_policy=write_policy)
    soak(machine, 6000 if isinstance(machine, NsaMachine) else 20_000, seed=write_policy)
    assert machine.cache.num_failed_backups > 0
    assert machine.num_fetched > 0
    for medium in (StorageMedium.GPU, StorageMedium.CPU, StorageMedium.DISK):
        assert min(machine.told[kind, medium] for kind in (BlockStored, BlockRemoved)) > 10


@pytest.mark.parametrize("machine", MACHINES)
def test_three_thousand_operations_with_copies_on_threads_leave_everything_in_order(machine):
    machine = machine()
    machine.begin(engine=ThreadCopyEngine(), store="directory")
    soak(machine, 1000 if isinstance(machine, NsaMachine) else 3000, seed=1)
