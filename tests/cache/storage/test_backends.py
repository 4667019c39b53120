"""The contract of storage backends, run on each of them."""

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine_cache.storage import (
    PageLayout,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    StorageIdentity,
    page_key,
)
from engine_cache.storage.directory import DirectoryStorage
from tests.rigs.page_pools import KEYS, PagePool, put

LAYOUT = PageLayout("bfloat16", 2, (1, 3), "page_first")
EXTRA = {PoolName.INDEXER: (torch.uint8, 1), PoolName.MAMBA: (torch.float32, 3)}


@pytest.fixture(params=["directory", pytest.param("mooncake", marks=pytest.mark.mooncake)])
def connect(request, tmp_path):
    """Opens the same backend repeatedly, without pools."""
    opened: list[Any] = []
    if request.param == "mooncake":
        from engine_cache.storage.mooncake import MooncakeStorage

        master = request.getfixturevalue("mooncake_master")

    def connector(identity):
        if request.param == "mooncake":
            store: Any = MooncakeStorage(master.shared_client(), identity, master.settings())
        else:
            store = DirectoryStorage(tmp_path, identity, capacity_bytes=2**20)
        opened.append(store)
        return store

    yield connector
    for store in opened:
        store.close()


@pytest.fixture
def identity(tmp_path):
    """Return an identity that no other test uses, because stores outlive a test."""
    return StorageIdentity("org/model", LAYOUT, extra_backend_tag=hashlib.sha256(bytes(tmp_path)).hexdigest()[:12])


@pytest.fixture
def open_store(connect, identity):
    """Opens the same backend repeatedly, for the given identity, with a KV pool and the pools of EXTRA."""

    def opener(**changes):
        store = connect(replace(identity, **changes))
        store.kv = PagePool(num_runs=2)
        store.register_mem_pool_host(store.kv)
        store.extra = {name: PagePool(page_size=1, dtype=dtype, num_runs=runs) for name, (dtype, runs) in EXTRA.items()}
        for name, pool in store.extra.items():
            store.register_mem_host_pool_v2(pool, name)
        return store

    return opener


@pytest.fixture
def store(open_store):
    return open_store()


def transfer(store, name, pages, **fields):
    return PoolTransfer(name, store.extra[name].indices(*pages), keys=[KEYS[page] for page in pages], **fields)


def test_an_empty_store_has_no_page(store):
    assert store.batch_exists(KEYS) == 0
    assert store.batch_get_v1(KEYS[:2], store.kv.indices(0, 1)) == [False, False]
    assert store.batch_exists_v2(KEYS, [PoolTransfer(PoolName.INDEXER)]) == (0, {})


def test_an_empty_batch_has_an_empty_answer(store):
    nothing = np.empty(0, np.int64)
    assert store.batch_exists([]) == 0
    assert store.batch_get_v1([], nothing) == store.batch_set_v1([], nothing) == []
    assert store.batch_get_v2([]) == store.batch_set_v2([]) == {}
    assert store.batch_get_v2([PoolTransfer(PoolName.MAMBA, nothing, keys=[])]) == {PoolName.MAMBA: []}


def test_a_page_comes_back_bit_equal_in_another_store(open_store):
    writer, reader = open_store(), open_store()
    assert put(writer, 0, 1, 2) == [True] * 3
    reader.kv.fill(seed=1)
    assert reader.batch_get_v1(KEYS[:3], reader.kv.indices(7, 3, 5)) == [True] * 3
    assert [reader.kv.page_bytes(page) for page in (7, 3, 5)] == [writer.kv.page_bytes(page) for page in (0, 1, 2)]


@pytest.mark.parametrize("name", EXTRA)
def test_the_pages_of_an_extra_pool_come_back_bit_equal(open_store, name):
    writer, reader = open_store(), open_store()
    assert writer.batch_set_v2([transfer(writer, name, [0, 3])]) == {name: [True, True]}
    reader.extra[name].fill(seed=1)
    assert reader.batch_get_v2([transfer(reader, name, [0, 3])]) == {name: [True, True]}
    assert [reader.extra[name].page_bytes(i) for i in (0, 3)] == [writer.extra[name].page_bytes(i) for i in (0, 3)]


def test_a_page_that_is_there_counts_as_written_and_keeps_its_content(store):
    put(store, 0)
    first = store.kv.page_bytes(0)
    store.kv.fill(seed=1)
    assert put(store, 0, 1) == [True, True]
    store.batch_get_v1(KEYS[:1], store.kv.indices(9))
    assert store.kv.page_bytes(9) == first


def test_equal_hashes_in_two_namespaces_are_two_pages(store):
    salted = page_key(KEYS[0], "tenant")
    put(store, 0)
    assert store.batch_exists([salted]) == 0
    store.batch_set_v1([salted], store.kv.indices(1))
    store.batch_get_v1([KEYS[0], salted], store.kv.indices(8, 9))
    assert [store.kv.page_bytes(page) for page in (8, 9)] == [store.kv.page_bytes(page) for page in (0, 1)]


@pytest.mark.parametrize(
    "other",
    [
        {"model_name": "org/other"},
        {"layout": PageLayout("float16", 2, (1, 3), "page_first")},
        {"tp_rank": 1, "tp_size": 2},
        {"extra_backend_tag": "blue"},
        {"use_fingerprint": False},
    ],
)
def test_another_model_layout_or_rank_sees_nothing_and_clears_nothing(open_store, other):
    ours, theirs = open_store(), open_store(**other)
    put(ours, 0)
    assert theirs.batch_exists(KEYS) == 0
    put(theirs, 0, 1)
    theirs.clear()
    assert theirs.batch_exists(KEYS) == 0
    assert ours.batch_exists(KEYS) == 1


# --- prefixes with extra pools ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_extra_pools_agree_on_one_prefix(store, order):
    put(store, *range(5))
    store.batch_set_v2([transfer(store, PoolName.INDEXER, [0, 1, 2]), transfer(store, PoolName.MAMBA, [1, 4])])
    states = PoolTransfer(PoolName.MAMBA, keys=[""], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    wanted = [PoolTransfer(PoolName.INDEXER), states]
    found = store.batch_exists_v2(KEYS[:5], [wanted[i] for i in order])
    assert found == (2, {PoolName.INDEXER: 2, PoolName.MAMBA: 2})
    assert store.batch_exists_v2(KEYS[:5], []) == (5, {})


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["batch_get_v1", "batch_set_v1"])
@pytest.mark.parametrize("num_rows", [0, 2, 3, 6])
def test_keys_and_indices_must_fit(store, call, num_rows):
    with pytest.raises(ValueError, match=rf"pool kv: got {num_rows}, expected 2 keys x page size 2"):
        getattr(store, call)(KEYS[:2], np.arange(num_rows))


def test_an_unregistered_pool_is_named(store):
    with pytest.raises(ValueError, match=r"'swa'.*indexer, kv, mamba"):
        store.batch_get_v2([PoolTransfer(PoolName.SWA, np.arange(2), keys=KEYS[:2])])
    with pytest.raises(ValueError, match="'swa'"):
        store.batch_exists_v2(KEYS, [PoolTransfer(PoolName.SWA)])


def test_a_bad_transfer_or_key_is_refused_and_moves_no_page_of_the_good_ones(store, monkeypatch):
    for bad, words in (
        (PoolTransfer(PoolName.SWA, np.arange(1), keys=KEYS[:1]), "'swa'"),
        (PoolTransfer(PoolName.MAMBA, keys=KEYS[:1]), "transfer of pool mamba"),
    ):
        with pytest.raises(ValueError, match=words):
            store.batch_set_v2([transfer(store, PoolName.MAMBA, [0]), bad])
    assert store.batch_get_v2([transfer(store, PoolName.MAMBA, [0])]) == {PoolName.MAMBA: [False]}
    with pytest.raises(ValueError, match=r"'\.\./x'"):
        store.batch_exists(["../x"])
    with pytest.raises(ValueError, match=r"host indices of pool kv: got \[4, 7\]"):
        store.batch_set_v1(KEYS[:2], np.array([0, 1, 4, 7]))
    store.register_mem_host_pool_v2(PagePool(page_size=7), PoolName.KV)  # ignored
    monkeypatch.setattr(type(store), "should_split_heads", True)
    with pytest.raises(ValueError, match=r"should_split_heads.*pool swa"):
        store.register_mem_host_pool_v2(PagePool(), PoolName.SWA)
    assert put(store, 0) == [True]


def test_a_closed_store_refuses_every_call(store):
    put(store, 0)
    store.close()
    store.close()
    for call in (
        lambda: store.batch_exists(KEYS),
        lambda: store.batch_get_v1(KEYS[:1], store.kv.indices(0)),
        lambda: store.batch_set_v1(KEYS[:1], store.kv.indices(0)),
        lambda: store.batch_exists_v2(KEYS, []),
        lambda: store.batch_get_v2([transfer(store, PoolName.MAMBA, [0])]),
        lambda: store.batch_set_v2([transfer(store, PoolName.MAMBA, [0])]),
        lambda: store.register_mem_pool_host(store.kv),
        lambda: store.is_held(KEYS[0]),
        store.take_removed,
        store.clear,
    ):
        with pytest.raises(RuntimeError, match="store is closed"):
            call()
    assert store.get_stats().num_written == 1


# --- held pages ------------------------------------------------------------------------------------------------------


def test_what_was_written_or_found_is_held(open_store):
    store = open_store()
    put(store, 0)
    assert [store.is_held(key) for key in KEYS[:2]] == [True, False]
    other = open_store()
    put(store, 1)
    assert put(other, 1) == [True]
    assert other.is_held(KEYS[1])


def test_a_page_that_vanished_is_reported_once(open_store):
    store, other = open_store(), open_store()
    put(store, 0)
    other.clear()
    assert store.batch_exists(KEYS) == 0
    assert store.take_removed() == [KEYS[0]]
    assert store.take_removed() == []
    assert not store.is_held(KEYS[0])
    put(store, 0)
    other.clear()
    assert put(store, 0) == [True]
    assert (store.take_removed(), store.is_held(KEYS[0])) == ([], True), "written again"


def test_clearing_is_not_reported_and_leaves_an_empty_store_that_works(store):
    put(store, 0, 1)
    store.batch_set_v2([transfer(store, PoolName.MAMBA, [1])])
    store.clear()
    assert store.batch_exists_v2(KEYS, [PoolTransfer(PoolName.MAMBA)]) == (0, {})
    assert store.take_removed() == []
    assert store.get_stats().held_bytes == 0
    assert put(store, 0) == [True]


def test_the_figures_count_pages(store):
    put(store, 0, 1)
    put(store, 1, 2)
    store.batch_get_v1(KEYS[2:5], store.kv.indices(2, 3, 4))
    stats = store.get_stats()
    assert stats[:4] == (stats.num_read, stats.num_missed, stats.num_written, stats.num_already_stored) == (1, 2, 3, 1)
    assert stats.num_held == 3
    assert stats.held_bytes >= 3 * len(store.kv.page_bytes(0))


# --- with the host pools of the engine -------------------------------------------------------------------------------
