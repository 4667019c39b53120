"""Pages that are freed in part: the last page of a request, and the pages after it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_cache import SWATokenToKVPoolAllocator


@pytest.fixture(autouse=True)
def _watched(monkeypatch):
    monkeypatch.setattr("engine_cache.settings.CHECK_FREES", True)


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
            rows = (pool if what == "alloc" else pool.full).alloc(3)
            held += [] if rows is None else [(rows, what == "alloc")]
        elif held:
            rows, _ = held.pop(number % len(held))
            part = rows[number % 3 :]
            (pool.free if what == "free" else pool.free_swa)(part)
            if what == "free_swa":
                held.append((rows, False))
        assert pool.full.available_size() == 12 - 3 * len(held)
        assert pool.swa.available_size() == 9 - 3 * sum(has for _, has in held)
        mapped = np.flatnonzero(pool.full_to_swa_index_mapping)
        assert set(mapped) == {row for rows, has in held if has for row in rows}
