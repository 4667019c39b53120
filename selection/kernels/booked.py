"""Kernels of booked pages: those of requests that workers have been given.

A page of a place, which is a number of a worker's rank, has an entry in a hash table. Its key is the page's sequence
hash, mixed with the place. A booking covers a prompt from its first page on, so what is booked of a prompt, or
predicted, is always a prefix, and its length is found by binary search.
"""

from typing import NamedTuple

import numpy as np

from kv_events.kernels.arrays import zeros
from kv_events.kernels.bundles import (
    BoolVector,
    F64Vector,
    I32Vector,
    I64Matrix,
    I64Vector,
    U8Vector,
    U64Input,
    U64Vector,
)
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


class LoadColumns(NamedTuple):
    """What is booked, by the number of a place."""

    prefill_tokens: I64Vector
    """Tokens that are still to be computed."""
    decode_blocks: F64Vector
    """Distinct pages, with those of the output, some of which count in part."""
    requests: I64Vector


class Bookings(NamedTuple):
    """Choices that a kernel has booked: room for m of them. m is 0 if choices are not booked."""

    made: I64Vector
    """[3] number of choices, of their hashes, and of the bytes of their records."""
    is_taken: BoolVector
    """[m] whether another reservation has the name of each request. Such a request is not booked."""
    numbers: I64Matrix
    """[m, 10] see REQUEST and following."""
    hashes: U64Vector
    """Sequence hashes of the prompts, one after the other."""
    records: U8Vector
    """Their records, one after the other."""


REQUEST, ROW, TOKENS, PREFILL_TOKENS, HELD, MOST_HELD, PLACE, NUM_BOOKED, HASHES_END, RECORD_END = range(10)
"""Columns of `Bookings.numbers`: index of the request; the chosen row of the roster; tokens of the prompt, those that
are to be computed, those that the chosen candidate holds on any tier, and those that the best one of the record does;
the place; the result of `reserve`; the ends of hashes and record."""


def make_bookings(num_choices: int, num_hashes: int, num_bytes: int) -> Bookings:
    """Return room for choices, their hashes, and the bytes of their records."""
    return Bookings(
        np.zeros(3, np.int64),
        np.zeros(num_choices, np.bool_),
        np.zeros((num_choices, RECORD_END + 1), np.int64),
        np.zeros(num_hashes, np.uint64),
        np.zeros(num_bytes, np.uint8),
    )


def make_pages(capacity: int) -> BookedPages:
    """Return room for a number of pages. Reserves address space only."""
    return BookedPages(make_table(capacity), zeros(capacity + 1, np.int32), zeros(capacity + 1, np.float64))


@inline_helper
def _key(page: U64, place: int) -> U64:
    return page ^ uint64(place + 1) * _MIX


@kernel
def reserve(pages: BookedPages, loads: LoadColumns, hashes: U64Input, place: int, tokens: int, until: float) -> int:
    """Add a booking to a place. hashes: uint64[n] of its prompt. tokens: of them, those that are to be computed.

    until: see `predicted_until`; 0: its pages are not predicted. Returns the number of pages that were booked, fewer
    than n if the table is full.
    """
    num_booked, num_new = int64(hashes.shape[0]), int64(0)
    for i in range(hashes.shape[0]):
        entry, is_new = find_or_insert(pages.table, _key(hashes[i], place))
        if entry < 0:
            num_booked = int64(i)
            break
        if is_new:
            pages.references[entry] = int32(0)
            pages.predicted_until[entry] = 0.0
        num_new += pages.references[entry] == 0
        pages.references[entry] += int32(1)
        pages.predicted_until[entry] = max(pages.predicted_until[entry], until)
    loads.prefill_tokens[place] += tokens
    loads.decode_blocks[place] += num_new
    loads.requests[place] += 1
    return num_booked


@kernel
def release(
    pages: BookedPages,
    loads: LoadColumns,
    hashes: U64Input,
    place: int,
    count: int,
    tokens: int,
    blocks: float,
    now: float,
) -> None:
    """Remove `count` bookings, 0 or 1, from a place, and drop pages that are neither booked nor predicted.

    hashes: uint64[n] of the pages. tokens: those that are still to be computed. blocks: what else counts in
    `decode_blocks`.
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
    loads.prefill_tokens[place] -= tokens
    loads.decode_blocks[place] -= num_gone + blocks
    loads.requests[place] -= count


@kernel
def count_own(pages: BookedPages, hashes: U64Input, place: int) -> int:
    """Return the number of pages that exactly one booking has."""
    own = int64(0)
    for i in range(hashes.shape[0]):
        entry = find(pages.table, _key(hashes[i], place))
        if entry >= 0:
            own += pages.references[entry] == 1
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
