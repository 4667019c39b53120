"""KV and index of a sparse-attention model are copied together: to the host and back, to a store and back."""

import itertools

import numpy as np
import pytest
import torch

from engine_cache import Lane, StoragePolicy
from engine_cache.pools.host import HOST_LAYOUTS
from engine_cache.storage import PageLayout, StorageIdentity
from engine_cache.storage.base import PoolName
from engine_cache.storage.directory import DirectoryStorage
from tests.support.caches.checks import check_cache
from tests.support.caches.nsa_rig import FlakyStore, NsaRig
from tests.support.caches.tier_rig import Rig

pytestmark = pytest.mark.torch
KV, INDEXER = PoolName.KV, PoolName.INDEXER


def prompt(rig, pages):
    return list(range(pages * rig.page_size))


def archived(store, pages):
    """Archive a prompt of `pages` pages with another cache. Returns the content of its tokens."""
    rig = NsaRig(store=store)
    content = rig.insert(prompt(rig, pages))
    rig.settle()
    assert rig.cache.detach_storage_backend()[0]
    return content


def prefetch(rig, tokens):
    """Prefetch the part of a prompt that the store has. Returns its device rows."""
    rig.cache.prefetch_from_storage("r", rig.cache.root_node, tokens)
    rig.engine.drain()
    assert rig.cache.check_prefetch_progress("r")
    return rig.load_back(tokens)


@pytest.mark.parametrize("page_size", [1, 4, 7])
@pytest.mark.parametrize("layout", HOST_LAYOUTS)
def test_kv_and_index_come_back_bit_for_bit(layout, page_size):
    rig = NsaRig(page_size, layout)
    tokens = prompt(rig, 2)
    content = rig.insert(tokens)
    rig.settle()
    longer = rig.insert([*tokens, *tokens])
    assert torch.equal(rig.content(rig.match(tokens).device_indices), content)
    rig.demote()
    loaded = rig.content(rig.load_back([*tokens, *tokens]))
    assert torch.equal(loaded[:2], content)
    assert torch.equal(loaded[2:], longer[2:])
    check_cache(rig.cache, np.empty(0, np.int64))


def test_the_index_uses_the_rows_of_kv_and_none_of_its_own():
    rig = NsaRig()
    rig.insert(prompt(rig, 3))
    rig.demote()
    assert rig.index.available_size() == rig.index.size
    assert rig.group.available_size() == rig.group.size - 3 * rig.page_size
    rig.cache.evict_host(10**6)
    assert rig.group.available_size() == rig.group.size


def test_a_copy_of_the_index_that_fails_takes_the_copy_of_kv_with_it(monkeypatch):
    rig = NsaRig()
    copy, failures = rig.index.backup_from_device_all_layer, itertools.count()

    def fail_twice(*rows):
        if next(failures) < 2:
            raise RuntimeError("injected")
        copy(*rows)

    monkeypatch.setattr(rig.index, "backup_from_device_all_layer", fail_twice)
    tokens = prompt(rig, 2)
    content = rig.insert(tokens)
    rig.settle()
    assert rig.match(tokens).last_device_node.host_value is None
    assert rig.group.available_size() == rig.group.size
    rig.insert(tokens)
    rig.demote()
    assert len(rig.load_back(tokens)) == len(content) * rig.page_size


def test_the_index_rides_with_kv_and_other_models_have_nothing_that_does():
    assert [entry.name for entry in NsaRig().cache.cache_controller.group.sharing] == [INDEXER]
    assert Rig().cache.cache_controller.group.sharing == []
    assert Rig(attention="mla").cache.cache_controller.group.sharing == []


# --- the store ---


def test_what_one_cache_archives_another_prefetches_bit_for_bit(tmp_path):
    identity = StorageIdentity("org/model", PageLayout("bfloat16", 4, (2, 1, 7), "page_first"))

    def rig():
        policy = StoragePolicy(prefetch_threshold=1, stop="wait_complete")
        return NsaRig(
            open_store=lambda: DirectoryStorage(tmp_path, identity, capacity_bytes=2**20),
            policy=policy,
        )

    writer, reader = rig(), rig()
    tokens = prompt(writer, 5)
    content = writer.insert(tokens)
    writer.settle()
    writer.stack.close()
    assert torch.equal(reader.content(prefetch(reader, tokens)), content)
    reader.stack.close()


def test_a_hit_ends_where_the_index_of_a_page_is_missing():
    store = FlakyStore()
    content = archived(store, 5)
    third = [key for name, key in store.pages if name is INDEXER][2]
    del store.pages[INDEXER, third]
    rig = NsaRig(store=store)
    rows = prefetch(rig, prompt(rig, 5))
    assert torch.equal(rig.content(rows), content[:2])
    assert ("get", INDEXER, 2) in store.batches


def test_kv_whose_index_cannot_be_read_is_not_put_into_the_tree():
    store = FlakyStore()
    content = archived(store, 5)
    rig = NsaRig(store=store)
    store.unreadable = {(INDEXER, 1)}
    rows = prefetch(rig, prompt(rig, 5))
    assert torch.equal(rig.content(rows), content[:1])
    assert rig.group.available_size() == rig.group.size - rig.page_size


def test_a_prefetch_that_is_cut_short_has_the_index_of_every_page_it_brought():
    store = FlakyStore()
    content = archived(store, 5)
    rig = NsaRig(store=store)
    tokens = prompt(rig, 5)
    rig.cache.prefetch_from_storage("r", rig.cache.root_node, tokens)
    while ("get", INDEXER, 2) not in store.batches:
        assert rig.engine.step(Lane.PREFETCH)  # type: ignore[attr-defined]
    assert rig.cache.check_prefetch_progress("r")
    assert torch.equal(rig.content(rig.load_back(tokens)), content[:2])
    rig.settle()
    assert rig.group.available_size() == rig.group.size - 2 * rig.page_size


def test_kv_whose_index_the_store_refused_is_not_archived():
    store = FlakyStore()
    store.refused = {(INDEXER, 1)}
    rig = NsaRig(store=store, batch_pages=4)
    rig.insert(prompt(rig, 3))
    rig.settle()
    assert len(store.keys_of(KV)) == 1
    assert store.keys_of(KV) < store.keys_of(INDEXER)
    announced = [event for event in rig.cache.take_events() if getattr(event, "medium", None) == store.medium]
    assert len(announced) == 1


def test_the_store_is_asked_once_a_pool_and_batch():
    store = FlakyStore()
    archived(store, 5)
    sets = [(name, number) for what, name, number in store.batches if what == "set"]
    assert sets == [(INDEXER, 2), (KV, 2)] * 2 + [(INDEXER, 1), (KV, 1)]
    store.batches.clear()
    rig = NsaRig(store=store)
    prefetch(rig, prompt(rig, 5))
    gets = [(name, number) for what, name, number in store.batches if what == "get"]
    assert gets == [(KV, 2), (INDEXER, 2)] * 2 + [(KV, 1), (INDEXER, 1)]
