"""Kernels of booked pages: those of requests that workers have been given.

A page of a place, which is a number of a worker's rank, has an entry in a hash table. Its key is the page's sequence
hash, mixed with the place and a secret. The hash stands for all pages before it, and each entry knows the one before
it: the pages of a place are a tree. A booking marks its last page. What is marked is then each page on the way to it,
so what is booked of a prompt, or predicted, is always a prefix, and its length is found by binary search.
"""

from typing import NamedTuple

import numpy as np

from kv_events.kernels.arrays import zeros
from kv_events.kernels.bundles import F64Vector, I32Vector, I64Matrix, I64Vector, U64Input
from kv_events.kernels.declare import helper, inline_helper, kernel
from kv_events.kernels.instructions import folded_product
from kv_events.kernels.numbers import U64, int32, int64, uint64
from kv_events.kernels.page_table import SECRET, Table, make_table
from kv_events.kernels.page_table_ops import find, find_or_insert, remove

NO_PAGE = -1


class BookedPages(NamedTuple):
    """The pages of all bookings. An entry that is neither booked nor predicted is removed."""

    table: Table
    before: I32Vector
    """[entries] entry of the page before, or NO_PAGE."""
    booked: I32Vector
    """[entries] bookings that end with the page, and pages after it that are booked."""
    predicted: I32Vector
    """[entries] the same of bookings whose pages count as held."""


class LoadColumns(NamedTuple):
    """What is booked, by the number of a place."""

    prefill_tokens: I64Vector
    """Tokens that are still to be computed."""
    decode_blocks: F64Vector
    """Distinct pages, with those of the output, some of which count in part."""
    requests: I64Vector


def make_pages(capacity: int) -> BookedPages:
    """Return room for a number of pages. Reserves address space only."""
    before, booked, predicted = (zeros(capacity + 1, np.int32) for _ in range(3))
    return BookedPages(make_table(capacity), before, booked, predicted)


@inline_helper
def _key(pages: BookedPages, page: U64, place: int) -> U64:
    """Mix a secret with the place, so that callers cannot choose hashes that are one page of two places."""
    return page ^ folded_product(uint64(place + 1), uint64(pages.table.meta[SECRET]))


@helper
def find_or_add(pages: BookedPages, hashes: U64Input, place: int) -> int:
    """Return the entry of the last page of a prompt, or NO_PAGE. Unknown pages are added. The caller marks the entry.

    hashes: uint64[n]. A page for which there is no room ends the prompt. No engine gives one hash to two prompts: a
    known page after an unknown one ends the prompt, or counts with the pages of the prompt that made it known.
    """
    low, high = int64(0), int64(hashes.shape[0])
    while low < high:
        middle = (low + high) // 2
        if find(pages.table, _key(pages, hashes[middle], place)) >= 0:
            low = middle + 1
        else:
            high = middle
    last = find(pages.table, _key(pages, hashes[low - 1], place)) if low > 0 else int64(NO_PAGE)
    for i in range(low, hashes.shape[0]):
        entry, is_new = find_or_insert(pages.table, _key(pages, hashes[i], place))
        if entry < 0 or not is_new:
            break
        pages.before[entry], pages.booked[entry], pages.predicted[entry] = int32(last), int32(0), int32(0)
        last = entry
    return last


@helper
def mark(pages: BookedPages, marks: I32Vector, last: int) -> int:
    """Mark the last page of a prompt. Returns how many of its pages were not marked. marks: a column of `pages`."""
    entry, num_new = last, int64(0)
    while entry != NO_PAGE:
        marks[entry] += int32(1)
        if marks[entry] > 1:
            break
        num_new += 1
        entry = int64(pages.before[entry])
    return num_new


@helper
def unmark(pages: BookedPages, marks: I32Vector, last: int) -> int:
    """Remove a mark. Returns how many pages are not marked any more. See `mark`."""
    entry, num_gone = last, int64(0)
    while entry != NO_PAGE:
        marks[entry] -= int32(1)
        if marks[entry] > 0:
            break
        before = int64(pages.before[entry])
        if pages.booked[entry] == 0 and pages.predicted[entry] == 0:
            remove(pages.table, entry)
        num_gone += 1
        entry = before
    return num_gone


@helper
def count_own(pages: BookedPages, last: int) -> int:
    """Return the number of pages of a booking that no other one has. last: see `find_or_add`."""
    entry, own = last, int64(0)
    while entry != NO_PAGE and pages.booked[entry] == 1:
        entry = int64(pages.before[entry])
        own += 1
    return own


@helper
def _entries(pages: BookedPages, hashes: U64Input, place: int, length: int) -> tuple[int, int]:
    """Return the entry of the last of some leading pages, and that of the page after them. -1: none."""
    last = find(pages.table, _key(pages, hashes[length - 1], place)) if length > 0 else int64(-1)
    after = find(pages.table, _key(pages, hashes[length], place)) if length < hashes.shape[0] else int64(-1)
    return last, after


@helper
def _length(
    pages: BookedPages, marks: I32Vector, hashes: U64Input, place: int, guess: int, entries: tuple[int, int]
) -> int:
    """Return the number of leading pages that are marked. guess: it, perhaps. entries: see `_entries`."""
    low, high, (last, after) = guess, int64(hashes.shape[0]), entries
    if guess > 0 and (last < 0 or marks[last] == 0):
        low, high = int64(0), guess - 1
    elif after < 0 or marks[after] == 0:
        high = guess
    while low < high:
        middle = (low + high) // 2
        entry = find(pages.table, _key(pages, hashes[middle], place))
        if entry >= 0 and marks[entry] > 0:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def booked_lengths(pages: BookedPages, hashes: U64Input, places: I32Vector, out: I64Matrix) -> None:
    """Write how many leading pages of a prompt are booked, and how many are predicted.

    places: int32[n], -1 for ranks without bookings. out: int64[n, 2]
    """
    guess = int64(hashes.shape[0])  # that of one place is tried for the next one
    for row in range(places.shape[0]):
        out[row, 0] = out[row, 1] = int64(0)
        place = int64(places[row])
        if place < 0 or hashes.shape[0] == 0:
            continue
        entries = _entries(pages, hashes, place, guess)
        if entries[0] < 0 and find(pages.table, _key(pages, hashes[0], place)) < 0:
            continue
        length = _length(pages, pages.booked, hashes, place, guess, entries)
        if length != guess:
            guess, entries = length, _entries(pages, hashes, place, length)
        out[row, 0] = length
        out[row, 1] = _length(pages, pages.predicted, hashes, place, guess, entries)
