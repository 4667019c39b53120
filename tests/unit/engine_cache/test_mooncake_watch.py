"""The times at which a store is checked again. The client is a test double that can fail at a chosen moment."""

from collections import deque
from typing import Any

import pytest

pytest.importorskip("mooncake", reason="pip install kvsight[mooncake]")

from engine_cache.storage import mooncake
from engine_cache.storage.mooncake import MooncakeWatch
from engine_cache.storage.mooncake_client import MasterState
from tests.support.waiting import wait_until


class ScriptedClient:
    """Reports the given states of the master one by one, and then `SAME`."""

    address = "a double"

    def __init__(self):
        self.states: deque[MasterState] = deque()
        self.num_probes = 0

    def probe(self):
        self.num_probes += 1
        return self.states.popleft() if self.states else MasterState.SAME


class Looks:
    """Checks of the store. `script` contains the effects of the next checks."""

    def __init__(self):
        self.script: deque[Any] = deque()
        self.num_done = self.num_begun = 0

    def __call__(self):
        self.num_begun += 1
        if self.script:
            self.script.popleft()()
        self.num_done += 1


def fail():
    raise OSError("injected")


@pytest.fixture
def client():
    return ScriptedClient()


@pytest.fixture
def looks():
    return Looks()


@pytest.fixture
def watch(client, looks, monkeypatch):
    monkeypatch.setattr(mooncake, "_LENDER_TTL_S", 0.0)
    watch = MooncakeWatch(client, 0.001, looks)
    yield watch
    watch.stop()


def wait_for_probes(client, count):
    goal = client.num_probes + count
    wait_until(lambda: client.num_probes >= goal, what="further probes")


def test_a_store_that_is_well_is_not_looked_at(watch, client, looks):
    wait_for_probes(client, 5)
    assert looks.num_begun == 0


def test_a_suspicion_lasts_until_a_look_succeeds(watch, client, looks):
    looks.script.extend([fail, fail])
    watch.suspect()
    wait_until(lambda: looks.num_done == 1, what="a look that succeeds")
    wait_for_probes(client, 5)
    assert looks.num_begun == 3


def test_an_emptied_store_is_looked_at_until_that_succeeds(watch, client, looks):
    looks.script.extend([fail, fail])
    client.states.append(MasterState.EMPTIED)
    wait_until(lambda: looks.num_done == 1, what="a look that succeeds")
    wait_for_probes(client, 5)
    assert looks.num_begun == 3


def test_a_suspicion_while_a_look_runs_asks_for_another_look(watch, client, looks):
    looks.script.append(watch.suspect)
    watch.suspect()
    wait_until(lambda: looks.num_done == 2, what="a second look")
    wait_for_probes(client, 5)
    assert looks.num_begun == 2


def test_a_master_that_is_away_is_not_asked_until_it_is_back(watch, client, looks):
    client.states.extend([MasterState.AWAY] * 20)
    watch.suspect()
    wait_until(lambda: looks.num_done == 1, what="a look")
    assert not client.states
