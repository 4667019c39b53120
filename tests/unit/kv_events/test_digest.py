"""The digest compared with its definition in plain integers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numba import types

from kv_events.digest import add_page, digest_bytes, empty_digest, page_counts, remove_page
from kv_events.kernels.bundles import U64Input, U64Vector
from kv_events.kernels.declare import array_kernel
from tests.support.log.records import digest_of


@array_kernel(types.void, U64Vector, types.int64, U64Input)
def _add(digest, medium, hashes):
    for i in range(hashes.shape[0]):
        add_page(digest, medium, hashes[i])


@array_kernel(types.void, U64Vector, types.int64, U64Input)
def _remove(digest, medium, hashes):
    for i in range(hashes.shape[0]):
        remove_page(digest, medium, hashes[i])


PAGES = st.sets(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 3)), max_size=20)


@given(PAGES, PAGES)
def test_adding_and_removing_in_any_order_equals_counting_from_scratch(
    kept: set[tuple[int, int]], gone: set[tuple[int, int]]
) -> None:
    digest = empty_digest()
    gone -= kept
    for page, medium in [*gone, *kept]:
        _add(digest, medium, np.array([page], np.uint64))
    for page, medium in gone:
        _remove(digest, medium, np.array([page], np.uint64))
    assert digest_bytes(digest) == digest_of(kept)
    assert page_counts(digest) == [sum(medium == m for _, medium in kept) for m in range(4)]


def test_splitmix_has_its_published_first_output() -> None:
    digest = empty_digest()
    _add(digest, 0, np.array([0], np.uint64))
    assert int(digest[4]) == 0xE220A8397B1DCDAF


def test_pages_related_by_xor_do_not_cancel_out() -> None:
    digest = empty_digest()
    _add(digest, 0, np.array([1, 2, 3], np.uint64))
    assert int(digest[4]) != 0
