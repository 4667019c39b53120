"""The kernel that applies the plain batches of many records at once, in the same way as `indexer.applier`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types

from indexer.kernels.apply import Pages, remove_pages, store_pages
from kv_events.digest import DIGEST_WORDS
from kv_events.kernels.batches import (
    DIGEST,
    END_EVENT,
    EPOCH,
    FIRST_EVENT,
    IS_REMOVAL,
    MEDIUM,
    NUM_CHAINS,
    NUM_PAGES,
    PAGES,
    SEQ,
    STARTS,
    TIME,
    BatchArrays,
)
from kv_events.kernels.bundles import (
    BoolVector,
    F64Vector,
    I64Matrix,
    I64Vector,
    U8Input,
    U8Vector,
    U64Matrix,
    reader,
    spread,
)
from kv_events.kernels.declare import array_function, array_helper, array_kernel
from kv_events.kernels.log_records import OFFSET, PARTITION, TIMESTAMP_MS
from kv_events.kernels.page_table import CAPACITY
from kv_events.kernels.page_table_ops import num_entries

NUM_STREAM_FIELDS = 14
(
    SPACE, NUMBER, LAST_EPOCH, NEXT_SEQ, HEARD_MS, LATEST_MS, AGREED_MS, MADE_AT,
    BATCHES, STORED, REMOVED, KNOWN, UNKNOWN, REFUSED,
) = range(NUM_STREAM_FIELDS)  # fmt: skip
"""Columns of streams. SPACE: row of the index in `PlainStreams.spaces`, or -1 if no batch of the stream can be applied
here. HEARD_MS: time of the last record applied; LATEST_MS: the latest time; AGREED_MS: HEARD_MS when the digests were
equal for the last time. MADE_AT: the time in the last batch, the bits of a float64. BATCHES to REFUSED are counted from
0."""

NUM_CLOCK_FIELDS = 6
NOW, LOG_READ_AT, RESUMED_AT, UNBROKEN_SINCE, LONGEST_PAUSE, LONGEST_UNBROKEN = range(NUM_CLOCK_FIELDS)
"""Columns of the clock: see `Replay.now` and `Freshness`. The last two: `Freshness.longest_pauses_s`."""

NOT_PLAIN, DIGEST_DIFFERS = range(2)
"""Why `apply_batches` ended early: the next record is not for it, or the view of the last one is not right after it."""

_read_pages = reader(Pages)


class PlainStreams(NamedTuple):
    """What is known about streams, by a number of their own."""

    spaces: U64Matrix
    """[indices, words] the resident `Pages` of each index."""
    streams: I64Matrix
    """[streams, NUM_STREAM_FIELDS]"""
    digests: U64Matrix
    """[streams, DIGEST_WORDS] digests of the views."""
    touched: I64Vector
    """[streams] written: the streams whose BATCHES are not 0."""
    offsets: I64Vector
    """[partitions] the offset after the highest one applied."""
    clock: F64Vector
    """[NUM_CLOCK_FIELDS] seconds."""
    no_marks: U8Vector
    """[0]"""


@array_function
def _is_next(stream, arrays, i, most_pages):
    """Return whether a batch is the next one of a stream and can be applied here."""
    batch = arrays.batches[i]
    if stream[SPACE] < 0 or batch[EPOCH] != stream[LAST_EPOCH] or batch[SEQ] != stream[NEXT_SEQ]:
        return False
    longest = np.int64(0)
    for event in range(batch[FIRST_EVENT], batch[END_EVENT]):
        longest = max(longest, arrays.events[event, NUM_PAGES])
    return longest <= most_pages


@array_helper
def _pass_time(clock, timestamp_ms):
    clock[NOW] = max(clock[NOW], timestamp_ms / 1000.0)
    pause_s = clock[NOW] - clock[LOG_READ_AT]
    if pause_s > clock[LONGEST_PAUSE]:
        clock[RESUMED_AT] = clock[NOW]
    if pause_s > clock[LONGEST_UNBROKEN]:
        clock[UNBROKEN_SINCE] = clock[NOW]
    clock[LOG_READ_AT] = max(clock[LOG_READ_AT], clock[NOW])


@array_helper
def _has_sets(pages):
    """See `OverlapIndex.store`."""
    table = pages.sets.table
    return 8 * (num_entries(table) - 1) <= 7 * (table.meta[CAPACITY] - 1)


@array_function
def _apply_event(pages, stream, digest, marks, data, event, words):
    """Apply a store or a removal. Returns the number of refused pages."""
    num_pages, at, tier = event[NUM_PAGES], event[PAGES], event[MEDIUM]
    hashes = words[at : at + num_pages]
    refused = num_pages
    if event[IS_REMOVAL] == 1:
        unknown, refused = remove_pages(pages, digest, marks, hashes, stream[NUMBER], tier, 0, num_pages)
        stream[UNKNOWN] += unknown
        stream[REMOVED] += num_pages - unknown - refused
    elif _has_sets(pages):
        starts = data[event[STARTS] : event[STARTS] + (num_pages + 7) // 8]
        parents = words[at + 2 * num_pages : at + 2 * num_pages + event[NUM_CHAINS]]
        known, refused = store_pages(pages, digest, marks, hashes, starts, parents, stream[NUMBER], tier, 0, num_pages)
        stream[KNOWN] += known
        stream[STORED] += num_pages - known - refused
    return refused


@array_function
def _equals_stated(digest, data, at):
    for i in range(DIGEST_WORDS):
        word = np.uint64(0)
        for k in range(8):
            word |= np.uint64(data[at + 8 * i + k]) << np.uint64(8 * k)
        if word != digest[i]:
            return False
    return True


@array_kernel(
    types.UniTuple(types.int64, 3), U8Input, I64Matrix, spread(BatchArrays), BoolVector, I64Vector,
    spread(PlainStreams), types.int64, types.int64, types.int64,
)  # fmt: skip
def apply_batches(data, rows, arrays, wanted, numbers, tracked, start, stop, most_pages):
    """Apply the wanted records of [start, stop), up to one that cannot be applied here.

    data, rows: as in `log_records.find_records`. arrays: from `decode_batches`. wanted: bool[n], records of events.
    numbers: [n] the stream of each record; -1: unknown. tracked: updated. most_pages: the longest event to apply here.

    Returns (the first record that was not applied, number of streams touched, why it ended).
    """
    num_touched = np.int64(0)
    for i in range(start, stop):
        if not wanted[i]:
            continue
        number, partition = numbers[i], rows[i, PARTITION]
        if arrays.plain[i] == 0 or number < 0 or partition >= tracked.offsets.shape[0]:
            return i, num_touched, NOT_PLAIN
        stream = tracked.streams[number]
        if not _is_next(stream, arrays, i, most_pages):
            return i, num_touched, NOT_PLAIN
        if stream[BATCHES] == 0:
            tracked.touched[num_touched] = number
            num_touched += 1
        stream[BATCHES] += 1
        stream[NEXT_SEQ] += 1
        stream[HEARD_MS] = rows[i, TIMESTAMP_MS]
        stream[LATEST_MS] = max(stream[LATEST_MS], rows[i, TIMESTAMP_MS])
        stream[MADE_AT] = arrays.batches[i, TIME]
        tracked.offsets[partition] = max(tracked.offsets[partition], rows[i, OFFSET] + 1)
        _pass_time(tracked.clock, rows[i, TIMESTAMP_MS])
        pages = _read_pages(tracked.spaces[stream[SPACE]])
        digest = tracked.digests[number]
        refused = np.int64(0)
        for event in range(arrays.batches[i, FIRST_EVENT], arrays.batches[i, END_EVENT]):
            refused += _apply_event(pages, stream, digest, tracked.no_marks, data, arrays.events[event], arrays.words)
        stream[REFUSED] += refused
        if refused > 0 or not _equals_stated(digest, data, arrays.batches[i, DIGEST]):
            return i + 1, num_touched, DIGEST_DIFFERS
        stream[AGREED_MS] = stream[HEARD_MS]
    return stop, num_touched, NOT_PLAIN
