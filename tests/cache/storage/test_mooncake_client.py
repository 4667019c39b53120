"""The client of a Mooncake master on a test double, its settings, and the watch that looks at a store again."""

import os
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mooncake", reason="pip install kvsight[mooncake]")

from engine_cache.settings import MooncakeSettings
from engine_cache.storage import mooncake
from engine_cache.storage.mooncake import MooncakeWatch
from engine_cache.storage.mooncake_client import MasterState, MooncakeClient
from kv_events.errors import InvalidValueError
from tests.rigs.mooncake_double import OVERFLOW
from tests.support.waiting import wait_until

SAME, EMPTIED, AWAY = MasterState.SAME, MasterState.EMPTIED, MasterState.AWAY


@pytest.fixture
def client(master):
    client = MooncakeClient(master.settings())
    yield client
    client.close()


def beacon(master):
    (name,) = [name for name in master.objects if name.startswith("kvsight_")]
    return name


def test_a_store_that_was_emptied_is_reported_once(client, master):
    assert client.probe() is SAME
    master.objects.clear()
    assert [client.probe(), client.probe()] == [EMPTIED, SAME]


def test_a_store_that_was_emptied_while_it_could_not_be_marked_is_reported_when_it_can(client, master):
    del master.objects[beacon(master)]
    master.is_full = True
    assert [client.probe(), client.probe()] == [EMPTIED, SAME]
    master.objects.clear()
    master.is_full = False
    assert [client.probe(), client.probe()] == [EMPTIED, SAME]


def test_a_store_of_which_nothing_is_reported_is_not_taken_for_an_emptied_one(client, master, monkeypatch):
    monkeypatch.setattr(master.natives[0], "batch_is_exist", lambda names: [OVERFLOW] * len(names))
    assert client.probe() is SAME


@pytest.mark.parametrize("known_ms", [None, "1000", "5000"])
def test_a_call_timeout_that_another_client_has_set_otherwise_is_warned_of(master, monkeypatch, caplog, known_ms):
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", known_ms or "")
    if known_ms is None:
        monkeypatch.delenv("MC_RPC_TIMEOUT_MS")
    MooncakeClient(master.settings(mooncake_call_timeout_s=1.0)).close()
    assert os.environ["MC_RPC_TIMEOUT_MS"] == (known_ms or "1000")
    expected = "MC_RPC_TIMEOUT_MS is 5000 in this process: a call timeout of 1000 ms is not applied"
    assert [record.getMessage() for record in caplog.records] == [expected] * (known_ms == "5000")


@pytest.mark.parametrize(("lent", "ranks", "of_each"), [(2**30, 1, 2**30), (2**26, 4, 2**24), (0, 8, 0)])
def test_the_ranks_of_a_group_lend_the_memory_of_the_settings_together(master, lent, ranks, of_each):
    MooncakeClient(master.settings(mooncake_segment_bytes=lent), tp_size=ranks).close()
    assert master.natives[0].segment_bytes == of_each


def test_less_memory_a_rank_than_the_store_takes_is_refused(master):
    with pytest.raises(InvalidValueError, match=r"mooncake_segment_bytes: got 67108863, expected 0, or .* 4 ranks"):
        MooncakeClient(master.settings(mooncake_segment_bytes=2**26 - 1), tp_size=4)


def test_the_environment_states_where_the_store_is(monkeypatch):
    monkeypatch.setenv("MOONCAKE_MASTER", "[fd00::1]:50051")
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", "0")
    settings = MooncakeSettings()
    assert (settings.mooncake_master, settings.mooncake_segment_bytes) == ("[fd00::1]:50051", 0)
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", "4gb")
    assert MooncakeSettings().mooncake_segment_bytes == 4 * 2**30


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MOONCAKE_MASTER", "host"),
        ("MOONCAKE_MASTER", "host:0"),
        ("MOONCAKE_MASTER", "host:65536"),
        ("MOONCAKE_MASTER", "etcd://host:1"),
        ("MOONCAKE_PROTOCOL", "carrier pigeon"),
        ("MOONCAKE_GLOBAL_SEGMENT_SIZE", "-1"),
    ],
)
def test_a_bad_value_names_its_variable(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"{variable}: got '{value}'"):
        MooncakeSettings()


# --- the watch ---


class Script:
    """Does the next of some `steps` at each call, or nothing when none is left."""

    def __init__(self, result=None):
        self.steps: deque[Any] = deque()
        self.num_done = self.num_begun = 0
        self._result = result

    def __call__(self):
        self.num_begun += 1
        result = self.steps.popleft()() if self.steps else self._result
        self.num_done += 1
        return result


def fail():
    raise OSError("injected")


@pytest.fixture
def probe():
    """Reports states of the master."""
    return Script(SAME)


@pytest.fixture
def looks():
    """Looks at the store."""
    return Script()


@pytest.fixture
def watch(probe, looks, monkeypatch):
    monkeypatch.setattr(mooncake, "_LENDER_TTL_S", 0.0)
    client: Any = SimpleNamespace(address="a double", probe=probe)
    watch = MooncakeWatch(client, 0.001, looks)
    yield watch
    watch.stop()


def wait_for_five(probe):
    goal = probe.num_begun + 5
    wait_until(lambda: probe.num_begun >= goal, what="further probes")


def test_a_store_that_is_well_is_not_looked_at(watch, probe, looks):
    wait_for_five(probe)
    assert looks.num_begun == 0


@pytest.mark.parametrize("is_emptied", [False, True])
def test_a_suspicion_or_an_emptied_store_lasts_until_a_look_succeeds(watch, probe, looks, is_emptied):
    looks.steps.extend([fail, fail])
    if is_emptied:
        probe.steps.append(lambda: EMPTIED)
    else:
        watch.suspect()
    wait_until(lambda: looks.num_done == 1, what="a look that succeeds")
    wait_for_five(probe)
    assert looks.num_begun == 3


def test_a_suspicion_while_a_look_runs_asks_for_another_look(watch, probe, looks):
    looks.steps.append(watch.suspect)
    watch.suspect()
    wait_until(lambda: looks.num_done == 2, what="a second look")
    wait_for_five(probe)
    assert looks.num_begun == 2


def test_a_master_that_is_away_is_not_asked_until_it_is_back(watch, probe, looks):
    probe.steps.extend([lambda: AWAY] * 20)
    watch.suspect()
    wait_until(lambda: looks.num_done == 1, what="a look")
    assert not probe.steps
