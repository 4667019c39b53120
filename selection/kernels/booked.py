"""Kernels of booked pages: those of requests that workers have been given.

A page of a place, which is a number of a worker's rank, has an entry in a hash table. Its key is the page's sequence
hash, mixed with the place. A booking covers a prompt from its first page on, so what is booked of a prompt, or
predicted, is always a prefix, and its length is found by binary search.
"""

from typing import NamedTuple

import numpy as np

from kv_events.kernels.arrays import zeros
from kv_events.kernels.bundles import F64Vector, I32Vector, I64Matrix, U64Input
from kv_events.kernels.declare import helper, inline_helper, kernel
from kv_events.kernels.numbers import U64, int32, int64, uint64
from kv_events.kernels.page_table import Table, make_table
from kv_events.kernels.page_table_ops import find, find_or_insert, remove

_MIX = uint64(0x9E3779B97F4A7C15)


class BookedPages(NamedTuple):
    """The pages of all bookings."""

    table: Table
    references: I32Vector
    """[entries] bookings that have the page."""
    predicted_until: F64Vector
    """[entries] until when the page counts as held, in seconds since 1970."""


def make_pages(capacity: int) -> BookedPages:
    """Return room for a number of pages. Reserves address space only."""
    return BookedPages(make_table(capacity), zeros(capacity + 1, np.int32), zeros(capacity + 1, np.float64))


@inline_helper
def _key(page: U64, place: int) -> U64:
    return page ^ uint64(place + 1) * _MIX


@kernel
def book(pages: BookedPages, hashes: U64Input, place: int, until: float) -> tuple[int, int]:
    """Add a booking. hashes: uint64[n] of a prompt. until: see `predicted_until`; 0: its pages are not predicted.

    Returns the number of pages that were booked, fewer than n if the table is full, and how many of them no other
    booking of the place has.
    """
    num_new = int64(0)
    for i in range(hashes.shape[0]):
        entry, is_new = find_or_insert(pages.table, _key(hashes[i], place))
        if entry < 0:
            return int64(i), num_new
        if is_new:
            pages.references[entry] = int32(0)
            pages.predicted_until[entry] = 0.0
        num_new += pages.references[entry] == 0
        pages.references[entry] += int32(1)
        pages.predicted_until[entry] = max(pages.predicted_until[entry], until)
    return int64(hashes.shape[0]), num_new


@kernel
def release(pages: BookedPages, hashes: U64Input, place: int, count: int, now: float) -> int:
    """Remove `count` bookings, 0 or 1, and drop pages that are neither booked nor predicted.

    Returns the number of pages that no booking of the place has any more.
    """
    num_gone = int64(0)
    for i in range(hashes.shape[0]):
        entry = find(pages.table, _key(hashes[i], place))
        if entry >= 0:
            pages.references[entry] -= int32(count)
            if pages.references[entry] <= 0:
                num_gone += count
                if pages.predicted_until[entry] <= now:
                    remove(pages.table, entry)
    return num_gone


@kernel
def count_own(pages: BookedPages, hashes: U64Input, place: int) -> int:
    """Return the number of pages that exactly one booking has."""
    own = int64(0)
    for i in range(hashes.shape[0]):
        entry = find(pages.table, _key(hashes[i], place))
        if entry >= 0:
            own += pages.references[entry] == 1
    return own


@helper
def _length(pages: BookedPages, hashes: U64Input, place: int, now: float) -> int:
    """Return the leading pages that are predicted at a time, or, if it is negative, that are booked."""
    low, high = int64(0), int64(hashes.shape[0])
    while low < high:
        middle = (low + high) // 2
        entry = find(pages.table, _key(hashes[middle], place))
        if entry >= 0 and (pages.references[entry] > 0 if now < 0 else pages.predicted_until[entry] > now):
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def booked_lengths(pages: BookedPages, hashes: U64Input, places: I32Vector, now: float, out: I64Matrix) -> None:
    """Write how many leading pages of a prompt are booked, and how many are predicted.

    places: int32[n], -1 for ranks without bookings. out: int64[n, 2]
    """
    for row in range(places.shape[0]):
        out[row, 0] = out[row, 1] = int64(0)
        place = int64(places[row])
        if place >= 0 and hashes.shape[0] > 0 and find(pages.table, _key(hashes[0], place)) >= 0:
            out[row, 0] = _length(pages, hashes, place, -1.0)
            out[row, 1] = _length(pages, hashes, place, now)
