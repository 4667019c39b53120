"""UnifiedRadixCache with a real Mooncake store: as in `test_unified_cache`, as one of two trees that share the store,
and with a master that is killed during the run."""

import contextlib
import random

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from engine_cache import StoragePolicy, ThreadCopyEngine
from kv_events.schema import StorageMedium
from tests.models.event_replay import PageNames, Replay
from tests.rigs.cache import CacheRig
from tests.support.caches.cache_machine import operation, run_some
from tests.support.caches.machines import MODELS, MooncakeMachine, machine_of
from tests.support.effort import num_examples
from tests.support.waiting import wait_until

pytest.importorskip("mooncake", reason="pip install kvsight[mooncake]")
pytestmark = pytest.mark.torch
EXTERNAL = StorageMedium.EXTERNAL
PROMPT = [1, 1, 2, 2, 3, 3]
NAMES = PageNames(2, is_bigram=False)
PAGES = {NAMES.named(prefix)[0] for prefix in NAMES.prefixes(PROMPT)}


@pytest.mark.random_cases
@pytest.mark.parametrize("model", MODELS)
def test_any_order_of_operations_keeps_every_promise(mooncake_master, model):
    machine = machine_of(MODELS[model], "host+mooncake", master=mooncake_master)
    run_state_machine_as_test(machine, settings=settings(max_examples=num_examples(20), stateful_step_count=40))


# --- two trees -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
@pytest.mark.parametrize("model", MODELS)
def test_what_one_tree_archived_another_prefetches_byte_for_byte(mooncake_master, model, layout):
    from tests.support.caches.watched_mooncake import WatchedMooncake

    writer, reader = (CacheRig("+".join(("unified", *MODELS[model])), window=4, layout=layout) for _ in range(2))
    stores = [WatchedMooncake(rig.identity, mooncake_master, tag="shared-by-two-trees") for rig in (writer, reader)]
    for rig, store in zip((writer, reader), stores, strict=True):
        policy = StoragePolicy(1, "wait_complete", batch_pages=2, emit_storage_events=True)
        assert rig.cache.attach_storage_backend(store, policy) == (True, "attached")
    writer.insert(PROMPT)
    writer.settle()
    assert len(stores[0].held()) == 3
    reader.cache.prefetch_from_storage("r", reader.cache.root_node, PROMPT)
    reader.settle()
    assert reader.cache.check_prefetch_progress("r")
    assert reader.cache.pop_prefetch_loaded_tokens("r") == len(PROMPT)
    told = [reported_by(rig) for rig in (writer, reader)]
    assert [pages[EXTERNAL] for pages in told] == [PAGES, set()]  # the engine that stored a page announces it
    assert [pages[StorageMedium.CPU] for pages in told] == [PAGES, PAGES]
    match = reader.match(PROMPT)
    assert match.host_hit_length == len(PROMPT)
    (rows, _), _, lock = reader.load_back(match)
    reader.settle()
    assert len(rows) == len(PROMPT)
    reader.check()
    reader.cache.release(lock)
    for store in stores:
        store.discard()


def reported_by(rig):
    """Return the pages by medium that result from its events."""
    replay = Replay(rig.page_size)
    for event in rig.cache.take_events():
        replay.apply(event)
    return {medium: set(pages) for medium, pages in replay.pages.items()}


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


@pytest.mark.parametrize("model", MODELS)
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
