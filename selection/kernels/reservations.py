"""Kernels of the book: its reservations by name, in the order in which they expire.

A reservation has an entry in a hash table whose keys are hashes of names, under a secret. Names are compared, too: one
with the hash of another one is refused, as if it were taken.
"""

from typing import NamedTuple

import numpy as np

from kv_events.kernels.arrays import zeros
from kv_events.kernels.bundles import (
    BytesInput,
    F64Matrix,
    F64Vector,
    I64Matrix,
    I64Vector,
    U8Input,
    U8Vector,
    U64Input,
)
from kv_events.kernels.byte_strings import equal_bytes, hash_bytes
from kv_events.kernels.declare import helper, inline_helper, kernel
from kv_events.kernels.numbers import U64, int64, uint64
from kv_events.kernels.page_table import SECRET, Table, make_table
from kv_events.kernels.page_table_ops import find, find_or_insert, remove
from kv_events.limits import MAX_REQUEST_ID_BYTES
from kv_events.reservations import OUTPUT_BLOCK, PREFILL_COMPLETE, RELEASED, STEPS
from selection.kernels.booked import (
    BookedPages,
    LoadColumns,
    count_own,
    find_or_add,
    make_pages,
    mark,
    unmark,
)

AT_FIRST_TOKEN, AT_OUTPUT, AT_END = (STEPS.index(step) for step in (PREFILL_COMPLETE, OUTPUT_BLOCK, RELEASED))
"""Numbers of steps."""
UNCHANGED = -1.0
"""In place of a `decay_fraction` that is None."""

NAME_BYTES, PLACE, LAST_PAGE, PREFILL_TOKENS, OUTPUT_BLOCKS, BEFORE, AFTER = range(7)
"""Columns of `BookColumns.numbers`: size of the name; place; see `find_or_add`; tokens that are still to be computed;
pages of the output; the entries of the reservations that expire before and after this one, NONE if there are none."""
TOUCHED_AT, DECAYED = range(2)
"""Columns of `BookColumns.times`: when the newest record came, in seconds since 1970; pages by which its own ones count
less."""
OLDEST, NEWEST, NUM_EXPIRED, NUM_PREDICTED = range(4)
"""Elements of `BookColumns.state`: entries of the reservations that expire first and last, or NONE; those that expired
so far; size of `predicted`."""
NONE = -1


class BookColumns(NamedTuple):
    """A book with room for n reservations."""

    pages: BookedPages
    loads: LoadColumns
    names: Table
    """Its keys are hashes of names."""
    texts: U8Vector
    """[(n + 1) * MAX_REQUEST_ID_BYTES] the name of each entry."""
    numbers: I64Matrix
    """[n + 1, 7] see NAME_BYTES."""
    times: F64Matrix
    """[n + 1, 2] see TOUCHED_AT."""
    predicted: I64Matrix
    """[n, 2] binary heap: place and last page of bookings whose pages count as held."""
    predicted_until: F64Vector
    """[n] until when they do, in seconds since 1970. The first one ends first."""
    state: I64Vector
    """[4] see OLDEST."""


def make_book(num_reservations: int, num_pages: int, num_places: int) -> BookColumns:
    """Return an empty book. Reserves address space only."""
    size = num_reservations + 1
    return BookColumns(
        make_pages(num_pages),
        LoadColumns(zeros(num_places, np.int64), zeros(num_places, np.float64), zeros(num_places, np.int64)),
        make_table(num_reservations),
        zeros(size * MAX_REQUEST_ID_BYTES, np.uint8),
        zeros((size, AFTER + 1), np.int64),
        zeros((size, DECAYED + 1), np.float64),
        zeros((num_reservations, 2), np.int64),
        zeros(num_reservations, np.float64),
        np.array([NONE, NONE, 0, 0], np.int64),
    )


@inline_helper
def _key(book: BookColumns, name: U8Input) -> U64:
    return hash_bytes(name, int64(0), int64(name.shape[0]), uint64(book.names.meta[SECRET]))


@kernel
def find_reservation(book: BookColumns, name: BytesInput) -> int:
    """Return the entry of a reservation, or NONE."""
    entry, size = find(book.names, _key(book, name)), int64(name.shape[0])
    is_other = entry >= 0 and (
        book.numbers[entry, NAME_BYTES] != size
        or not equal_bytes(name, int64(0), size, book.texts, entry * MAX_REQUEST_ID_BYTES)
    )
    return int64(NONE) if is_other else entry


@kernel
def reserve(
    book: BookColumns, name: BytesInput, hashes: U64Input, place: int, tokens: int, times: tuple[float, float]
) -> bool:
    """Add a reservation. Returns False if its name is in use or too long, or if there is no room.

    hashes: uint64[n] of its prompt. tokens: of them, those that are to be computed. times: see TOUCHED_AT, and until
    when its pages count as held, 0: they do not.
    """
    size = int64(name.shape[0])
    if size > MAX_REQUEST_ID_BYTES:
        return False
    entry, is_new = find_or_insert(book.names, _key(book, name))
    if entry < 0 or not is_new:
        return False
    for i in range(size):
        book.texts[entry * MAX_REQUEST_ID_BYTES + i] = name[i]
    last = find_or_add(book.pages, hashes, place)
    own = book.numbers[entry]
    own[NAME_BYTES], own[PLACE], own[LAST_PAGE], own[PREFILL_TOKENS] = size, place, last, tokens
    own[OUTPUT_BLOCKS] = 0
    book.times[entry, TOUCHED_AT], book.times[entry, DECAYED] = times[0], 0.0
    book.loads.prefill_tokens[place] += tokens
    book.loads.decode_blocks[place] += mark(book.pages, book.pages.booked, last)
    book.loads.requests[place] += 1
    _append(book, entry)
    if times[1] > 0.0:
        _predict(book, place, last, times[1])
    return True


@inline_helper
def _append(book: BookColumns, entry: int) -> None:
    """Let a reservation expire last."""
    newest = book.state[NEWEST]
    book.numbers[entry, BEFORE], book.numbers[entry, AFTER], book.state[NEWEST] = newest, NONE, entry
    if newest == NONE:
        book.state[OLDEST] = entry
    else:
        book.numbers[newest, AFTER] = entry


@inline_helper
def _unlink(book: BookColumns, entry: int) -> None:
    before, after = book.numbers[entry, BEFORE], book.numbers[entry, AFTER]
    if before == NONE:
        book.state[OLDEST] = after
    else:
        book.numbers[before, AFTER] = after
    if after == NONE:
        book.state[NEWEST] = before
    else:
        book.numbers[after, BEFORE] = before


@helper
def _end(book: BookColumns, entry: int) -> None:
    """End a reservation."""
    own, place = book.numbers[entry], book.numbers[entry, PLACE]
    num_gone = unmark(book.pages, book.pages.booked, own[LAST_PAGE])
    book.loads.prefill_tokens[place] -= own[PREFILL_TOKENS]
    book.loads.decode_blocks[place] -= num_gone + own[OUTPUT_BLOCKS] - book.times[entry, DECAYED]
    book.loads.requests[place] -= 1
    _unlink(book, entry)
    remove(book.names, entry)


@helper
def _predict(book: BookColumns, place: int, last: int, until: float) -> None:
    """Let pages count as held. If there is no room, what would end first ends now."""
    if book.state[NUM_PREDICTED] == book.predicted.shape[0]:
        if until <= book.predicted_until[0]:
            return
        _forget_first(book)
    mark(book.pages, book.pages.predicted, last)
    at = book.state[NUM_PREDICTED]
    book.state[NUM_PREDICTED] += 1
    while at > 0 and book.predicted_until[(at - 1) // 2] > until:
        _move(book, (at - 1) // 2, at)
        at = (at - 1) // 2
    book.predicted[at, 0], book.predicted[at, 1], book.predicted_until[at] = place, last, until


@helper
def _forget_first(book: BookColumns) -> None:
    """Let the pages no longer count as held whose time ends first."""
    unmark(book.pages, book.pages.predicted, book.predicted[0, 1])
    book.state[NUM_PREDICTED] -= 1
    size, at, after = book.state[NUM_PREDICTED], int64(0), int64(1)
    while after < size:
        if after + 1 < size and book.predicted_until[after + 1] < book.predicted_until[after]:
            after += 1
        if book.predicted_until[after] >= book.predicted_until[size]:
            break
        _move(book, after, at)
        at, after = after, 2 * after + 1
    _move(book, size, at)


@inline_helper
def _move(book: BookColumns, source: int, target: int) -> None:
    book.predicted[target, 0], book.predicted[target, 1] = book.predicted[source, 0], book.predicted[source, 1]
    book.predicted_until[target] = book.predicted_until[source]


@helper
def note_step(book: BookColumns, entry: int, step: int, blocks: int, fraction: float, at: float) -> None:
    """Apply a step of a reservation: see AT_FIRST_TOKEN.

    blocks, fraction: see `Progressed`. at: see TOUCHED_AT.
    """
    own, place = book.numbers[entry], book.numbers[entry, PLACE]
    if step == AT_END:
        _end(book, entry)
        return
    if step == AT_FIRST_TOKEN:
        book.loads.prefill_tokens[place] -= own[PREFILL_TOKENS]
        own[PREFILL_TOKENS] = 0
    elif blocks > own[OUTPUT_BLOCKS]:  # otherwise it was applied before
        change = float(blocks - own[OUTPUT_BLOCKS])
        own[OUTPUT_BLOCKS] = blocks
        if fraction != UNCHANGED:
            decayed = (count_own(book.pages, own[LAST_PAGE]) + blocks) * (1.0 - fraction)
            change += book.times[entry, DECAYED] - decayed
            book.times[entry, DECAYED] = decayed
        book.loads.decode_blocks[place] += change
    if at > book.times[entry, TOUCHED_AT]:
        book.times[entry, TOUCHED_AT] = at
        _unlink(book, entry)
        _append(book, entry)


@kernel
def progress(book: BookColumns, name: BytesInput, step: int, blocks: int, fraction: float, at: float) -> bool:
    """Apply a step of a reservation, see `note_step`. Returns False if it is unknown."""
    entry = find_reservation(book, name)
    if entry != NONE:
        note_step(book, entry, step, blocks, fraction, at)
    return entry != NONE


@kernel
def forget_predicted(book: BookColumns, now: float) -> None:
    """Let pages no longer count as held whose time has ended."""
    while book.state[NUM_PREDICTED] > 0 and book.predicted_until[0] <= now:
        _forget_first(book)


@kernel
def expire(book: BookColumns, now: float, ttl_s: float) -> None:
    """End the reservations and the predictions that have expired."""
    while book.state[OLDEST] != NONE and book.times[book.state[OLDEST], TOUCHED_AT] + ttl_s <= now:
        _end(book, book.state[OLDEST])
        book.state[NUM_EXPIRED] += 1
    forget_predicted(book, now)


@kernel
def list_entries(book: BookColumns, out: I64Vector) -> None:
    """Write the entries of all reservations, those that expire first before others."""
    entry = book.state[OLDEST]
    for i in range(out.shape[0]):
        out[i] = entry
        entry = book.numbers[entry, AFTER]


@kernel
def put_in_order(book: BookColumns, entries: I64Vector) -> None:
    """Let all reservations expire in another order. entries: all of them."""
    book.state[OLDEST] = book.state[NEWEST] = NONE
    for i in range(entries.shape[0]):
        _append(book, entries[i])
