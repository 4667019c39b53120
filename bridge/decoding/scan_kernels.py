"""Kernels that read the events of batches, row by row.

msgpack delimits itself, so an event that makes no sense is passed over and its neighbours are read; only a break in the
encoding itself ends the walk through its batch.
"""

from __future__ import annotations

import numpy as np
from numba import types

from bridge.decoding.batch_kernels import (
    AT,
    BATCH,
    BATCH_RANK,
    IS_OPEN,
    IS_RANK_BAD,
    LEFT,
    NUM_BAD_RANKS,
    NUM_HASHES,
    NUM_ROWS,
    NUM_TOKENS,
    RANK,
    RUN,
    find_rank,
    open_batch,
)
from bridge.decoding.event_rows import (
    BAD_STORE,
    CONTINUES,
    ENVELOPE,
    GROUP,
    HAS_PARENT,
    HASH_FROM,
    HASH_TO,
    KIND,
    NUM_COLUMNS,
    PARENT,
    REASON,
    REMOVED,
    SHAPE,
    START,
    STOP,
    STORED,
    TAG,
    TOKEN_FROM,
    TOKEN_TO,
    TRUNCATED,
    TYPE,
    UNREADABLE,
    fail,
)
from bridge.decoding.field_kernels import (
    EVENT_BORDERS,
    EVENT_MEANINGS,
    EVENT_TEXT,
    F_ENVELOPE,
    F_UNKNOWN,
    REMOVED_FIELDS,
    STORED_FIELDS,
    read_field,
    read_tag,
)
from bridge.decoding.msgpack_kernels import ARRAY, MAP, read_head, read_key, skip
from bridge.decoding.run_kernels import begin_run, join_run, leave_run, shape
from kv_events.kernels import array_function, array_kernel


@array_function
def _read_event(data, at, stop, row, hashes, tokens):
    """Fill a row. Place behind the event, or -1 with a reason."""
    form, value, at = read_head(data, at, stop)
    count = np.int64(value)
    if form == MAP:
        for _ in range(count):
            field, at = read_key(data, at, stop, EVENT_TEXT, EVENT_BORDERS, EVENT_MEANINGS, F_UNKNOWN)
            if at < 0:
                return fail(row, TRUNCATED)
            if row[KIND] == ENVELOPE:
                field = F_UNKNOWN  # another decoder's business
            at = read_field(data, at, stop, field, row, hashes, tokens)
            if at < 0:
                if _is_envelope(data, row[START], stop):
                    row[KIND] = ENVELOPE
                    return skip(data, row[START], stop)
                return -1
    elif form == ARRAY and count > 0:
        at = read_tag(data, at, stop, row)
        if at < 0:
            return -1
        fields = STORED_FIELDS if row[KIND] == STORED else REMOVED_FIELDS
        known = fields.shape[0] if row[KIND] == STORED or row[KIND] == REMOVED else 1
        for position in range(1, count):
            field = fields[position] if position < known else F_UNKNOWN
            at = read_field(data, at, stop, field, row, hashes, tokens)
            if at < 0:
                return -1
    else:
        return fail(row, TYPE)
    if row[KIND] == UNREADABLE:
        return fail(row, TAG)
    return at


@array_function
def _is_envelope(data, at, stop):
    """Whether an event in map form has an `event_type`: its other fields then need not be what we take them for."""
    _, count, at = read_head(data, at, stop)
    for _ in range(np.int64(count)):
        field, at = read_key(data, at, stop, EVENT_TEXT, EVENT_BORDERS, EVENT_MEANINGS, F_UNKNOWN)
        if at < 0:
            return False
        if field == F_ENVELOPE:
            return True
        at = skip(data, at, stop)
        if at < 0:
            return False
    return False


@array_function
def _read_row(data, stop, header, rows, hashes, tokens):
    """Read the next event into the next row, and move the header on."""
    row = rows[header[NUM_ROWS]]
    for column in range(NUM_COLUMNS):
        row[column] = 0
    row[KIND], row[GROUP], row[START] = UNREADABLE, -1, header[AT]
    row[HASH_FROM] = row[HASH_TO] = header[NUM_HASHES]
    row[TOKEN_FROM] = row[TOKEN_TO] = header[NUM_TOKENS]
    behind = _read_event(data, header[AT], stop, row, hashes, tokens)
    if behind < 0:
        row[KIND] = BAD_STORE if row[KIND] == STORED else UNREADABLE
        behind = skip(data, header[AT], stop)
    elif row[KIND] == STORED:
        row[SHAPE] = shape(row)
    elif row[KIND] == REMOVED:
        row[TOKEN_TO] = row[TOKEN_FROM]
    if row[KIND] <= REMOVED:
        header[NUM_HASHES], header[NUM_TOKENS] = row[HASH_TO], row[TOKEN_TO]
    header[LEFT] -= 1
    if behind < 0:
        row[KIND], row[REASON] = UNREADABLE, TRUNCATED  # with all events that were to follow
        header[LEFT], behind = 0, stop
    row[STOP] = header[AT] = behind


@array_function
def _put_in_run(data, header, rows, places):
    number = header[NUM_ROWS]
    place = join_run(data, rows, header[RUN], number) if number > 0 else -1
    rows[number][CONTINUES] = place >= 0
    if place < 0:
        begin_run(rows, number)
        header[RUN], place = number, 0
    places[number] = place


# --- entry point ----------------------------------------------------------------------------------------------------

_DATA = types.Array(types.uint8, 1, "C", readonly=True)
_I64, _U64, _U8 = types.int64[::1], types.uint64[::1], types.uint8[::1]


@array_kernel(types.boolean(_DATA, _I64, _I64, types.int64[:, ::1], _I64, _U64, _U8, _U8, _U8, _U64, types.uint32[::1]))
def scan_batches(data, borders, header, rows, lengths, parents, has_parent, is_removal, places, hashes, tokens):
    """Read events as far as they can be taken together: as many as there are rows, of batches of one rank.

    data: uint8, the payloads of b batches in a row. borders: int64[b + 1]. header: int64[13], zeros at first, moved on.
    rows: int64[n, 35], a row an event. lengths, parents, has_parent, is_removal, places: [n], columns of them: pages,
    block hash before the first one and whether it is meant, whether pages are removed, number of the medium in its run.
    hashes: uint64 and tokens: uint32, each one longer than all payloads, filled from the start; columns HASH_FROM ...
    point into them. False: the first batch is none; it is passed over.
    """
    num_batches, is_first = borders.shape[0] - 1, True
    header[RANK:] = 0
    while header[BATCH] < num_batches and header[NUM_ROWS] < rows.shape[0]:
        stop = borders[header[BATCH] + 1]
        if header[IS_OPEN] == 0 and not open_batch(data, borders[header[BATCH]], stop, header):
            header[BATCH] += is_first
            return not is_first
        mark, run = header[NUM_ROWS], header[RUN]
        while header[NUM_ROWS] < rows.shape[0] and header[LEFT] > 0:
            number = header[NUM_ROWS]
            _read_row(data, stop, header, rows, hashes, tokens)
            row = rows[number]
            lengths[number], is_removal[number] = row[HASH_TO] - row[HASH_FROM], row[KIND] == REMOVED
            parents[number], has_parent[number] = np.uint64(row[PARENT]), row[HAS_PARENT]
            _put_in_run(data, header, rows, places)
            header[NUM_ROWS] += 1
        find_rank(data, stop, header)
        if is_first:
            header[RANK] = header[BATCH_RANK]
        elif header[RANK] != header[BATCH_RANK]:  # another rank's: it is read again by the next call
            leave_run(rows, run, mark)
            header[NUM_ROWS], header[IS_OPEN] = mark, 0
            return True
        header[NUM_BAD_RANKS] += header[IS_RANK_BAD]
        header[IS_RANK_BAD], is_first = 0, False
        if header[LEFT] == 0:
            header[IS_OPEN] = 0
            header[BATCH] += 1
    return True
