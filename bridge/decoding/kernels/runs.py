"""Kernels that join adjacent events into a run.

All events of a run belong to one attention group. Its stores differ only in their pages and media. If the stores
contain only whole pages without pairs or extra keys, the run may also contain removals, and events of several tiers.
Events on a medium that no kernel knows join only their like. Clears form runs, and so do
events that are invalid for the same reason.
"""

from bridge.decoding.kernels import columns
from kv_events.kernels.bundles import I64Matrix, I64Vector, U8Input
from kv_events.kernels.declare import helper, inline_helper

# shapes of a store: whole pages; no tokens; a number of tokens that does not match the number of pages
WHOLE, TOKENLESS, UNEVEN = range(3)


@inline_helper
def shape(row: I64Vector) -> int:
    positions = row[columns.TOKEN_TO] - row[columns.TOKEN_FROM] - row[columns.PAIRS]
    if positions == 0:
        return TOKENLESS
    return WHOLE if positions == (row[columns.HASH_TO] - row[columns.HASH_FROM]) * row[columns.BLOCK_SIZE] else UNEVEN


@helper
def _same_text(data: U8Input, row: I64Vector, other: I64Vector, column: int) -> bool:
    length = row[column + 1]
    if length != other[column + 1]:
        return False
    i = 0
    while i < length and data[row[column] + i] == data[other[column] + i]:
        i += 1
    return i == length


@inline_helper
def _is_special(row: I64Vector) -> bool:
    return row[columns.SHAPE] == UNEVEN or row[columns.PAIRS] != 0 or row[columns.EXTRA_LENGTH] != 0


@helper
def _same_store(data: U8Input, row: I64Vector, other: I64Vector) -> bool:
    """Return whether two stores differ only in their pages and media."""
    if _is_special(row) or _is_special(other):
        return False
    for column in (columns.SHAPE, columns.BLOCK_SIZE, columns.LORA_ID, columns.WINDOW):
        if row[column] != other[column]:
            return False
    is_same = True
    for text in (columns.LORA, columns.SALT, columns.SPEC):
        is_same = is_same and _same_text(data, row, other, text)
    return is_same


@inline_helper
def _same_medium(data: U8Input, row: I64Vector, other: I64Vector) -> bool:
    """Return whether two events are of the same tier, or of the same medium if no kernel knows it."""
    if row[columns.TIER] != columns.UNKNOWN or other[columns.TIER] != columns.UNKNOWN:
        return row[columns.TIER] == other[columns.TIER]
    is_same = _same_text(data, row, other, columns.MEDIUM)
    return is_same and _same_text(data, row, other, columns.LOCALITY)


@helper
def joins_run(data: U8Input, rows: I64Matrix, begin: int, number: int) -> bool:
    """Return whether an event can be added to the run that begins at row `begin`."""
    row, first = rows[number], rows[begin]
    kind, first_kind = row[columns.KIND], first[columns.KIND]
    if kind == first_kind and (kind == columns.CLEARED or kind >= columns.UNREADABLE):
        return row[columns.REASON] == first[columns.REASON]
    if kind > columns.REMOVED or first_kind > columns.REMOVED or row[columns.GROUP] != first[columns.GROUP]:
        return False
    store, is_store = first[columns.STORE_ROW], kind == columns.STORED
    if is_store and (_is_special(row) if store < 0 else not _same_store(data, row, rows[store])):
        return False
    # whether all stores of the run, including this one, are whole pages
    is_whole = rows[store][columns.SHAPE] == WHOLE if store >= 0 else not is_store or row[columns.SHAPE] == WHOLE
    is_special = not is_whole or (store >= 0 and _is_special(rows[store]))
    if is_special or row[columns.TIER] == columns.UNKNOWN or first[columns.TIER] == columns.UNKNOWN:
        return is_store == (store >= 0) and _same_medium(data, row, first)
    return True
