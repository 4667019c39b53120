"""Owners of rows, slots and request lines."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_cache import (
    BytelessHostPool,
    MambaSlotAllocator,
    PagedTokenToKVPoolAllocator,
    PoolError,
    ReqToTokenPool,
    SWATokenToKVPoolAllocator,
)
from kv_events.errors import InvalidValueError


@pytest.mark.parametrize("page_size", [1, 4])
def test_every_row_but_those_of_page_zero_is_handed_out_once(page_size):
    pool = PagedTokenToKVPoolAllocator(12 * page_size, page_size)
    rows = np.concatenate([pool.alloc(3 * page_size) for _ in range(4)])
    assert sorted(rows.tolist()) == list(range(page_size, 13 * page_size))
    assert rows.dtype == np.int64
    assert pool.available_size() == 0


def test_rows_come_page_by_page_and_part_of_a_page_is_refused():
    pool = PagedTokenToKVPoolAllocator(16, 4)
    rows = pool.alloc(8).reshape(2, 4)
    assert (rows % 4 == [0, 1, 2, 3]).all()
    assert (rows // 4 == (rows // 4)[:, :1]).all()
    assert (pool.alloc(12), pool.available_size()) == (None, 8), "too many rows are none and take nothing"
    for size in (3, -4):
        with pytest.raises(ValueError, match=str(size)):
            pool.alloc(size)


def test_any_row_of_a_page_frees_the_page_once():
    pool = PagedTokenToKVPoolAllocator(16, 4)
    rows = pool.alloc(16)
    pool.free(np.empty(0, np.int64))
    assert pool.available_size() == 0
    pool.free(rows[[5, 9, 6, 10]])
    assert sorted(pool.free_pages().tolist()) == sorted({int(rows[5]) // 4, int(rows[9]) // 4})
    with pytest.raises(PoolError, match="free already"):
        pool.free(rows[4:8])
    assert (pool.available_size(), sorted(pool.alloc(8).tolist())) == (8, sorted(rows[4:12].tolist()))
    pool.clear()
    assert sorted(pool.free_pages().tolist()) == [1, 2, 3, 4]


@pytest.mark.parametrize("row", [0, 3, 20, -1])
def test_rows_of_another_pool_are_found(row):
    pool = PagedTokenToKVPoolAllocator(16, 4)
    pool.alloc(16)
    with pytest.raises(PoolError, match=r"pages 1 \.\. 4"):
        pool.free(np.array([row]))


def test_slots_start_at_one_and_rows_of_the_host_at_zero():
    slots, host = MambaSlotAllocator(3), BytelessHostPool(12, 4)
    assert sorted(int(slots.alloc(1)[0]) for _ in range(3)) == [1, 2, 3]
    assert slots.alloc(1) is None
    assert host.alloc(8).tolist() == list(range(8))
    assert (host.available_size(), host.free_pages().tolist()) == (4, [2])
    host.free(np.arange(4))
    for rows, words in ((np.arange(4), "page 0"), (np.arange(12, 16), r"0 \.\. 2")):
        with pytest.raises(PoolError, match=words):
            host.free(rows)
    host.backup_from_device_all_layer(None, np.arange(4), np.arange(4))
    host.load_to_device_per_layer(None, np.arange(4), np.arange(4), 0)
    assert host.available_size() == 8


@pytest.mark.parametrize(("size", "page_size"), [(0, 4), (10, 4), (2, 4), (4, 0)])
def test_sizes_that_are_no_pages_are_refused(size, page_size):
    with pytest.raises(ValueError, match="size"):
        PagedTokenToKVPoolAllocator(size, page_size)


def test_request_lines_hold_what_was_written():
    pool = ReqToTokenPool(2, 8)
    a, b = pool.alloc(), pool.alloc()
    assert pool.alloc() is None
    pool.write(a, 0, np.array([5, 6, 7]))
    pool.write(a, 2, np.array([8, 9]))
    assert pool.read(a, 4).tolist() == [5, 6, 8, 9]
    pool.free(b)
    assert (pool.available_size(), pool.alloc()) == (1, b)
    for use in (lambda: pool.read(0, 9), lambda: pool.write(0, 7, np.array([1, 2]))):
        with pytest.raises(ValueError, match=r"got 9.*8"):
            use()


# --- rows of full and sliding-window layers, and the mapping between them ---


def test_every_row_comes_with_an_swa_row_of_its_own():
    pool = SWATokenToKVPoolAllocator(8, 6, 2)
    rows = pool.alloc(4)
    swa = pool.translate(rows)
    assert len(np.unique(swa)) == 4
    assert swa.min() >= 2  # page 0 is never allocated
    assert (swa[0::2] % 2 == 0).all()
    assert (swa[1::2] == swa[0::2] + 1).all()
    with pytest.raises(InvalidValueError, match="need_size"):
        pool.alloc(3)
    pool.clear()
    assert (pool.full.available_size(), pool.swa.available_size()) == (8, 6)
    assert not pool.full_to_swa_index_mapping.any()


def test_swa_rows_move_from_one_full_row_to_another():
    pool = SWATokenToKVPoolAllocator(8, 8, 2)
    source, target = pool.alloc(2), pool.alloc(2)
    pool.free_swa(target)
    swa = pool.translate(source)
    assert pool.move_swa(source, target).tolist() == pool.translate(target).tolist() == swa.tolist()
    assert pool.translate(source).tolist() == [0, 0]
    pool.free(source)
    pool.free(target)
    assert pool.available_size() == 8


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda pool, rows: (pool.free(rows), pool.free(rows)), "free already"),
        (lambda pool, rows: pool.map_swa(rows, pool.swa.alloc(2)), "it has one"),
        (lambda pool, rows: pool.map_swa(pool.full.alloc(2), pool.translate(rows)), "it has one"),
        (lambda pool, rows: pool.move_swa(pool.full.alloc(2), pool.full.alloc(2)), "or is none"),
    ],
)
def test_debug_mode_finds_rows_with_two_owners(act, error):
    pool = SWATokenToKVPoolAllocator(8, 8, 2)
    rows = pool.alloc(2)
    with pytest.raises(PoolError, match=error):
        act(pool, rows)


@given(st.lists(st.tuples(st.sampled_from(["alloc", "load", "free", "free_swa"]), st.integers(0, 9)), max_size=40))
def test_whatever_part_of_a_page_is_named_both_sides_add_up(steps):
    pool, held = SWATokenToKVPoolAllocator(12, 9, 3), []
    for what, number in steps:
        if what in ("alloc", "load"):
            wanted = 3 * (number % 3)
            free = pool.available_size() if what == "alloc" else pool.full.available_size()
            rows = (pool if what == "alloc" else pool.full).alloc(wanted)
            assert (rows is None) == (wanted > free)
            held += [] if rows is None else [(page, what == "alloc") for page in rows.reshape(-1, 3)]
        elif held:
            rows, _ = held.pop(number % len(held))
            (pool.free if what == "free" else pool.free_swa)(rows[number % 3 :])
            if what == "free_swa":
                held.append((rows, False))
        assert pool.full.available_size() == 12 - 3 * len(held)
        assert pool.swa.available_size() == 9 - 3 * sum(has for _, has in held)
        mapped = np.flatnonzero(pool.full_to_swa_index_mapping)
        assert set(mapped) == {row for rows, has in held if has for row in rows}
        assert len(np.unique(pool.full_to_swa_index_mapping[mapped])) == len(mapped)
