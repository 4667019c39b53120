"""Kernels that see which neighbouring events can be taken together: a *run*.

A run's events are of one attention group. Its stores say the same of different pages, save for the medium, and where
they are whole pages without anything special, removals may lie between them.
"""

from __future__ import annotations

from bridge.decoding.event_rows import (
    BLOCK_SIZE,
    EXTRA_LENGTH,
    GROUP,
    HASH_FROM,
    HASH_TO,
    KIND,
    LOCALITY,
    LORA,
    LORA_ID,
    MEDIUM,
    MOST_PLACES,
    NUM_PLACES,
    PAIRS,
    PLACE_ROWS,
    REMOVED,
    SALT,
    SHAPE,
    SPEC,
    STORE_ROW,
    STORED,
    TOKEN_FROM,
    TOKEN_TO,
)
from kv_events.kernels import array_function, array_helper

# shapes of a store: whole pages; no tokens; tokens of another number than the pages need
WHOLE, TOKENLESS, UNEVEN = range(3)


@array_helper
def shape(row):
    positions = row[TOKEN_TO] - row[TOKEN_FROM] - row[PAIRS]
    if positions == 0:
        return TOKENLESS
    return WHOLE if positions == (row[HASH_TO] - row[HASH_FROM]) * row[BLOCK_SIZE] else UNEVEN


@array_function
def _same_text(data, row, other, column):
    length = row[column + 1]
    if length != other[column + 1]:
        return False
    i = 0
    while i < length and data[row[column] + i] == data[other[column] + i]:
        i += 1
    return i == length


@array_helper
def _is_special(row):
    return row[SHAPE] == UNEVEN or row[PAIRS] != 0 or row[EXTRA_LENGTH] != 0


@array_function
def _same_store(data, row, other):
    """Whether two stores say the same, but of other pages and maybe on another medium."""
    if _is_special(row) or _is_special(other) or row[SHAPE] != other[SHAPE]:
        return False
    if row[BLOCK_SIZE] != other[BLOCK_SIZE] or row[LORA_ID] != other[LORA_ID]:
        return False
    return (
        _same_text(data, row, other, LORA) and _same_text(data, row, other, SALT) and _same_text(data, row, other, SPEC)
    )


@array_function
def _place(data, rows, begin, number):
    """Number of an event's medium among those that the run names; a new one is added. -1: there are too many."""
    first, row = rows[begin], rows[number]
    for place in range(first[NUM_PLACES]):
        named = rows[first[PLACE_ROWS + place]]
        if _same_text(data, row, named, MEDIUM) and _same_text(data, row, named, LOCALITY):
            return place
    if first[NUM_PLACES] == MOST_PLACES:
        return -1
    first[PLACE_ROWS + first[NUM_PLACES]] = number
    first[NUM_PLACES] += 1
    return first[NUM_PLACES] - 1


@array_function
def begin_run(rows, number):
    row = rows[number]
    row[STORE_ROW] = number if row[KIND] == STORED else -1
    row[NUM_PLACES], row[PLACE_ROWS] = 1, number


@array_function
def join_run(data, rows, begin, number):
    """Have an event join the run that begins at another row. Returns the number of its medium; -1: it does not fit."""
    row, first = rows[number], rows[begin]
    if row[KIND] > REMOVED or first[KIND] > REMOVED or row[GROUP] != first[GROUP]:
        return -1
    store, is_store = first[STORE_ROW], row[KIND] == STORED
    if is_store and (_is_special(row) if store < 0 else not _same_store(data, row, rows[store])):
        return -1
    # the shape of all the run's stores, this one among them
    is_whole = rows[store][SHAPE] == WHOLE if store >= 0 else not is_store or row[SHAPE] == WHOLE
    if not is_whole or (store >= 0 and _is_special(rows[store])):
        if not is_store or store < 0 or first[NUM_PLACES] > 1:
            return -1
        same = _same_text(data, row, first, MEDIUM) and _same_text(data, row, first, LOCALITY)
        return 0 if same else -1
    place = _place(data, rows, begin, number)
    if place >= 0 and is_store and store < 0:
        first[STORE_ROW] = number
    return place


@array_function
def leave_run(rows, begin, mark):
    """Undo what the rows from `mark` on said of the run that begins before them."""
    first = rows[begin]
    if first[STORE_ROW] >= mark:
        first[STORE_ROW] = -1
    while first[NUM_PLACES] > 1 and first[PLACE_ROWS + first[NUM_PLACES] - 1] >= mark:
        first[NUM_PLACES] -= 1
