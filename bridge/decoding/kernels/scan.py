"""Kernels that read the events of batches into rows.

msgpack values are self-delimiting, so the kernels skip an invalid event and continue with the next one. Only a broken
encoding ends the batch.
"""

from __future__ import annotations

import numpy as np
from numba import types

from bridge.decoding.kernels.batches import (
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
from bridge.decoding.kernels.fields import (
    EVENT_BORDERS,
    EVENT_MEANINGS,
    EVENT_TEXT,
    F_EVENT_TYPE,
    F_UNKNOWN,
    REMOVED_FIELDS,
    STORED_FIELDS,
    read_field,
    read_tag,
)
from bridge.decoding.kernels.rows import (
    BAD_STORE,
    CONTINUES,
    GROUP,
    HAS_PARENT,
    HASH_FROM,
    HASH_TO,
    KIND,
    MOONCAKE_EVENT,
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
    ScannedEvents,
    fail,
)
from bridge.decoding.kernels.runs import begin_run, join_run, leave_run, shape
from kv_events.kernels.bundles import I64Vector, U8Input
from kv_events.kernels.declare import array_function, array_helper, array_kernel
from kv_events.kernels.msgpack import ARRAY, MAP, read_head, read_key, skip
from kv_events.limits import MAX_ENGINE_PAGES

_MAX_RUNS = 64
"""Bound on the runs of one call. Each costs Python some microseconds, up to about 200."""


@array_helper
def _is_short(header, num_runs):
    """Return whether one call may read more events: what it reads is applied in one step."""
    return num_runs < _MAX_RUNS and header[NUM_HASHES] < MAX_ENGINE_PAGES


@array_helper
def _read_event(data, at, stop, row, hashes, tokens):
    """Read an event into a row. Returns the position after it, or -1 with a reason in the row."""
    form, value, at = read_head(data, at, stop)
    count = np.int64(value)
    if form == MAP:
        for _ in range(count):
            field, at = read_key(data, at, stop, EVENT_TEXT, EVENT_BORDERS, EVENT_MEANINGS, F_UNKNOWN)
            if at < 0:
                return fail(row, TRUNCATED)
            if row[KIND] == MOONCAKE_EVENT:
                field = F_UNKNOWN  # msgspec decodes its other fields
            at = read_field(data, at, stop, field, row, hashes, tokens)
            if at < 0:
                if _is_mooncake_event(data, row[START], stop):
                    row[KIND] = MOONCAKE_EVENT
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
def _is_mooncake_event(data, at, stop):
    """Return whether an event in map form has an `event_type`. Its other fields then have a different meaning."""
    _, count, at = read_head(data, at, stop)
    for _ in range(np.int64(count)):
        field, at = read_key(data, at, stop, EVENT_TEXT, EVENT_BORDERS, EVENT_MEANINGS, F_UNKNOWN)
        if at < 0:
            return False
        if field == F_EVENT_TYPE:
            return True
        at = skip(data, at, stop)
        if at < 0:
            return False
    return False


@array_helper
def _read_row(data, stop, header, rows, hashes, tokens):
    """Read the next event into the next row, and advance the header."""
    row = rows[header[NUM_ROWS]]
    for column in range(NUM_COLUMNS):
        row[column] = 0
    row[KIND], row[GROUP], row[START] = UNREADABLE, -1, header[AT]
    row[HASH_FROM] = row[HASH_TO] = header[NUM_HASHES]
    row[TOKEN_FROM] = row[TOKEN_TO] = header[NUM_TOKENS]
    end = _read_event(data, header[AT], stop, row, hashes, tokens)
    if end < 0:
        row[KIND] = BAD_STORE if row[KIND] == STORED else UNREADABLE
        end = skip(data, header[AT], stop)
    elif row[KIND] == STORED:
        row[SHAPE] = shape(row)
    elif row[KIND] == REMOVED:
        row[TOKEN_TO] = row[TOKEN_FROM]
    if row[KIND] <= REMOVED:
        header[NUM_HASHES], header[NUM_TOKENS] = row[HASH_TO], row[TOKEN_TO]
    header[LEFT] -= 1
    if end < 0:
        row[KIND], row[REASON] = UNREADABLE, TRUNCATED  # all events after it are unreadable, too
        header[LEFT], end = 0, stop
    row[STOP] = header[AT] = end


@array_helper
def _put_in_run(data, header, rows, location_indices):
    """Add the newest row to the current run, or begin a new run with it. Returns whether it begins one."""
    number = header[NUM_ROWS]
    index = join_run(data, rows, header[RUN], number) if number > 0 else -1
    rows[number][CONTINUES] = index >= 0
    if index < 0:
        begin_run(rows, number)
        header[RUN], index = number, 0
    location_indices[number] = index
    return rows[number][CONTINUES] == 0


# --- entry point ----------------------------------------------------------------------------------------------------


@array_kernel(types.boolean, U8Input, I64Vector, I64Vector, ScannedEvents)
def scan_batches(data, borders, header, out):
    """Read the next events of consecutive batches of one rank, until `out` is full, or they have many runs or pages.

    data: uint8, the concatenated payloads of b batches. borders: int64[b + 1]. header: int64[13], initially zeros; the
    kernel advances it. Returns False if the first payload is not a batch; that payload is skipped.
    """
    rows = out.rows
    num_batches, is_first, num_runs = borders.shape[0] - 1, True, 0
    header[RANK:] = 0
    while header[BATCH] < num_batches and header[NUM_ROWS] < rows.shape[0] and _is_short(header, num_runs):
        stop = borders[header[BATCH] + 1]
        if header[IS_OPEN] == 0 and not open_batch(data, borders[header[BATCH]], stop, header):
            header[BATCH] += is_first
            return not is_first
        mark, run = header[NUM_ROWS], header[RUN]
        while header[NUM_ROWS] < rows.shape[0] and header[LEFT] > 0 and _is_short(header, num_runs):
            number = header[NUM_ROWS]
            _read_row(data, stop, header, rows, out.hashes, out.tokens)
            row = rows[number]
            out.lengths[number], out.is_removal[number] = row[HASH_TO] - row[HASH_FROM], row[KIND] == REMOVED
            out.parents[number], out.has_parent[number] = np.uint64(row[PARENT]), row[HAS_PARENT]
            num_runs += _put_in_run(data, header, rows, out.location_indices)
            header[NUM_ROWS] += 1
        find_rank(data, stop, header)
        if is_first:
            header[RANK] = header[BATCH_RANK]
        elif header[RANK] != header[BATCH_RANK]:  # another rank: the next call reads the batch again
            leave_run(rows, run, mark)
            header[NUM_ROWS], header[IS_OPEN] = mark, 0
            return True
        header[NUM_BAD_RANKS] += header[IS_RANK_BAD]
        header[IS_RANK_BAD], is_first = 0, False
        if header[LEFT] == 0:
            header[IS_OPEN] = 0
            header[BATCH] += 1
    return True
