"""Engines that share a Mooncake store: one uses what another has written, byte for byte."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("mooncake", reason="pip install kvsight[mooncake]")

from engine_cache.storage import PoolName, PoolTransfer
from engine_cache.storage.mooncake import MooncakeStorage
from tests.models.event_replay import PageNames
from tests.rigs.cache import CPU
from tests.rigs.mooncake import KINDS, PAGE_SIZE, PROMPT, archive, engine, follow, make_rig, own_identity
from tests.rigs.page_pools import KEYS, PagePool, held, put

LAYOUTS = ["page_first", "page_first_direct"]


def blocks(tokens=PROMPT):
    """Return the pages of a prompt in the form of `Replay`."""
    names = PageNames(PAGE_SIZE, is_bigram=False)
    return {names.named(prefix)[0] for prefix in names.prefixes(tokens)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_one_engine_wrote_another_finds_byte_for_byte(mooncake_master, kind, layout):
    identity = own_identity(is_mla=kind in ("mla", "nsa"), host_layout=layout)
    settings = mooncake_master.settings()
    with engine(kind, identity, settings) as writer, engine(kind, identity, settings) as reader:
        archive(writer)
        assert follow(writer) == set(writer.replay.pages[CPU]) == blocks()
        reader.prefetch(PROMPT)
        assert reader.fetched() == len(PROMPT)
        assert follow(reader) == set()  # the engine that stored a page announces it
        assert set(reader.replay.pages[CPU]) == blocks()
        assert reader.match(PROMPT).host_hit_length == len(PROMPT)
        reader.load(PROMPT)
        reader.settle()
        assert len(reader.match(PROMPT).device_indices) == len(PROMPT)
        reader.check()  # the content is derived from the tokens


# --- further pools ---------------------------------------------------------------------------------------------------


@pytest.fixture
def hybrid(mooncake_master):
    """A store with the pools of a model with recurrent layers."""
    store = MooncakeStorage.connect(own_identity(), mooncake_master.settings())
    entries = make_rig("hybrid").controller.group.entries.values()
    store.register_host_pools({entry.name: entry.host_pool for entry in entries})
    yield store
    store.close()


def state(*places):
    return PoolTransfer(PoolName.MAMBA, np.array(places), keys=[KEYS[place] for place in places])


@pytest.mark.parametrize("which", [0, 1])
def test_a_page_of_which_an_object_is_missing_is_not_there_until_it_is_written_again(hybrid, which):
    assert hybrid.batch_set_v2([state(0, 1, 2)]) == {PoolName.MAMBA: [True] * 3}
    names = hybrid._names(PoolName.MAMBA, KEYS[1:2])
    assert [name.partition("_0_")[2] for name in names] == ["temporal", "conv_0"]
    hybrid._client.remove(names[which : which + 1])
    assert hybrid.batch_get_v2([state(0, 1, 2)]) == {PoolName.MAMBA: [True, False, True]}
    assert hybrid.batch_set_v2([state(0, 1, 2)]) == {PoolName.MAMBA: [True] * 3}
    assert hybrid.batch_get_v2([state(0, 1, 2)]) == {PoolName.MAMBA: [True] * 3}


# --- several threads of one engine ---


@pytest.fixture
def store(mooncake_master):
    opened: Any = MooncakeStorage(mooncake_master.shared_client(), own_identity(), mooncake_master.settings())
    opened.kv = PagePool(num_runs=2)
    opened.register_mem_pool_host(opened.kv)
    yield opened
    opened.close()


def test_pages_that_are_written_after_a_clear_are_held_though_their_writing_began_before(store, monkeypatch):
    write = store._client.put
    monkeypatch.setattr(store._client, "put", lambda *objects: store.clear() or write(*objects), raising=False)
    assert put(store, 0, 1) == [True, True]
    assert store.batch_exists(KEYS[:2]) == 2
    assert held(store) == [0, 1]


def test_pages_that_are_written_before_a_clear_returns_are_held(store, monkeypatch):
    remove = store._client.remove_matching
    monkeypatch.setattr(
        store._client, "remove_matching", lambda pattern: remove(pattern) or put(store, 0, 1), raising=False
    )
    store.clear()
    assert store.batch_exists(KEYS[:2]) == 2
    assert held(store) == [0, 1]


def test_pages_are_looked_for_again_when_the_store_was_cleared_concurrently(store, monkeypatch):
    assert put(store, 0, 1) == [True, True]
    look = store._client.exist
    looks = []

    def overtaken(names):
        there = look(names)
        looks.append(names)
        if len(looks) == 2:  # after the writing
            store._held.forget_all()
        return there

    store._client.remove(store._names("kv", KEYS[:2]))
    monkeypatch.setattr(store._client, "exist", overtaken, raising=False)
    assert put(store, 0, 1) == [True, True]
    assert held(store) == [0, 1]


def test_pages_that_are_written_while_they_are_missed_are_held(store, monkeypatch):
    look = store._client.exist

    def overtaken(names):
        there = look(names)
        monkeypatch.setattr(store._client, "exist", look)
        assert put(store, 0, 1) == [True, True]
        return there

    monkeypatch.setattr(store._client, "exist", overtaken, raising=False)
    assert store.batch_exists(KEYS[:2]) == 0
    assert held(store) == [0, 1]
    assert store.take_removed() == []
