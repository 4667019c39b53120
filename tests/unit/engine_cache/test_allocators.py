import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_cache import (
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


def test_slots_are_handed_out_once_and_never_slot_zero():
    allocator = MambaSlotAllocator(3)
    assert sorted(int(allocator.alloc(1)[0]) for _ in range(3)) == [1, 2, 3]
    assert allocator.alloc(1) is None
    allocator.free(np.array([2]))
    with pytest.raises(PoolError, match="freed"):
        allocator.free(np.array([2]))
    assert allocator.alloc(1).tolist() == [2]


@pytest.mark.parametrize("row", [0, 3, 20, -1])
def test_rows_of_another_pool_are_found(row):
    pool = PagedTokenToKVPoolAllocator(16, 4)
    pool.alloc(16)
    with pytest.raises(PoolError, match=r"pages 1 \.\. 4"):
        pool.free(np.array([row]))


def test_half_a_page_and_clear_concern_both_sides():
    pool = SWATokenToKVPoolAllocator(8, 8, 2)
    with pytest.raises(InvalidValueError, match="need_size"):
        pool.alloc(3)
    pool.alloc(6)
    pool.clear()
    assert pool.available_size() == 8
    assert not pool.full_to_swa_index_mapping.any()


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


def test_a_request_longer_than_its_line_is_refused():
    pool = ReqToTokenPool(1, 8)
    with pytest.raises(ValueError, match=r"got 9.*8"):
        pool.read(0, 9)
    with pytest.raises(ValueError, match=r"got 9.*8"):
        pool.write(0, 7, np.array([1, 2]))


# --- rows of full and sliding-window layers, and the mapping between them ---


def test_every_row_comes_with_an_swa_row_of_its_own():
    pool = SWATokenToKVPoolAllocator(8, 6, 2)
    rows = pool.alloc(4)
    swa = pool.translate(rows)
    assert len(np.unique(swa)) == 4
    assert swa.min() >= 2  # page 0 is never allocated
    assert (swa[0::2] % 2 == 0).all()
    assert (swa[1::2] == swa[0::2] + 1).all()


@pytest.mark.parametrize(("size", "swa_size"), [(4, 8), (8, 4)])
def test_a_side_that_is_short_gives_nothing_at_all(size, swa_size):
    pool = SWATokenToKVPoolAllocator(size, swa_size, 2)
    assert pool.available_size() == 4
    assert pool.alloc(6) is None
    assert (pool.full.available_size(), pool.swa.available_size()) == (size, swa_size)
    assert len(pool.alloc(4)) == 4


def test_swa_rows_can_go_before_the_full_ones():
    pool = SWATokenToKVPoolAllocator(8, 4, 2)
    rows = pool.alloc(4)
    pool.free_swa(rows[:2])
    assert pool.translate(rows).tolist()[:2] == [0, 0]
    assert (pool.full.available_size(), pool.swa.available_size()) == (4, 2)
    pool.free_swa(rows[:2])  # no effect: they have no SWA rows
    pool.free(rows)
    assert (pool.full.available_size(), pool.swa.available_size()) == (8, 4)
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


def test_rows_loaded_apart_are_mapped_afterwards():
    pool = SWATokenToKVPoolAllocator(8, 8, 2)
    full, swa = pool.full.alloc(4), pool.swa.alloc(2)
    pool.map_swa(full[2:], swa)
    assert pool.translate(full).tolist() == [0, 0, *swa]
    pool.free(full)
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


@pytest.mark.parametrize("act", ["free", "free_swa"])
def test_a_page_that_is_freed_in_part_is_mapped_to_nothing(act):
    pool = SWATokenToKVPoolAllocator(16, 16, 4)
    rows = pool.alloc(8)
    getattr(pool, act)(rows[:6])
    assert not pool.translate(rows).any()
    assert pool.swa.available_size() == 16
    assert pool.full.available_size() == (16 if act == "free" else 8)


def test_full_rows_that_are_had_alone_inherit_nothing_of_their_last_owner():
    pool = SWATokenToKVPoolAllocator(16, 16, 4)
    pool.free(pool.alloc(4)[:2])
    others = pool.swa.alloc(16)
    loaded = pool.full.alloc(16)
    assert not pool.translate(loaded).any()
    pool.free(loaded)
    assert pool.swa.available_size() == 0  # the others have not been freed
    pool.swa.free(others)


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
