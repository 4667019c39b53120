"""A store that keeps only keys."""

from __future__ import annotations

import numpy as np
import pytest

from engine_cache import BytelessHostPool
from engine_cache.storage import PoolHitPolicy, PoolName, PoolTransfer, StorageClosedError, page_key
from kv_events.errors import InvalidValueError
from simulation.byteless_store import BytelessStore

KEYS = [page_key(f"{i:064x}") for i in range(8)]


def _store(capacity_pages: int = 4) -> BytelessStore:
    store = BytelessStore(capacity_pages)
    store.register_mem_pool_host(BytelessHostPool(64, 2))  # type: ignore[arg-type]  # it moves no bytes
    store.register_mem_host_pool_v2(BytelessHostPool(64, 1), PoolName.MAMBA)  # type: ignore[arg-type]
    return store


def _rows(pages: int) -> np.ndarray:
    return np.arange(2 * pages)


def _put(store: BytelessStore, keys: list[str]) -> list[bool]:
    return store.batch_set_v1(keys, _rows(len(keys)))


def _put_state(store: BytelessStore, key: str) -> None:
    store.batch_set_v2([PoolTransfer(PoolName.MAMBA, host_indices=np.array([1]), keys=[key])])


def test_what_was_written_is_there_and_nothing_else() -> None:
    store = _store()
    assert _put(store, KEYS[:3]) == [True] * 3
    assert store.batch_exists([*KEYS[:3], KEYS[4]]) == 3
    assert store.batch_get_v1(KEYS[2:4], _rows(2)) == [True, False]
    assert store.held_keys() == set(KEYS[:3])


def test_the_pages_used_longest_ago_go_and_of_a_prefix_those_at_its_end() -> None:
    store = _store()
    _put(store, KEYS[:2])
    _put(store, KEYS[2:4])
    store.batch_get_v1(KEYS[:2], _rows(2))
    _put(store, KEYS[4:5])
    assert store.take_removed() == [KEYS[3]]
    _put(store, KEYS[5:7])
    assert store.take_removed() == [KEYS[2], KEYS[1]]
    assert store.held_keys() == {KEYS[0], *KEYS[4:7]}


def test_a_batch_beyond_the_capacity_keeps_its_beginning() -> None:
    store = _store(capacity_pages=2)
    assert _put(store, KEYS[:3]) == [True, True, False]
    assert store.held_keys() == set(KEYS[:2])


def test_a_page_that_came_back_was_not_lost() -> None:
    store = _store(capacity_pages=1)
    _put(store, KEYS[:1])
    _put(store, KEYS[1:2])
    _put(store, KEYS[:1])
    assert store.take_removed() == [KEYS[1]]
    assert store.take_removed() == []


def test_a_state_goes_with_its_page() -> None:
    store = _store(capacity_pages=1)
    _put_state(store, KEYS[0])
    assert not store.is_held(KEYS[0])
    _put(store, KEYS[:1])
    state = PoolTransfer(PoolName.MAMBA, hit_policy=PoolHitPolicy.TRAILING_PAGES)
    assert store.batch_exists_v2(KEYS[:1], [state]).kv_hit_pages == 1
    _put(store, KEYS[1:2])
    assert store.batch_exists_v2(KEYS[1:2], [state]).kv_hit_pages == 0
    assert store.get_stats().num_evicted == 2


def test_clearing_is_no_loss_and_closing_ends_it() -> None:
    store = _store()
    _put(store, KEYS[:3])
    store.clear()
    assert (store.held_keys(), store.take_removed()) == (set(), [])
    store.close()
    with pytest.raises(StorageClosedError):
        store.is_held(KEYS[0])


def test_a_disk_without_room_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="capacity_pages"):
        BytelessStore(0)
