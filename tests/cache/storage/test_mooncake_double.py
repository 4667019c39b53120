"""Mooncake stores on a test double: codes, the master's state, registered memory, and the times of further looks."""

import gc
import threading
import weakref
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("mooncake", reason="pip install kvsight[mooncake]")

from engine_cache.storage import PoolName, mooncake, mooncake_client
from engine_cache.storage.mooncake import MooncakeStorage
from tests.rigs.mooncake import make_rig, own_identity
from tests.rigs.mooncake_double import BAD_ARGUMENTS, NOT_FOUND, OVERFLOW, TRANSFER_FAILED
from tests.rigs.page_pools import KEYS, PagePool, get, held, put
from tests.support.waiting import wait_until


@pytest.fixture
def open_store(master):
    """Opens stores without pools. `store.native` is the test double of the native client."""
    opened = list[Any]()

    def opener(identity=None, **settings):
        opened.append(MooncakeStorage.connect(identity or own_identity(), master.settings(**settings)))
        opened[-1].native = master.natives[-1]
        return opened[-1]

    yield opener
    for store in opened:
        store.close()


# --- codes of pages ---


def one_too_few(codes):
    return codes[:-1]


def overflow(codes):
    return [OVERFLOW] * len(codes)


def transfer_failed(codes):
    return [TRANSFER_FAILED] * len(codes)


def refused(codes):
    return [BAD_ARGUMENTS] * len(codes)


@pytest.fixture
def open_pages(open_store):
    """Opens stores with one page pool."""

    def opener(identity=None, page_size=2, **settings):
        store = open_store(identity, **settings)
        store.kv = PagePool(num_runs=2, page_size=page_size)
        store.register_mem_pool_host(store.kv)
        return store

    return opener


@pytest.fixture
def store(open_pages):
    """A store that has written pages 0 to 2 and holds them."""
    store = open_pages()
    assert put(store, 0, 1, 2) == [True] * 3
    return store


@pytest.mark.parametrize("answer", [one_too_few, overflow])
def test_a_page_of_which_nothing_was_reported_is_not_used_and_not_withdrawn(store, answer):
    store.native.exist_answers.append(answer)
    assert store.batch_exists(KEYS) == 0
    assert (store.take_removed(), held(store)) == ([], [0, 1, 2])
    assert store.batch_exists(KEYS) == 3


@pytest.mark.parametrize("answer", [one_too_few, overflow])
def test_a_page_of_which_nothing_was_reported_is_written_but_not_held(store, answer):
    store.native.exist_answers.extend([answer, answer])  # before and after the writing
    assert put(store, 3) == [True]
    assert held(store) == [0, 1, 2]
    assert put(store, 3) == [True]
    assert held(store) == [0, 1, 2, 3]


@pytest.mark.parametrize("answer", [one_too_few, overflow, transfer_failed, refused])
def test_a_page_that_could_not_be_read_may_still_be_there(store, answer):
    store.native.get_answers.append(answer)
    assert get(store, 0, 1, 2) == [False] * 3
    assert (store.take_removed(), held(store)) == ([], [0, 1, 2])
    assert (get(store, 0, 1, 2), store.get_stats().num_damaged) == ([True] * 3, 0)


def test_a_page_of_which_an_object_was_removed_is_withdrawn_whatever_becomes_of_the_other(store):
    store.native.get_answers.append(lambda codes: [*codes[:2], TRANSFER_FAILED, NOT_FOUND, TRANSFER_FAILED, codes[5]])
    assert get(store, 0, 1, 2) == [True, False, False]
    assert (store.take_removed(), held(store)) == ([KEYS[1]], [0, 2])


def test_a_page_that_another_engine_is_writing_is_not_reported_but_stops_no_other(open_pages, monkeypatch):
    """The store accepts an object that another engine is still writing, and reports it as absent."""
    store = open_pages()
    write = store.native.put
    monkeypatch.setattr(store.native, "put", lambda name, data: 0 if f"{KEYS[1]}_0_v" in name else write(name, data))
    assert put(store, 0, 1, 2) == [True] * 3
    assert held(store) == [0, 2]


@pytest.mark.parametrize("pages", [1, 5])
def test_a_batch_costs_as_many_calls_as_a_page(open_pages, pages):
    store, objects = open_pages(), 2 * pages
    put(store, *range(pages))
    store.batch_exists(KEYS[:pages])
    get(store, *range(pages))
    expected = [("exist", objects), ("put", objects), ("exist", objects), ("exist", objects), ("get", objects)]
    assert store.native.calls == expected


@pytest.fixture
def watched(open_pages, monkeypatch):
    """Like `store`, but suspected losses are checked at once."""
    monkeypatch.setattr(mooncake, "_LENDER_TTL_S", 0.0)
    store = open_pages(mooncake_watch_interval_s=0.005)
    assert put(store, 0, 1, 2) == [True] * 3
    return store


@pytest.mark.parametrize("failing_looks", [0, 2])
def test_pages_that_died_with_a_lender_are_withdrawn_by_the_first_look_that_reports_them(watched, failing_looks):
    watched.native.batch_remove(watched._names("kv", KEYS[1:2]), True)
    watched.native.exist_answers.extend([overflow] * failing_looks)
    watched.native.get_answers.append(transfer_failed)
    assert get(watched, 0, 1, 2) == [False] * 3
    wait_until(lambda: not watched.is_held(KEYS[1]), what="a look")
    assert not watched.native.exist_answers
    assert (watched.take_removed(), held(watched)) == ([KEYS[1]], [0, 2])


@pytest.mark.parametrize(("ours", "theirs"), [(2, 4), (4, 2)])
def test_without_a_fingerprint_pages_of_another_layout_are_a_miss_and_stay(open_pages, ours, theirs):
    """ours, theirs: page sizes of two engines that cannot read each other's pages."""
    identity = replace(own_identity(), use_fingerprint=False)
    writer, reader = open_pages(identity, page_size=ours), open_pages(identity, page_size=theirs)
    assert put(writer, 0, 1) == [True, True]
    assert get(reader, 0, 1) == [False, False]
    assert (reader.get_stats().num_missed, reader.get_stats().num_damaged) == (2, 0)
    assert get(writer, 0, 1) == [True, True]


# --- registered memory ---


@pytest.fixture(params=["mha", "mla", "hybrid", "nsa"])
def kind(request):
    return request.param


@pytest.fixture
def empty_store(open_store, kind):
    return open_store(own_identity(is_mla=kind in ("mla", "nsa")))


def buffers(rig):
    """Return all tensors of all host pools."""
    return [
        held for entry in rig.controller.group.entries.values() for held in entry.host_pool.get_hybrid_pool_buffer()
    ]


def references(rig):
    """Return weak references to the same tensors."""
    return [weakref.ref(held) for held in buffers(rig)]


def num_alive(tensors):
    gc.collect()
    return sum(tensor() is not None for tensor in tensors)


def attach(rig, store):
    assert rig.cache.attach_storage_backend(store) == (True, "attached")
    return rig


def test_every_tensor_of_every_pool_is_registered_once_and_whole(empty_store, kind):
    rig = attach(make_rig(kind), empty_store)
    expected = {(held.data_ptr(), held.nbytes) for held in buffers(rig)}
    assert set(empty_store.native.registrations) == expected
    assert len(empty_store.native.registrations) == len(expected)


def test_a_store_that_is_detached_releases_the_memory_and_takes_another_cache(empty_store, kind):
    rig = attach(make_rig(kind), empty_store)
    tensors = references(rig)
    assert rig.cache.detach_storage_backend()[0]
    assert empty_store.native.registered == {}
    assert num_alive(tensors) == len(tensors)
    del rig
    assert num_alive(tensors) == 0
    other = attach(make_rig(kind), empty_store)
    assert empty_store.native.registered == {held.data_ptr(): held.nbytes for held in buffers(other)}


def test_a_store_that_is_closed_releases_the_memory_before_its_client_ends(empty_store, kind):
    rig = attach(make_rig(kind), empty_store)
    tensors = references(rig)
    empty_store.close()
    assert empty_store.native.left_registered == {}
    assert (empty_store.get_stats().num_held, empty_store.get_stats().held_bytes) == (0, 0)
    assert num_alive(tensors) == len(tensors)
    del rig
    assert num_alive(tensors) == 0


def test_memory_that_a_call_may_still_write_to_stays(open_store, monkeypatch):
    monkeypatch.setattr(mooncake_client, "_CLOSE_TIMEOUT_S", 0.01)
    store, gate, begun = open_store(), threading.Event(), threading.Event()
    rig = attach(make_rig("mha"), store)
    tensors = references(rig)
    store.native.exist_answers.append(lambda codes: begun.set() or (gate.wait() and codes))  # type: ignore[func-returns-value]
    thread = threading.Thread(target=store.batch_exists, args=(KEYS[:1],), daemon=True)
    thread.start()
    wait_until(begun.is_set, what="the call")
    store.close()
    del rig
    assert num_alive(tensors) == len(tensors)
    assert store.native.left_registered is None
    gate.set()
    thread.join()


@pytest.mark.parametrize(("kind", "name"), [("hybrid", PoolName.MAMBA), ("nsa", PoolName.INDEXER)])
def test_a_pool_whose_pages_are_no_runs_of_memory_is_refused(empty_store, kind, name):
    pool = make_rig(kind, "layer_first").controller.group.entry(name).host_pool
    with pytest.raises(ValueError, match=r"layout of host pool .*'layer_first'"):
        empty_store.register_mem_host_pool_v2(pool, name)
    assert empty_store.native.registrations == []
