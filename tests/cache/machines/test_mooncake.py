"""UnifiedRadixCache with a real Mooncake store, also with a master that is killed during the run."""

import contextlib
import random

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from engine_cache import ThreadCopyEngine
from kv_events.schema import StorageMedium
from tests.rigs.machines.cache_machine import operation, run_some
from tests.rigs.machines.cache_machines import MODELS, MooncakeMachine, machine_of
from tests.support.effort import num_examples
from tests.support.waiting import wait_until

pytest.importorskip("mooncake", reason="pip install kvsight[mooncake]")
EXTERNAL = StorageMedium.EXTERNAL


@pytest.mark.random_cases
@pytest.mark.parametrize("model", MODELS)
def test_any_order_of_operations_keeps_every_promise(mooncake_master, model):
    machine = machine_of(MODELS[model], "host+mooncake", master=mooncake_master)
    run_state_machine_as_test(machine, settings=settings(max_examples=num_examples(20), stateful_step_count=40))


# --- a master that dies ----------------------------------------------------------------------------------------------


class MortalMasterMachine(MooncakeMachine):
    """A machine whose backend loses its master."""

    STORES = ()
    own_client = True
    is_uncertain = False
    """Whether the loss of the master may still be unnoticed."""

    def check_events(self, all_taken=False):
        super().check_events(all_taken and not self.is_uncertain)

    @operation()
    def clear_storage(self, draw):
        from engine_cache.storage.mooncake_client import StorageUnreachableError

        with contextlib.suppress(StorageUnreachableError):
            super().clear_storage(draw)

    def notice(self):
        """Whether all announcements of stored pages were withdrawn."""
        self.check_hicache_events(None)
        return not self.replay.pages[EXTERNAL]


@pytest.mark.parametrize("model", ["Full", "Full+Mamba"])
def test_a_master_killed_in_the_middle_costs_hits_and_nothing_else(own_mooncake_master, model):
    kinds, draw = MODELS[model], random.Random(model)
    machine = type("Machine", (MortalMasterMachine,), {"KINDS": kinds, "master": own_mooncake_master})()
    machine.begin(store="mooncake", engine=ThreadCopyEngine(), host_pages=16)
    wait_until(lambda: run_some(machine, 50, draw) or machine.num_fetched > 20, 90, "pages from the store")
    machine.is_uncertain = True
    own_mooncake_master.kill()
    run_some(machine, 100, draw)
    wait_until(machine.notice, 60, "no event of the store")
    machine.is_uncertain = False
    machine.let_go()
    machine.settle()
    before = machine.num_fetched
    run_some(machine, 500, draw)
    machine.let_go()
    machine.settle()
    assert machine.num_fetched == before
    assert machine.replay.pages[EXTERNAL] == {}
    own_mooncake_master.restart()
    wait_until(
        lambda: run_some(machine, 50, draw) or machine.num_fetched > before + 20, 90, "pages from the store again"
    )
    machine.settle()
    machine.teardown()
