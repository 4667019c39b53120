"""Kernels that join adjacent events into a run.

All events of a run belong to one attention group. Its stores differ only in their pages and locations. If the stores
contain only whole pages without pairs or extra keys, the run may also contain removals. Clears form runs, and so do
events that are invalid for the same reason.
"""

from __future__ import annotations

from bridge.decoding.kernels import columns
from kv_events.kernels.declare import array_function, array_helper

# shapes of a store: whole pages; no tokens; a number of tokens that does not match the number of pages
WHOLE, TOKENLESS, UNEVEN = range(3)


@array_helper
def shape(row):
    positions = row[columns.TOKEN_TO] - row[columns.TOKEN_FROM] - row[columns.PAIRS]
    if positions == 0:
        return TOKENLESS
    return WHOLE if positions == (row[columns.HASH_TO] - row[columns.HASH_FROM]) * row[columns.BLOCK_SIZE] else UNEVEN


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
    return row[columns.SHAPE] == UNEVEN or row[columns.PAIRS] != 0 or row[columns.EXTRA_LENGTH] != 0


@array_function
def _same_store(data, row, other):
    """Return whether two stores differ only in their pages and locations."""
    if _is_special(row) or _is_special(other):
        return False
    for column in (columns.SHAPE, columns.BLOCK_SIZE, columns.LORA_ID, columns.WINDOW):
        if row[column] != other[column]:
            return False
    is_same = True
    for text in (columns.LORA, columns.SALT, columns.SPEC):
        is_same = is_same and _same_text(data, row, other, text)
    return is_same


@array_function
def _location_index(data, rows, begin, number):
    """Return the index of an event's location in the run. A new location is added; -1 if there are too many."""
    first, row = rows[begin], rows[number]
    for index in range(first[columns.NUM_LOCATIONS]):
        named = rows[first[columns.LOCATION_ROWS + index]]
        if _same_text(data, row, named, columns.MEDIUM) and _same_text(data, row, named, columns.LOCALITY):
            return index
    if first[columns.NUM_LOCATIONS] == columns.MAX_LOCATIONS:
        return -1
    first[columns.LOCATION_ROWS + first[columns.NUM_LOCATIONS]] = number
    first[columns.NUM_LOCATIONS] += 1
    return first[columns.NUM_LOCATIONS] - 1


@array_function
def begin_run(rows, number):
    row = rows[number]
    row[columns.STORE_ROW] = number if row[columns.KIND] == columns.STORED else -1
    row[columns.NUM_LOCATIONS], row[columns.LOCATION_ROWS] = 1, number


@array_function
def join_run(data, rows, begin, number):
    """Add an event to the run that begins at row `begin`. Returns its location's index, or -1 if it does not fit."""
    row, first = rows[number], rows[begin]
    kind, first_kind = row[columns.KIND], first[columns.KIND]
    if kind == first_kind and (kind == columns.CLEARED or kind >= columns.UNREADABLE):
        return 0 if row[columns.REASON] == first[columns.REASON] else -1
    if kind > columns.REMOVED or first_kind > columns.REMOVED or row[columns.GROUP] != first[columns.GROUP]:
        return -1
    store, is_store = first[columns.STORE_ROW], kind == columns.STORED
    if is_store and (_is_special(row) if store < 0 else not _same_store(data, row, rows[store])):
        return -1
    # whether all stores of the run, including this one, are whole pages
    is_whole = rows[store][columns.SHAPE] == WHOLE if store >= 0 else not is_store or row[columns.SHAPE] == WHOLE
    if not is_whole or (store >= 0 and _is_special(rows[store])):
        if not is_store or store < 0 or first[columns.NUM_LOCATIONS] > 1:
            return -1
        same = _same_text(data, row, first, columns.MEDIUM) and _same_text(data, row, first, columns.LOCALITY)
        return 0 if same else -1
    index = _location_index(data, rows, begin, number)
    if index >= 0 and is_store and store < 0:
        first[columns.STORE_ROW] = number
    return index


@array_function
def leave_run(rows, begin, mark):
    """Remove the rows starting at `mark` from the run that begins before them."""
    first = rows[begin]
    if first[columns.STORE_ROW] >= mark:
        first[columns.STORE_ROW] = -1
    while first[columns.NUM_LOCATIONS] > 1 and first[columns.LOCATION_ROWS + first[columns.NUM_LOCATIONS] - 1] >= mark:
        first[columns.NUM_LOCATIONS] -= 1
