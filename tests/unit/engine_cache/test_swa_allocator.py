"""Rows of full and sliding-window layers: their owners and the mapping between them."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_cache import PoolError, SWATokenToKVPoolAllocator
from kv_events.errors import InvalidValueError


@pytest.fixture(autouse=True)
def _watched(monkeypatch):
    monkeypatch.setattr("engine_cache.settings.CHECK_FREES", True)


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


def test_half_a_page_is_refused():
    with pytest.raises(InvalidValueError, match="need_size"):
        SWATokenToKVPoolAllocator(8, 8, 2).alloc(3)


def test_clear_frees_both_sides():
    pool = SWATokenToKVPoolAllocator(8, 8, 2)
    pool.alloc(6)
    pool.clear()
    assert pool.available_size() == 8
    assert not pool.full_to_swa_index_mapping.any()


@given(st.lists(st.tuples(st.sampled_from(["alloc", "free", "free_swa"]), st.integers(0, 5)), max_size=40))
def test_rows_of_both_sides_always_add_up(steps):
    pool, held = SWATokenToKVPoolAllocator(12, 8, 2), list[Any]()
    for what, number in steps:
        if what == "alloc":
            rows = pool.alloc(number * 2)
            assert (rows is None) == (number * 2 > min(12 - len(held) * 2, 8 - 2 * sum(has for _, has in held)))
            held += [] if rows is None else [(page, True) for page in rows.reshape(-1, 2)]
        elif held:
            page, _ = held.pop(number % len(held))
            (pool.free if what == "free" else pool.free_swa)(page)
            if what == "free_swa":
                held.append((page, False))
        assert pool.full.available_size() == 12 - 2 * len(held)
        swa = [row for page, _ in held for row in pool.translate(page) if row]
        assert len(set(swa)) == len(swa) == 2 * sum(has for _, has in held)
        assert pool.swa.available_size() == 8 - len(swa)
