"""Open-addressing table: 64-bit page name -> dense entry id, as numba kernels on flat arrays.

Both sides keep one: the index under sequence hashes, a publisher's ledger under block hashes. Entry ids are small,
stable integers; the owner keeps its own columns indexed by them. Ids are handed out in the order of arrival, so that
the pages of one prompt tend to lie next to each other and a walk along a prompt reads memory in sequence.

Layout: *extendible hashing* (Fagin et al., 1979). A directory maps the low bits of a key's tag to a segment of 4096
slots; a segment that fills up is split in two, so growth never costs more than one segment at a time. A slot is
`tag << 32 | id + 1`, 0 when empty: tags alone decide nearly every comparison; splitting or removing needs no look at
the keys. Eight slots, a cache line, are a *bucket*, and compared at once. The high bits of a tag say which is a key's
home; what finds it full goes into the next one that is not, so a search ends at a bucket with room, mostly the first.
Arrays are reserved at their bound and touched (so: paid for) only as far as they are used.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import types

from kv_events.errors import InvalidValueError
from kv_events.instructions import NUM_LANES, lanes_equal, lowest_bit, prefetch
from kv_events.kernels import array_function, array_helper

_SEGMENT_BITS = 12
_SEGMENT_SLOTS = 1 << _SEGMENT_BITS
_SLOT_MASK = _SEGMENT_SLOTS - 1
_SPLIT_AT = _SEGMENT_SLOTS * 85 // 100
_HOME_BITS = _SEGMENT_BITS - (NUM_LANES - 1).bit_length()
_MAX_DEPTH = 32 - _HOME_BITS  # directory bits and those of the home bucket together are the 32 bits of a tag

_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: spreads keys that are not hashes, too
_ONE = np.uint64(1)
_LOW32 = np.uint64(0xFFFFFFFF)
_SHIFT32 = np.uint64(32)
_HIGH32 = ~_LOW32
_ALL = ~np.uint64(0)
_EMPTY = np.uint64(0)
_SHIFT_HOME = np.uint64(32 - _HOME_BITS)

# columns of segments
_BITS, _COUNT = range(2)
# columns of meta
_DEPTH, _NUM_SEGMENTS, _HIGH_WATER, _NUM_FREE, _FREE_HEAD, _FREE_TAIL, _CAPACITY = range(7)

MAX_CAPACITY = 2**31


class Table(NamedTuple):
    """Arrays of one table; pass it to the kernels, never touch them from elsewhere."""

    keys: npt.NDArray[np.uint64]
    """[capacity + 1] key of each live entry; a freed entry holds the id of the next free one. The last element is never
    used: whoever looks at an entry's neighbour stays inside."""
    directory: npt.NDArray[np.uint32]
    """[2**max_depth] segment number for each value of a tag's low bits."""
    slots: npt.NDArray[np.uint64]
    """[(segments + 1) * 4096] tag << 32 | id + 1, or 0; eight a bucket. Behind the last segment: scratch for a split."""
    segments: npt.NDArray[np.uint32]
    """[segments, 2] number of tag bits that all keys of a segment share; number of used slots."""
    meta: npt.NDArray[np.int64]
    """[7] see the column numbers above."""


TABLE_ARRAYS = (
    types.Array(types.uint64, 1, "C"),
    types.Array(types.uint32, 1, "C"),
    types.Array(types.uint64, 1, "C"),
    types.Array(types.uint32, 2, "C"),
    types.Array(types.int64, 1, "C"),
)
"""numba types of a `Table`'s arrays. Kernels called from Python take them one by one and build the `Table` inside:
numba finds the type of a bare array in 40 ns, that of a named tuple in microseconds."""


def make_table(capacity: int) -> Table:
    """An empty table for at most `capacity` live entries. Reserves address space, not memory."""
    if not 1 <= capacity <= MAX_CAPACITY:
        raise InvalidValueError("capacity", capacity, f"1 .. {MAX_CAPACITY}")
    # a segment holds at least half of _SPLIT_AT on average after a split; twice that again leaves room for skew
    num_segments = max(4, 4 * capacity // _SPLIT_AT)
    max_depth = min(_MAX_DEPTH, max(4, (2 * num_segments - 1).bit_length()))
    meta = np.zeros(7, np.int64)
    meta[_CAPACITY] = capacity
    _reset_meta(meta)
    return Table(
        keys=np.zeros(capacity + 1, np.uint64),
        directory=np.zeros(1 << max_depth, np.uint32),
        slots=_zeros_in_lines((num_segments + 1) * _SEGMENT_SLOTS),
        segments=np.zeros((num_segments, 2), np.uint32),
        meta=meta,
    )


def _zeros_in_lines(length: int) -> npt.NDArray[np.uint64]:
    """uint64[length] that begins where a cache line begins."""
    zeros = np.zeros(length + NUM_LANES, np.uint64)
    first = -zeros.ctypes.data % (8 * NUM_LANES) // 8
    return zeros[first : first + length]


def num_live(table: Table) -> int:
    """Entries in use."""
    return int(table.meta[_HIGH_WATER] - table.meta[_NUM_FREE])


def high_water(table: Table) -> int:
    """Entry ids ever handed out are smaller than this: the length up to which an owner's columns are used."""
    return int(table.meta[_HIGH_WATER])


def capacity(table: Table) -> int:
    """Largest number of live entries."""
    return int(table.meta[_CAPACITY])


def limit(table: Table, capacity: int) -> None:
    """Lower the largest number of live entries for good; the ones that are there stay."""
    table.meta[_CAPACITY] = min(capacity, table.meta[_CAPACITY])


def bytes_used(table: Table) -> int:
    """Bytes of the arrays' used parts."""
    segments = int(table.meta[_NUM_SEGMENTS])
    return (
        high_water(table) * 8 + (4 << int(table.meta[_DEPTH])) + segments * (_SEGMENT_SLOTS + 1) * 8 + table.meta.nbytes
    )


@array_helper
def _tag(key):
    mixed = (key ^ (key >> _SHIFT32)) * _MIX
    return mixed >> _SHIFT32


@array_helper
def _segment_of(table, tag):
    return np.int64(table.directory[np.int64(tag) & ((1 << table.meta[_DEPTH]) - 1)])


@array_helper
def _home(tag):
    """First slot of the bucket, within the segment, where a search begins."""
    return np.int64(tag >> _SHIFT_HOME) * NUM_LANES


@array_helper
def _next(bucket):
    return (bucket + NUM_LANES) & _SLOT_MASK


@array_helper
def _empty_slots(table, place):
    """Those of the bucket that begins at a place, as bits."""
    return lanes_equal(table.slots, place, _ALL, _EMPTY)


@array_helper
def _same_slots(table, place, tag, empty):
    """Slots of a bucket that may be a key's, as bits; its empty ones are given."""
    return lanes_equal(table.slots, place, _HIGH32, tag << _SHIFT32) & ~empty


@array_helper
def find(table, key):
    """Entry id of a key, or -1."""
    tag = _tag(key)
    base, bucket = _segment_of(table, tag) * _SEGMENT_SLOTS, _home(tag)
    while True:
        empty = _empty_slots(table, base + bucket)
        same = _same_slots(table, base + bucket, tag, empty)
        while same != 0:
            entry = np.int64(table.slots[base + bucket + lowest_bit(same)] & _LOW32) - 1
            if table.keys[entry] == key:
                return entry
            same &= same - _ONE
        if empty != 0:
            return np.int64(-1)
        bucket = _next(bucket)


AHEAD = 8
"""How many keys before its turn `fetch` is best called: a key's work takes tens of nanoseconds, memory a hundred."""


@array_helper
def fetch(table, key):
    """Have the memory that `find` or `insert` of a key begins with brought near meanwhile."""
    tag = _tag(key)
    prefetch(table.slots, _segment_of(table, tag) * _SEGMENT_SLOTS + _home(tag))


@array_helper
def was_used(table, entry):
    """Whether an id was handed out since the last clear: below it, an owner's columns mean something."""
    return entry < table.meta[_HIGH_WATER]


@array_function
def _place(table, segment, word):
    base, bucket = segment * _SEGMENT_SLOTS, _home(word >> _SHIFT32)
    empty = _empty_slots(table, base + bucket)
    while empty == 0:
        bucket = _next(bucket)
        empty = _empty_slots(table, base + bucket)
    table.slots[base + bucket + lowest_bit(empty)] = word
    table.segments[segment, _COUNT] += np.uint32(1)


@array_function
def _split(table, segment):
    """Spread a segment over itself and a new one by the next tag bit. False: no room, or no bit left."""
    depth = np.int64(table.segments[segment, _BITS])
    fresh = table.meta[_NUM_SEGMENTS]
    if fresh == table.segments.shape[0]:
        return False
    if depth == table.meta[_DEPTH]:
        size = 1 << depth
        if 2 * size > table.directory.shape[0]:
            return False
        for i in range(size):
            table.directory[size + i] = table.directory[i]
        table.meta[_DEPTH] += 1
    table.meta[_NUM_SEGMENTS] += 1
    table.segments[segment, _BITS] = table.segments[fresh, _BITS] = np.uint32(depth + 1)
    table.slots[fresh * _SEGMENT_SLOTS : (fresh + 1) * _SEGMENT_SLOTS] = np.uint64(0)  # a clear leaves old words there
    base, scratch = segment * _SEGMENT_SLOTS, table.segments.shape[0] * _SEGMENT_SLOTS
    for i in range(_SEGMENT_SLOTS):
        table.slots[scratch + i] = table.slots[base + i]
        table.slots[base + i] = np.uint64(0)
    bit = np.uint64(1) << np.uint64(32 + depth)
    pattern = np.int64(-1)
    table.segments[segment, _COUNT] = np.uint32(0)
    for i in range(_SEGMENT_SLOTS):
        word = table.slots[scratch + i]
        if word != np.uint64(0):
            pattern = np.int64(word >> _SHIFT32)
            _place(table, fresh if word & bit else segment, word)
    first = (pattern & ((1 << depth) - 1)) | (1 << depth)
    for i in range(first, 1 << table.meta[_DEPTH], 1 << (depth + 1)):
        table.directory[i] = np.uint32(fresh)
    return True


@array_helper
def _new_entry(table, key):
    """Entry id for a key, the oldest free one first."""
    entry = table.meta[_FREE_HEAD]
    if entry >= 0:
        table.meta[_NUM_FREE] -= 1
        table.meta[_FREE_HEAD] = np.int64(table.keys[entry]) if table.meta[_NUM_FREE] > 0 else np.int64(-1)
    else:
        entry = table.meta[_HIGH_WATER]
        table.meta[_HIGH_WATER] += 1
    table.keys[entry] = key
    return entry


@array_helper
def num_entries(table):
    """`num_live` inside a kernel."""
    return table.meta[_HIGH_WATER] - table.meta[_NUM_FREE]


@array_helper
def _is_full(table):
    return num_entries(table) >= table.meta[_CAPACITY]


@array_function
def insert(table, key):
    """Give an absent key an entry. Returns its id, or -1 when the table is full."""
    if _is_full(table):
        return np.int64(-1)
    tag = _tag(key)
    segment = _segment_of(table, tag)
    while table.segments[segment, _COUNT] >= _SPLIT_AT:
        if not _split(table, segment):
            if table.segments[segment, _COUNT] >= _SEGMENT_SLOTS - 1:
                return np.int64(-1)
            break
        segment = _segment_of(table, tag)
    entry = _new_entry(table, key)
    _place(table, segment, tag << _SHIFT32 | np.uint64(entry + 1))
    return entry


@array_helper
def find_or_insert(table, key):
    """(entry id, whether the key was absent); id -1: it was, and there is no room. One walk for both."""
    tag = _tag(key)
    segment = _segment_of(table, tag)
    base, bucket = segment * _SEGMENT_SLOTS, _home(tag)
    entry, is_new = np.int64(-1), True
    while True:
        empty = _empty_slots(table, base + bucket)
        same = _same_slots(table, base + bucket, tag, empty)
        while same != 0 and is_new:
            entry = np.int64(table.slots[base + bucket + lowest_bit(same)] & _LOW32) - 1
            is_new = table.keys[entry] != key
            same &= same - _ONE
        if empty != 0 or not is_new:
            break
        bucket = _next(bucket)
    if is_new:
        if table.segments[segment, _COUNT] >= _SPLIT_AT or _is_full(table):
            entry = insert(table, key)
        else:
            entry = _new_entry(table, key)
            table.slots[base + bucket + lowest_bit(empty)] = tag << _SHIFT32 | np.uint64(entry + 1)
            table.segments[segment, _COUNT] += np.uint32(1)
    return entry, is_new


@array_function
def _refill(table, base, bucket, hole):
    """A slot of a bucket became empty, and it is the only one: give it to a key that passed over the full bucket, if
    there is one; and so on with the bucket that this one lay in.
    """
    other, is_over = _next(bucket), False
    while not is_over:
        empty = _empty_slots(table, base + other)
        passed = np.uint64(0)
        for i in range(NUM_LANES):
            home = _home(table.slots[base + other + i] >> _SHIFT32)
            has_passed = ((other - home) & _SLOT_MASK) >= ((other - bucket) & _SLOT_MASK)
            passed |= np.uint64(has_passed) << np.uint64(i)
        passed &= ~empty
        if passed != 0:
            slot = other + lowest_bit(passed)
            table.slots[base + hole], table.slots[base + slot] = table.slots[base + slot], _EMPTY
            bucket, hole = other, slot
        is_over = empty != 0  # nobody passed over a bucket with room
        other = _next(other)


@array_helper
def remove(table, entry):
    """Free a live entry; its id goes to the end of the queue of free ids."""
    tag = _tag(table.keys[entry])
    segment = _segment_of(table, tag)
    base, bucket = segment * _SEGMENT_SLOTS, _home(tag)
    word = tag << _SHIFT32 | np.uint64(entry + 1)
    found = lanes_equal(table.slots, base + bucket, _ALL, word)
    while found == 0:
        bucket = _next(bucket)
        found = lanes_equal(table.slots, base + bucket, _ALL, word)
    hole = bucket + lowest_bit(found)
    was_full = _empty_slots(table, base + bucket) == 0
    table.slots[base + hole] = _EMPTY
    if was_full:
        _refill(table, base, bucket, hole)
    table.segments[segment, _COUNT] -= np.uint32(1)
    if table.meta[_FREE_HEAD] < 0:
        table.meta[_FREE_HEAD] = entry
    else:
        table.keys[table.meta[_FREE_TAIL]] = np.uint64(entry)
    table.meta[_FREE_TAIL] = entry
    table.meta[_NUM_FREE] += 1


def clear(table: Table) -> None:
    """Remove every entry. Costs microseconds: a segment's slots are wiped when it is used again."""
    table.slots[:_SEGMENT_SLOTS] = 0
    table.segments[: int(table.meta[_NUM_SEGMENTS])] = 0
    table.directory[: 1 << int(table.meta[_DEPTH])] = 0
    _reset_meta(table.meta)


def _reset_meta(meta: npt.NDArray[np.int64]) -> None:
    capacity = meta[_CAPACITY]
    meta[:] = 0
    meta[_NUM_SEGMENTS] = 1
    meta[_FREE_HEAD] = meta[_FREE_TAIL] = -1
    meta[_CAPACITY] = capacity


def check(table: Table) -> None:
    """Recount everything from scratch. Raises AssertionError with both figures."""
    used = table.slots[: int(table.meta[_NUM_SEGMENTS]) * _SEGMENT_SLOTS]
    words = used[used != 0]
    entries = (words & _LOW32).astype(np.int64) - 1
    if len(entries) != num_live(table) or len(np.unique(entries)) != len(entries):
        raise AssertionError(f"{len(entries)} slots, {len(np.unique(entries))} ids, {num_live(table)} live entries")
    counts = (used.reshape(-1, _SEGMENT_SLOTS) != 0).sum(axis=1)
    stated = table.segments[: len(counts), _COUNT]
    if not np.array_equal(counts, stated):
        raise AssertionError(f"segments hold {counts.tolist()}, counted {stated.tolist()}")
    free, entry = set(), int(table.meta[_FREE_HEAD])
    for _ in range(int(table.meta[_NUM_FREE])):
        free.add(entry)
        entry = int(table.keys[entry])
    if len(free) != int(table.meta[_NUM_FREE]) or free & set(entries.tolist()):
        raise AssertionError(f"{len(free)} distinct free ids of {int(table.meta[_NUM_FREE])}, some of them live")
