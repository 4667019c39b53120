"""An engine whose Mooncake store fails, with real masters that are killed, stopped and emptied."""

import socket
import time
from typing import Any

import pytest
import torch

pytest.importorskip("mooncake", reason="pip install kvsight[mooncake]")

from engine_cache.settings import MooncakeSettings
from engine_cache.storage import PoolName, StorageClosedError, page_keys
from engine_cache.storage.mooncake import MooncakeStorage
from engine_cache.storage.mooncake_client import (
    MooncakeClient,
    StorageRegistrationError,
    StorageUnreachableError,
)
from tests.rigs.mooncake import (
    archive,
    engine,
    follow,
    own_identity,
)
from tests.rigs.page_pools import KEYS, PagePool, get, put
from tests.support.servers.child_process import free_port
from tests.support.waiting import wait_until

FOUR = range(4)
pytestmark = pytest.mark.timing("a store's calls must end within their deadline")


@pytest.fixture
def connect():
    """Opens backends with one page pool for a master."""
    opened = []

    def connector(master, identity=None, **settings):
        store: Any = MooncakeStorage.connect(identity or own_identity(), master.settings(**settings))
        opened.append(store)
        store.kv = PagePool(num_runs=2)
        store.register_mem_pool_host(store.kv)
        return store

    yield connector
    for store in opened:
        store.close()


# --- start and end ---------------------------------------------------------------------------------------------------


def test_a_master_that_is_not_there_is_reported_at_once_with_its_address():
    address = f"127.0.0.1:{free_port()}"
    began = time.monotonic()
    with pytest.raises(StorageUnreachableError, match=rf"no Mooncake master listens on {address}"):
        MooncakeStorage.connect(own_identity(), MooncakeSettings.ignoring_environment(mooncake_master=address))
    assert time.monotonic() - began < 25


def test_a_master_that_takes_no_connection_is_reported_after_the_time_limit():
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = f"127.0.0.1:{full.getsockname()[1]}"
        waiting = [socket.socket() for _ in range(3)]
        for each in waiting:  # the listener's queue is full: a further connection hangs
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        settings = MooncakeSettings.ignoring_environment(mooncake_master=address, mooncake_connect_timeout_s=0.2)
        with pytest.raises(StorageUnreachableError, match=r"waited 0.2 s"):
            MooncakeClient(settings)
        for each in waiting:
            each.close()


def test_a_buffer_that_the_store_refuses_is_named(connect, mooncake_master):
    store = connect(mooncake_master)
    buffer = store.kv.rows
    store.register_mem_pool_host(store.kv)  # known already, so no lookup is needed
    with pytest.raises(StorageRegistrationError, match=rf"pool swa: {buffer.nbytes} bytes at 0x[0-9a-f]+.*code -600"):
        store._client.register("swa", buffer.data_ptr(), buffer.nbytes)


def test_a_pool_that_was_refused_leaves_nothing_registered(connect, mooncake_master):
    store = connect(mooncake_master)
    pool: Any = PagePool(num_runs=2)
    overlapping = pool.rows[8:]
    pool.get_hybrid_pool_buffer = lambda: [pool.rows[:4], overlapping, overlapping]
    with pytest.raises(StorageRegistrationError, match=r"pool kv"):
        store.register_mem_pool_host(pool)
    del pool.get_hybrid_pool_buffer
    store.register_mem_pool_host(pool)
    store.kv = pool
    assert put(store, 3) == [True]


def test_a_store_that_refuses_a_second_pool_knows_none_and_takes_them_later(connect, mooncake_master):
    store, pool = connect(mooncake_master), PagePool(num_runs=1, page_size=1)
    put(store, 0)
    unlikely: Any = PagePool(num_runs=1, page_size=1)
    unlikely.get_hybrid_pool_buffer = lambda: [unlikely.rows, unlikely.rows[1:]]
    with pytest.raises(StorageRegistrationError, match="pool indexer"):
        store.register_host_pools({PoolName.KV: store.kv, PoolName.INDEXER: unlikely})
    with pytest.raises(ValueError, match="none yet"):
        put(store, 1)
    assert store.take_removed() == []
    store._look_again()
    store.register_host_pools({PoolName.KV: store.kv, PoolName.INDEXER: pool})
    assert put(store, 0, 1) == [True, True]


def test_a_pool_whose_pages_are_not_what_the_names_state_is_refused(connect, mooncake_master):
    store = connect(mooncake_master)
    with pytest.raises(ValueError, match=r"runs of memory a page of pool kv: got 1, expected 2"):
        store.register_mem_pool_host(PagePool(num_runs=1))
    with pytest.raises(ValueError, match=r"host pool kv: got 'object'"):
        store.register_mem_pool_host(object())


def test_every_call_on_a_closed_client_is_refused(mooncake_master):
    client = MooncakeClient(mooncake_master.settings())
    client.close()
    client.close()
    for call in (
        lambda: client.exist(["a"]),
        lambda: client.put(["a"], [0], [1]),
        lambda: client.get(["a"], [0], [1]),
        lambda: client.remove(["a"]),
        lambda: client.remove_matching("a"),
        lambda: client.register("kv", 0, 1),
        lambda: client.unregister(0),
        client.probe,
    ):
        with pytest.raises(StorageClosedError, match="store is closed"):
            call()


# --- contents of the store -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 10])
def test_an_object_of_another_length_is_a_miss_and_is_removed(connect, mooncake_master, length):
    store = connect(mooncake_master)
    put(store, 0, 2)
    (name, _) = store._names("kv", KEYS[1:2])
    wrong = store.kv.rows.view(torch.uint8).view(-1)
    assert store._client.put([name], [wrong.data_ptr()], [length]) == [True]
    assert put(store, 1) == [True]  # only a read can show that
    assert get(store, 0, 1, 2) == [True, False, True]
    assert store.get_stats().num_damaged == 1
    assert (store.take_removed(), store.is_held(KEYS[1])) == ([KEYS[1]], False)
    assert put(store, 1) == [True]
    assert get(store, 1) == [True]


def test_a_full_store_refuses_pages_and_loses_none_that_are_reported(own_mooncake_master, connect):
    store = connect(own_mooncake_master)
    big = PagePool(num_pages=160, page_size=65_536, num_runs=2)  # 393 kB a page, 63 MB in all
    store.kv = big
    store.register_mem_pool_host(big)
    keys = page_keys([f"{page:064x}" for page in range(200)])
    done = [store.batch_set_v1([key], big.indices(page % 160)) for page, key in enumerate(keys)]
    failed = [page for page, (stored,) in enumerate(done) if not stored]
    assert failed
    assert store.get_stats().num_failed_writes == len(failed)
    assert not any(store.is_held(keys[page]) for page in failed)
    store._look_again()
    there = {key for key in keys if store.batch_exists([key])}
    assert {key for key in keys if store.is_held(key)} <= there


def test_pages_beyond_the_bound_are_no_longer_reported(mooncake_master):
    with engine("mha", own_identity(), mooncake_master.settings(mooncake_max_tracked_pages=3)) as rig:
        archive(rig)
        assert len(follow(rig)) == 3
        archive(rig, [9, 9, 8, 8])
        assert len(follow(rig)) == 3


def test_clearing_removes_own_leased_pages_and_no_others(connect, mooncake_master):
    identity = own_identity()
    ours, theirs = connect(mooncake_master, identity), connect(mooncake_master)
    for store in (ours, theirs):
        assert put(store, 0, 1) == [True, True]
        assert get(store, 0, 1) == [True, True]  # both have a lease now
    ours.clear()
    assert (ours.batch_exists(KEYS), theirs.batch_exists(KEYS)) == (0, 2)


def test_the_owner_of_a_store_clears_all_of_it_and_the_others_notice(own_mooncake_master, connect):
    owner, other = connect(own_mooncake_master, mooncake_owns_store=True), connect(own_mooncake_master)
    put(owner, 0)
    put(other, 0, 1)
    owner.clear()
    assert (owner.take_removed(), owner.batch_exists(KEYS)) == ([], 0)
    wait_until(lambda: not other.is_held(KEYS[0]), what="a look at an emptied store")
    assert other.take_removed() == KEYS[:2]


# --- a master that dies and returns ----------------------------------------------------------------------------------


def test_a_master_that_was_restarted_between_two_looks_is_noticed(own_mooncake_master, connect):
    store = connect(own_mooncake_master, mooncake_watch_interval_s=3.0)
    put(store, 0, 1)
    own_mooncake_master.restart()
    wait_until(lambda: not store.is_held(KEYS[0]), what="the new master")
    assert store.take_removed() == KEYS[:2]


def test_while_the_master_is_away_calls_fail_at_once_and_later_work_again(own_mooncake_master, connect):
    store = connect(own_mooncake_master)
    put(store, 0)
    own_mooncake_master.kill()
    assert get(store, 0) == [False]
    began = time.monotonic()
    for _ in range(100):
        assert (store.batch_exists(KEYS), put(store, 0), get(store, 0)) == (0, [False], [False])
    assert time.monotonic() - began < 40
    with pytest.raises(StorageUnreachableError, match=own_mooncake_master.address):
        store.clear()
    own_mooncake_master.restart()
    wait_until(lambda: put(store, 0, 1) == [True, True], 60, "the master is back")
    assert get(store, 0, 1) == [True, True]
    assert store.is_held(KEYS[0])


def test_a_master_that_stands_still_is_waited_for_once_and_used_again_when_it_continues(own_mooncake_master, connect):
    store = connect(own_mooncake_master)
    assert put(store, *FOUR) == [True] * 4
    own_mooncake_master.stop()
    began = time.monotonic()
    assert store.batch_exists(KEYS) == 0
    assert time.monotonic() - began < 40  # the first client of the process has set 5 s, and may try twice
    began = time.monotonic()
    for _ in range(100):
        assert (store.batch_exists(KEYS), put(store, *FOUR)) == (0, [False] * 4)
    assert time.monotonic() - began < 40
    assert sorted(store.take_removed()) == KEYS[:4]
    own_mooncake_master.resume()
    wait_until(lambda: store.batch_exists(KEYS) == 4, 30, "the pages are there again")
    assert not any(store.is_held(key) for key in KEYS[:4])
    assert put(store, *FOUR) == [True] * 4
    assert all(store.is_held(key) for key in KEYS[:4])
