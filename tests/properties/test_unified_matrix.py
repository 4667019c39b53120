"""UnifiedRadixCache: every kind of model on every set of tiers, under random operations.

The state machine (`unified_machine`) compares events, tree, pools and the bytes on all tiers. Matches are compared with
brute force.
"""

import random

import pytest

from engine_cache import ThreadCopyEngine
from kv_events.schema import BlockRemoved, BlockStored, StorageMedium
from tests.support.caches.cache_machine import run_some, soak
from tests.support.caches.unified_matrix import MODELS, machine_of

pytestmark = pytest.mark.torch

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
SETTINGS = [
    {"write_policy": "write_through", "page_size": 1, "is_eagle": False},
    {"write_policy": "write_through_selective", "page_size": 2, "is_eagle": False},
    {"write_policy": "write_back", "page_size": 3, "is_eagle": True},
]
"""The other options are random."""

ON_THREADS = {"write_policy": "write_through", "stop": "wait_complete"}
TELL_ALL = {"enable_kv_cache_events": True, "emit": True}
LEAST_FETCHED_PAGES = 5
MOST_ROUNDS = 4


@pytest.fixture
def begin(request):
    """Starts a state machine for a model on a set of tiers."""

    def begun(model, tiers, engine=None, **options):
        is_mooncake = tiers == "host+mooncake"
        attributes = {"master": request.getfixturevalue("mooncake_master")} if is_mooncake else {}
        machine = machine_of(MODELS[model], tiers, **attributes)()
        draw = random.Random(f"{model} {tiers} {options}")
        drawn = {name: draw.choice(values) for name, values in machine.OPTIONS.items()}
        stores = {"store": machine.STORES[0]} if "+" in tiers else {}
        wanted = TELL_ALL | stores | options
        machine.begin(engine=engine, **drawn | {name: wanted[name] for name in drawn.keys() & wanted.keys()})
        return machine

    return begun


def media_reported(machine):
    """Return the media with both store and remove events."""
    kinds = BlockStored, BlockRemoved
    return {medium for medium in StorageMedium if all(machine.told[kind, medium] for kind in kinds)}


@pytest.mark.soak
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings["write_policy"])
@pytest.mark.parametrize(("model", "tiers"), COMBINATIONS)
def test_thousands_of_operations_keep_every_promise(begin, model, tiers, settings):
    machine, draw = begin(model, tiers, **settings), random.Random(model + tiers)
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
    machine = begin(model, tiers, engine=ThreadCopyEngine(), **ON_THREADS)
    soak(machine, 1000, seed=model + tiers)
    assert media_reported(machine) == MEDIA[tiers]
    assert machine.num_fetched > 0
