"""Kernels of booked pages: those of requests that workers have been given.

A page of a place, which is a number of a worker's rank, has an entry in a hash table. Its key is the page's sequence
hash, mixed with the place. A booking covers a prompt from its first page on. It is known by the entry of its last page,
as each page knows the one before it. So what is booked of a prompt, or predicted, is always a prefix, and its length is
found by binary search.
"""

from typing import NamedTuple

import numpy as np

from kv_events.kernels.arrays import zeros
from kv_events.kernels.bundles import F64Vector, I32Vector, I64Matrix, I64Vector, U64Input
from kv_events.kernels.declare import helper, inline_helper, kernel
from kv_events.kernels.numbers import U64, int32, int64, uint64
from kv_events.kernels.page_table import Table, make_table
from kv_events.kernels.page_table_ops import find, find_or_insert, remove

_MIX = uint64(0x9E3779B97F4A7C15)
NO_PAGE = -1


class BookedPages(NamedTuple):
    """The pages of all bookings."""

    table: Table
    before: I32Vector
    """[entries] entry of the page before, or NO_PAGE."""
    references: I32Vector
    """[entries] bookings that have the page."""
    ended: I32Vector
    """[entries] bookings that had the page, and whose pages may still count as held."""
    predicted_until: F64Vector
    """[entries] until when the page counts as held, in seconds since 1970."""


class LoadColumns(NamedTuple):
    """What is booked, by the number of a place."""

    prefill_tokens: I64Vector
    """Tokens that are still to be computed."""
    decode_blocks: F64Vector
    """Distinct pages, with those of the output, some of which count in part."""
    requests: I64Vector


def make_pages(capacity: int) -> BookedPages:
    """Return room for a number of pages. Reserves address space only."""
    before, references, ended = (zeros(capacity + 1, np.int32) for _ in range(3))
    return BookedPages(make_table(capacity), before, references, ended, zeros(capacity + 1, np.float64))


@inline_helper
def _key(page: U64, place: int) -> U64:
    return page ^ uint64(place + 1) * _MIX


@helper
def book_pages(pages: BookedPages, hashes: U64Input, place: int, until: float) -> tuple[int, int]:
    """Book the pages of a prompt. Returns the entry of the last one, and how many were not booked before.

    hashes: uint64[n]. until: see `predicted_until`; 0: the pages are not predicted. No page is booked from the first
    one on for which there is no room, or which follows on another page elsewhere: no engine gives two prompts one hash.
    """
    last, num_new = int64(NO_PAGE), int64(0)
    for i in range(hashes.shape[0]):
        entry, is_new = find_or_insert(pages.table, _key(hashes[i], place))
        if is_new and entry >= 0:
            pages.before[entry] = int32(last)
            pages.references[entry] = pages.ended[entry] = int32(0)
            pages.predicted_until[entry] = 0.0
        if entry < 0 or pages.before[entry] != last:
            break
        num_new += pages.references[entry] == 0
        pages.references[entry] += int32(1)
        pages.predicted_until[entry] = max(pages.predicted_until[entry], until)
        last = entry
    return last, num_new


@helper
def end_pages(pages: BookedPages, last: int, kept: int) -> int:
    """End a booking. Returns how many of its pages are not booked any more. last: see `book_pages`.

    kept: 1 if the pages may still count as held, so that `drop_pages` follows, else 0.
    """
    entry, num_gone = last, int64(0)
    while entry != NO_PAGE:
        before = int64(pages.before[entry])
        pages.references[entry] -= int32(1)
        pages.ended[entry] += int32(kept)
        num_gone += pages.references[entry] == 0
        _remove_unused(pages, entry)
        entry = before
    return num_gone


@helper
def drop_pages(pages: BookedPages, last: int) -> None:
    """Forget the pages of a booking that has ended."""
    entry = last
    while entry != NO_PAGE:
        before = int64(pages.before[entry])
        pages.ended[entry] -= int32(1)
        _remove_unused(pages, entry)
        entry = before


@inline_helper
def _remove_unused(pages: BookedPages, entry: int) -> None:
    if pages.references[entry] == 0 and pages.ended[entry] == 0:
        remove(pages.table, entry)


@helper
def count_own(pages: BookedPages, last: int) -> int:
    """Return the number of pages of a booking that no other one has."""
    own, entry = int64(0), last
    while entry != NO_PAGE:
        own += pages.references[entry] == 1
        entry = int64(pages.before[entry])
    return own


@inline_helper
def _counts(pages: BookedPages, entry: int, now: float) -> bool:
    """Return whether a page is predicted at a time, or, if it is negative, booked. entry: -1 if there is none."""
    return entry >= 0 and (pages.references[entry] > 0 if now < 0 else pages.predicted_until[entry] > now)


@helper
def _entries(pages: BookedPages, hashes: U64Input, place: int, length: int) -> tuple[int, int]:
    """Return the entry of the last of some leading pages, and that of the page after them. -1: none."""
    last = find(pages.table, _key(hashes[length - 1], place)) if length > 0 else int64(-1)
    after = find(pages.table, _key(hashes[length], place)) if length < hashes.shape[0] else int64(-1)
    return last, after


@helper
def _length(pages: BookedPages, hashes: U64Input, place: int, now: float, guess: int, entries: tuple[int, int]) -> int:
    """Return the number of leading pages that count, see `_counts`. guess: it, perhaps. entries: see `_entries`."""
    low, high, (last, after) = guess, int64(hashes.shape[0]), entries
    if guess > 0 and not _counts(pages, last, now):
        low, high = int64(0), guess - 1
    elif not _counts(pages, after, now):
        high = guess
    while low < high:
        middle = (low + high) // 2
        if _counts(pages, find(pages.table, _key(hashes[middle], place)), now):
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def booked_lengths(pages: BookedPages, hashes: U64Input, places: I32Vector, now: float, out: I64Matrix) -> None:
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
        if entries[0] < 0 and find(pages.table, _key(hashes[0], place)) < 0:
            continue
        length = _length(pages, hashes, place, -1.0, guess, entries)
        if length != guess:
            guess, entries = length, _entries(pages, hashes, place, length)
        out[row, 0] = length
        out[row, 1] = _length(pages, hashes, place, now, guess, entries)
