"""The state of the master as a client reports it, and the checks of a client at its start."""

import os

import pytest

pytest.importorskip("mooncake", reason="pip install kvsight[mooncake]")

from engine_cache.storage.mooncake_client import MasterState, MooncakeClient
from kv_events.errors import InvalidValueError
from tests.rigs.mooncake_double import OVERFLOW

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
