"""Kernels that find the events and the rank of a batch, in any of its shapes."""

from __future__ import annotations

import numpy as np

from bridge.decoding.kernels.fields import F_UNKNOWN
from kv_events.kernels.declare import array_function
from kv_events.kernels.msgpack import ARRAY, BAD, MAP, NIL, POSITIVE, dictionary, read_head, read_key, skip
from kv_events.limits import MAX_ENGINE_EVENTS

# columns of the header for the current batch: its number, whether it was opened, position of the next event, events
# left, rank (-1: none), whether the rank was invalid, whether the rank follows the events
BATCH, IS_OPEN, AT, LEFT, BATCH_RANK, IS_RANK_BAD, RANK_FOLLOWS = range(7)
# columns for all batches that are read together: rank, batches with an invalid rank, rows, hashes, tokens, first row of
# the run
RANK, NUM_BAD_RANKS, NUM_ROWS, NUM_HASHES, NUM_TOKENS, RUN = range(7, 13)
NUM_HEADER = 13

_F_EVENTS, _F_RANK = 100, 101
_BATCH_TEXT, _BATCH_BORDERS, _BATCH_MEANINGS = dictionary(
    {"events": _F_EVENTS, "data_parallel_rank": _F_RANK, "attn_dp_rank": _F_RANK, "dp_rank": _F_RANK}
)
_MAX_RANK = np.uint64(2**31 - 1)


@array_function
def _take_rank(data, at, stop, header):
    kind, value, _ = read_head(data, at, stop)
    if kind == POSITIVE and value <= _MAX_RANK:
        header[BATCH_RANK] = np.int64(value)
    elif kind not in (NIL, BAD):
        header[IS_RANK_BAD] = 1


@array_function
def _take_events(data, at, stop, header):
    """Set the header to the first event. Returns whether the events are a list, and not too many."""
    kind, count, at = read_head(data, at, stop)
    header[AT], header[LEFT] = at, np.int64(count)
    return kind == ARRAY and count <= MAX_ENGINE_EVENTS


@array_function
def _open_map(data, at, stop, count, header):
    found = False
    for _ in range(count):
        field, at = read_key(data, at, stop, _BATCH_TEXT, _BATCH_BORDERS, _BATCH_MEANINGS, F_UNKNOWN)
        if at < 0:
            break
        if field == _F_EVENTS:
            found = _take_events(data, at, stop, header)
            if not found:
                break
        elif field == _F_RANK:
            _take_rank(data, at, stop, header)
        at = skip(data, at, stop)
        if at < 0:
            break
    return found


@array_function
def open_batch(data, at, stop, header):
    """Find the events and the rank of a batch.

    Returns False unless the batch is a map or an array of at least two elements, and has no more events than it may.
    """
    header[BATCH_RANK], header[IS_RANK_BAD], header[RANK_FOLLOWS], header[LEFT] = -1, 0, 0, 0
    form, value, at = read_head(data, at, stop)
    count = np.int64(value)
    if form == MAP:
        found = _open_map(data, at, stop, count, header)
    elif form == ARRAY and count >= 2:
        at = skip(data, at, stop)  # timestamp
        found = at >= 0 and _take_events(data, at, stop, header)
        header[RANK_FOLLOWS] = count > 2
    else:
        found = False
    header[IS_OPEN] = found
    return found


@array_function
def find_rank(data, stop, header):
    """Read the rank that follows the events, without consuming the events that are left."""
    if header[RANK_FOLLOWS] == 0:
        return
    header[RANK_FOLLOWS] = 0
    at = header[AT]
    for _ in range(header[LEFT]):
        at = skip(data, at, stop)
        if at < 0:
            return
    _take_rank(data, at, stop, header)
