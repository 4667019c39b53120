import numpy as np
import pytest

from engine_cache import PagedTokenToKVPoolAllocator, PoolError, ReqToTokenPool


@pytest.mark.parametrize("page_size", [1, 4])
def test_every_row_but_those_of_page_zero_is_handed_out_once(page_size):
    pool = PagedTokenToKVPoolAllocator(12 * page_size, page_size)
    rows = np.concatenate([pool.alloc(3 * page_size) for _ in range(4)])
    assert sorted(rows.tolist()) == list(range(page_size, 13 * page_size))
    assert rows.dtype == np.int64
    assert pool.available_size() == 0


def test_rows_come_page_by_page():
    rows = PagedTokenToKVPoolAllocator(16, 4).alloc(8).reshape(2, 4)
    assert (rows % 4 == [0, 1, 2, 3]).all()
    assert (rows // 4 == (rows // 4)[:, :1]).all()


def test_too_many_rows_are_none_and_take_nothing():
    pool = PagedTokenToKVPoolAllocator(8, 4)
    assert pool.alloc(12) is None
    assert pool.available_size() == 8


def test_part_of_a_page_is_refused():
    pool = PagedTokenToKVPoolAllocator(8, 4)
    for size in (3, -4):
        with pytest.raises(ValueError, match=str(size)):
            pool.alloc(size)


def test_any_row_of_a_page_frees_the_page():
    pool = PagedTokenToKVPoolAllocator(16, 4)
    rows = pool.alloc(16)
    pool.free(rows[[1, 9, 2, 10]])
    assert pool.available_size() == 8
    assert sorted(pool.free_pages().tolist()) == sorted({int(rows[1]) // 4, int(rows[9]) // 4})


def test_freed_rows_are_handed_out_again():
    pool = PagedTokenToKVPoolAllocator(16, 4)
    rows = pool.alloc(16)
    pool.free(rows[4:12])
    assert sorted(pool.alloc(8).tolist()) == sorted(rows[4:12].tolist())


def test_freeing_nothing_changes_nothing():
    pool = PagedTokenToKVPoolAllocator(16, 4)
    pool.free(np.empty(0, np.int64))
    assert pool.available_size() == 16


def test_clear_frees_everything():
    pool = PagedTokenToKVPoolAllocator(16, 4)
    pool.alloc(12)
    pool.clear()
    assert sorted(pool.free_pages().tolist()) == [1, 2, 3, 4]


def test_a_double_free_is_found():
    pool = PagedTokenToKVPoolAllocator(16, 4)
    rows = pool.alloc(8)
    pool.free(rows)
    with pytest.raises(PoolError, match="free already"):
        pool.free(rows[:4])
    assert pool.available_size() == 16


@pytest.mark.parametrize("row", [0, 3, 20, -1])
def test_rows_of_another_pool_are_found(row):
    pool = PagedTokenToKVPoolAllocator(16, 4)
    pool.alloc(16)
    with pytest.raises(PoolError, match=r"pages 1 \.\. 4"):
        pool.free(np.array([row]))


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
