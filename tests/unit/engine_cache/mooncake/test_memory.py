"""Registration of memory with a Mooncake store."""

import gc
import threading
import weakref

import pytest

pytest.importorskip("torch", reason="stores need torch: pip install kvsight[engine]")
pytest.importorskip("mooncake", reason="pip install kvsight[mooncake]")

from engine_cache.storage import PoolName, mooncake_client, page_keys
from tests.rigs.mooncake import make_rig, own_identity
from tests.support.waiting import wait_until

pytestmark = pytest.mark.torch
KINDS = ["mha", "mla", "hybrid", "nsa"]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def store(open_store, kind):
    return open_store(own_identity(is_mla=kind in ("mla", "nsa")))


def buffers(rig):
    """Return all tensors of all host pools."""
    return [held for entry in rig.controller.entries.values() for held in entry.host_pool.get_hybrid_pool_buffer()]


def watched(rig):
    """Return weak references to the same tensors."""
    return [weakref.ref(held) for held in buffers(rig)]


def num_alive(tensors):
    gc.collect()
    return sum(tensor() is not None for tensor in tensors)


def attach(rig, store):
    assert rig.cache.attach_storage_backend(store) == (True, "attached")
    return rig


def test_every_tensor_of_every_pool_is_registered_once_and_whole(store, kind):
    rig = attach(make_rig(kind), store)
    expected = {(held.data_ptr(), held.nbytes) for held in buffers(rig)}
    assert set(store.native.registrations) == expected
    assert len(store.native.registrations) == len(expected)


def test_a_store_that_is_detached_releases_the_memory_and_takes_another_cache(store, kind):
    rig = attach(make_rig(kind), store)
    tensors = watched(rig)
    assert rig.cache.detach_storage_backend()[0]
    assert store.native.registered == {}
    assert num_alive(tensors) == len(tensors)
    del rig
    assert num_alive(tensors) == 0
    other = attach(make_rig(kind), store)
    assert store.native.registered == {held.data_ptr(): held.nbytes for held in buffers(other)}


def test_a_store_that_is_closed_releases_the_memory_before_its_client_ends(store, kind):
    rig = attach(make_rig(kind), store)
    tensors = watched(rig)
    store.close()
    assert store.native.left_registered == {}
    assert (store.get_stats().num_held, store.get_stats().held_bytes) == (0, 0)
    assert num_alive(tensors) == len(tensors)
    del rig
    assert num_alive(tensors) == 0


def test_memory_that_a_call_may_still_write_to_stays(open_store, monkeypatch):
    monkeypatch.setattr(mooncake_client, "_CLOSE_TIMEOUT_S", 0.01)
    store, gate, begun = open_store(), threading.Event(), threading.Event()
    rig = attach(make_rig("mha"), store)
    tensors = watched(rig)
    store.native.exist_answers.append(lambda codes: begun.set() or (gate.wait() and codes))  # type: ignore[func-returns-value]
    thread = threading.Thread(target=store.batch_exists, args=(page_keys(["00" * 32]),), daemon=True)
    thread.start()
    wait_until(begun.is_set, what="the call")
    store.close()
    del rig
    assert num_alive(tensors) == len(tensors)
    assert store.native.left_registered is None
    gate.set()
    thread.join()


@pytest.mark.parametrize(("kind", "name"), [("hybrid", PoolName.MAMBA), ("nsa", PoolName.INDEXER)])
def test_a_pool_whose_pages_are_no_runs_of_memory_is_refused(store, kind, name):
    pool = make_rig(kind, "layer_first").controller.entry(name).host_pool
    with pytest.raises(ValueError, match=r"layout of host pool .*'layer_first'"):
        store.register_mem_host_pool_v2(pool, name)
    assert store.native.registrations == []
