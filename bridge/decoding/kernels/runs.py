"""Kernels that join adjacent events into a run.

All events of a run belong to one attention group. Its stores differ only in their pages and locations. If the stores
contain only whole pages without pairs or extra keys, the run may also contain removals. Clears form runs, and so do
events that are invalid for the same reason.
"""

from __future__ import annotations

from bridge.decoding.kernels.rows import (
    BLOCK_SIZE,
    CLEARED,
    EXTRA_LENGTH,
    GROUP,
    HASH_FROM,
    HASH_TO,
    KIND,
    LOCALITY,
    LOCATION_ROWS,
    LORA,
    LORA_ID,
    MAX_LOCATIONS,
    MEDIUM,
    NUM_LOCATIONS,
    PAIRS,
    REASON,
    REMOVED,
    SALT,
    SHAPE,
    SPEC,
    STORE_ROW,
    STORED,
    TOKEN_FROM,
    TOKEN_TO,
    UNREADABLE,
    WINDOW,
)
from kv_events.kernels.declare import array_function, array_helper

# shapes of a store: whole pages; no tokens; a number of tokens that does not match the number of pages
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
    """Return whether two stores differ only in their pages and locations."""
    if _is_special(row) or _is_special(other) or row[SHAPE] != other[SHAPE]:
        return False
    if row[BLOCK_SIZE] != other[BLOCK_SIZE] or row[LORA_ID] != other[LORA_ID] or row[WINDOW] != other[WINDOW]:
        return False
    return (
        _same_text(data, row, other, LORA) and _same_text(data, row, other, SALT) and _same_text(data, row, other, SPEC)
    )


@array_function
def _location_index(data, rows, begin, number):
    """Return the index of an event's location in the run. A new location is added; -1 if there are too many."""
    first, row = rows[begin], rows[number]
    for index in range(first[NUM_LOCATIONS]):
        named = rows[first[LOCATION_ROWS + index]]
        if _same_text(data, row, named, MEDIUM) and _same_text(data, row, named, LOCALITY):
            return index
    if first[NUM_LOCATIONS] == MAX_LOCATIONS:
        return -1
    first[LOCATION_ROWS + first[NUM_LOCATIONS]] = number
    first[NUM_LOCATIONS] += 1
    return first[NUM_LOCATIONS] - 1


@array_function
def begin_run(rows, number):
    row = rows[number]
    row[STORE_ROW] = number if row[KIND] == STORED else -1
    row[NUM_LOCATIONS], row[LOCATION_ROWS] = 1, number


@array_function
def join_run(data, rows, begin, number):
    """Add an event to the run that begins at row `begin`. Returns its location's index, or -1 if it does not fit."""
    row, first = rows[number], rows[begin]
    if row[KIND] == first[KIND] and (row[KIND] == CLEARED or row[KIND] >= UNREADABLE):
        return 0 if row[REASON] == first[REASON] else -1
    if row[KIND] > REMOVED or first[KIND] > REMOVED or row[GROUP] != first[GROUP]:
        return -1
    store, is_store = first[STORE_ROW], row[KIND] == STORED
    if is_store and (_is_special(row) if store < 0 else not _same_store(data, row, rows[store])):
        return -1
    # whether all stores of the run, including this one, are whole pages
    is_whole = rows[store][SHAPE] == WHOLE if store >= 0 else not is_store or row[SHAPE] == WHOLE
    if not is_whole or (store >= 0 and _is_special(rows[store])):
        if not is_store or store < 0 or first[NUM_LOCATIONS] > 1:
            return -1
        same = _same_text(data, row, first, MEDIUM) and _same_text(data, row, first, LOCALITY)
        return 0 if same else -1
    index = _location_index(data, rows, begin, number)
    if index >= 0 and is_store and store < 0:
        first[STORE_ROW] = number
    return index


@array_function
def leave_run(rows, begin, mark):
    """Remove the rows starting at `mark` from the run that begins before them."""
    first = rows[begin]
    if first[STORE_ROW] >= mark:
        first[STORE_ROW] = -1
    while first[NUM_LOCATIONS] > 1 and first[LOCATION_ROWS + first[NUM_LOCATIONS] - 1] >= mark:
        first[NUM_LOCATIONS] -= 1
