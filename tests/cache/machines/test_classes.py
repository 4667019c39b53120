"""Caches of every class, with each kind of model on each set of tiers, under random operations and requests, with
transfers in flight, failing copies and storage, and little room. `CacheMachine` states what is checked. Mooncake stores
are tested in their own file."""

import random

import pytest
from hypothesis import settings

from engine_cache import WRITE_POLICIES, ThreadCopyEngine
from kv_events.schema import BlockRemoved, BlockStored, StorageMedium
from tests.rigs.machines.cache_machine import run_some, soak
from tests.rigs.machines.cache_machines import (
    CLASS_MACHINES,
    MODELS,
    HiMambaMachine,
    HiRadixMachine,
    NsaMachine,
    machine_of,
)
from tests.support.effort import num_examples

MAMBA, SWA, DSA = ("mamba",), ("swa",), ("indexer",)
BOTH, BOTH_THE_OTHER_WAY = ("mamba", "swa"), ("swa", "mamba")
MEDIA = {
    "device": {StorageMedium.GPU},
    "host": {StorageMedium.GPU, StorageMedium.CPU},
    "host+directory": {StorageMedium.GPU, StorageMedium.CPU, StorageMedium.DISK},
    "host+mooncake": {StorageMedium.GPU, StorageMedium.CPU, StorageMedium.EXTERNAL},
}
COMBINATIONS = [
    pytest.param(model, tiers, marks=[pytest.mark.mooncake] * ("mooncake" in tiers))
    for model in MODELS
    for tiers in MEDIA
]
LEAST_FETCHED_PAGES, MOST_ROUNDS = 5, 4


def _case(machine, examples):
    case = machine.TestCase
    case.settings = settings(max_examples=num_examples(examples), stateful_step_count=45)
    return case


TestHiRadix = _case(HiRadixMachine, 75)
TestHiMamba = _case(HiMambaMachine, 75)
TestNsa = _case(NsaMachine, 40)
TestDevice = _case(machine_of((), "device"), 15)
TestDeviceMamba = _case(machine_of(MAMBA, "device"), 25)
TestDeviceSwa = _case(machine_of(SWA, "device"), 25)
TestDeviceDsa = _case(machine_of(DSA, "device"), 15)
TestDeviceBoth = _case(machine_of(BOTH, "device"), 25)
TestHost = _case(machine_of((), "host"), 15)
TestHostMamba = _case(machine_of(MAMBA, "host"), 25)
TestHostSwa = _case(machine_of(SWA, "host"), 25)
TestHostDsa = _case(machine_of(DSA, "host"), 25)
TestMemory = _case(machine_of((), "host+memory"), 25)
TestMemoryMamba = _case(machine_of(MAMBA, "host+memory"), 50)
TestMemorySwa = _case(machine_of(SWA, "host+memory"), 50)
TestMemoryDsa = _case(machine_of(DSA, "host+memory"), 50)
TestMemoryBoth = _case(machine_of(BOTH, "host+memory"), 50)
TestMemoryBothTheOtherWay = _case(machine_of(BOTH_THE_OTHER_WAY, "host+memory"), 50)
TestDirectory = _case(machine_of((), "host+directory"), 25)
TestDirectoryMamba = _case(machine_of(MAMBA, "host+directory"), 50)
TestDirectorySwa = _case(machine_of(SWA, "host+directory"), 50)
TestDirectoryDsa = _case(machine_of(DSA, "host+directory"), 50)
TestDirectoryBoth = _case(machine_of(BOTH, "host+directory"), 50)


# --- long runs ---


@pytest.mark.soak
@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
@pytest.mark.parametrize("machine", CLASS_MACHINES)
def test_ten_thousand_operations_on_a_class_leave_everything_in_order(machine, write_policy):
    machine = machine()
    machine.begin(write_policy=write_policy)
    soak(machine, 4000 if isinstance(machine, NsaMachine) else 10_000, seed=write_policy)
    assert machine.cache.num_failed_backups > 0
    assert machine.num_fetched > 0
    for medium in (StorageMedium.GPU, StorageMedium.CPU, StorageMedium.DISK):
        assert min(machine.told[kind, medium] for kind in (BlockStored, BlockRemoved)) > 10


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
def test_ten_thousand_operations_with_all_kinds_leave_everything_in_order(kinds, tiers, options):
    machine = machine_of(kinds, tiers)()
    machine.begin(**options)
    soak(machine, 10_000, str((tiers, kinds)))


@pytest.mark.parametrize("machine", CLASS_MACHINES)
def test_three_thousand_operations_with_copies_on_threads_leave_everything_in_order(machine):
    machine = machine()
    machine.begin(engine=ThreadCopyEngine(), store="directory")
    soak(machine, 1000 if isinstance(machine, NsaMachine) else 3000, seed=1)


@pytest.fixture
def begin(request):
    """Starts a state machine for a model on a set of tiers. The options that are not given are random."""

    def begun(model, tiers, engine=None, **options):
        is_mooncake = tiers == "host+mooncake"
        attributes = {"master": request.getfixturevalue("mooncake_master")} if is_mooncake else {}
        machine = machine_of(MODELS[model], tiers, **attributes)()
        draw = random.Random(f"{model} {tiers} {options}")
        drawn = {name: draw.choice(values) for name, values in machine.OPTIONS.items()}
        wanted = {"enable_kv_cache_events": True, "emit": True} | options
        if "+" in tiers:
            wanted["store"] = machine.STORES[0]
        machine.begin(engine=engine, **drawn | {name: wanted[name] for name in drawn.keys() & wanted.keys()})
        return machine

    return begun


def media_reported(machine):
    """Return the media with both store and remove events."""
    kinds = BlockStored, BlockRemoved
    return {medium for medium in StorageMedium if all(machine.told[kind, medium] for kind in kinds)}


@pytest.mark.soak
@pytest.mark.parametrize(("write_policy", "page_size"), [*zip(WRITE_POLICIES, (1, 2, 3), strict=True)])
@pytest.mark.parametrize(("model", "tiers"), COMBINATIONS)
def test_thousands_of_operations_keep_every_promise(begin, model, tiers, write_policy, page_size):
    machine = begin(model, tiers, write_policy=write_policy, page_size=page_size, is_eagle=page_size == 3)
    draw = random.Random(model + tiers)
    least_fetched = LEAST_FETCHED_PAGES * machine.page_size if "+" in tiers else 0
    for _ in range(MOST_ROUNDS):
        run_some(machine, 3000, draw)
        if tiers == "device" or machine.num_fetched >= least_fetched:
            break
    soak(machine, 1000, seed=model + tiers)
    assert media_reported(machine) == MEDIA[tiers]
    assert tiers == "device" or machine.num_fetched >= least_fetched


@pytest.mark.parametrize(("model", "tiers"), [each for each in COMBINATIONS if "+" in str(each.values[1])])
def test_a_thousand_operations_with_copies_on_threads_keep_every_promise(begin, model, tiers):
    machine = begin(model, tiers, engine=ThreadCopyEngine(), write_policy="write_through", stop="wait_complete")
    draw = random.Random(model + tiers)
    for _ in range(MOST_ROUNDS):  # the threads decide what a seed leads to, and the store may be broken for long
        run_some(machine, 1000, draw)
        if machine.num_fetched > 0:
            break
    soak(machine, 100, seed=model + tiers)
    assert media_reported(machine) == MEDIA[tiers]
    assert machine.num_fetched > 0
