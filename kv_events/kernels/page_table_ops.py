"""Kernels that find, insert and remove keys of a `page_table`. They use arrays only, no Python objects."""

from kv_events.kernels.declare import helper, inline_helper
from kv_events.kernels.instructions import NUM_LANES, lanes_equal, lowest_bit, prefetch, upper_product
from kv_events.kernels.numbers import U64, int64, uint32, uint64
from kv_events.kernels.page_table import (
    BITS,
    CAPACITY,
    COUNT,
    DEPTH,
    FREE_HEAD,
    FREE_TAIL,
    HIGH_WATER,
    HOME_BITS,
    LONGEST_WALK,
    LOW32,
    NUM_FREE,
    NUM_SEGMENTS,
    SECRET,
    SEGMENT_SLOTS,
    SPLIT_AT,
    Table,
)

_ONE = uint64(1)
_SHIFT32 = uint64(32)
_HIGH32 = ~LOW32
_ALL = ~uint64(0)
_EMPTY = uint64(0)
_SHIFT_HOME = uint64(32 - HOME_BITS)
_SLOT_MASK = SEGMENT_SLOTS - 1


@inline_helper
def _tag(table: Table, key: U64) -> U64:
    return upper_product(key, table.meta[SECRET], table.meta[SECRET + 1]) >> _SHIFT32


@inline_helper
def _segment_of(table: Table, tag: U64) -> int:
    return int64(table.directory[int64(tag) & ((1 << table.meta[DEPTH]) - 1)])


@inline_helper
def _home(tag: U64) -> int:
    """Return the first slot of a tag's home bucket, relative to the segment."""
    return int64(tag >> _SHIFT_HOME) * NUM_LANES


@inline_helper
def _next(bucket: int) -> int:
    return (bucket + NUM_LANES) & _SLOT_MASK


@inline_helper
def _empty_slots(table: Table, place: int) -> U64:
    """Return the empty slots of the bucket that begins at slot `place`, as bits."""
    return lanes_equal(table.slots, place, _ALL, _EMPTY)


@inline_helper
def _same_slots(table: Table, place: int, tag: U64, empty: U64) -> U64:
    """Return the slots of a bucket that have a tag, as bits. empty: the bucket's empty slots, as bits."""
    return lanes_equal(table.slots, place, _HIGH32, tag << _SHIFT32) & ~empty


@inline_helper
def find(table: Table, key: U64) -> int:
    """Return the entry id of a key, or -1."""
    tag = _tag(table, key)
    base, bucket = _segment_of(table, tag) * SEGMENT_SLOTS, _home(tag)
    while True:
        empty = _empty_slots(table, base + bucket)
        same = _same_slots(table, base + bucket, tag, empty)
        while same != 0:
            entry = int64(table.slots[base + bucket + lowest_bit(same)] & LOW32) - 1
            if table.keys[entry] == key:
                return entry
            same &= same - _ONE
        if empty != 0:
            return int64(-1)
        bucket = _next(bucket)


AHEAD = 8
"""Distance in keys at which to call `fetch`: a key takes tens of nanoseconds, a read from memory about a hundred."""


@inline_helper
def fetch(table: Table, key: U64) -> None:
    """Prefetch the memory that `find` and `insert` of a key read first."""
    tag = _tag(table, key)
    prefetch(table.slots, _segment_of(table, tag) * SEGMENT_SLOTS + _home(tag))


@inline_helper
def was_used(table: Table, entry: int) -> bool:
    """Return whether an id was assigned since the last clear, so that the owner's columns are valid for it."""
    return entry < table.meta[HIGH_WATER]


@inline_helper
def _vacancy(table: Table, segment: int, tag: U64) -> int:
    """Return the first bucket that is not full from the home bucket on, relative to the segment."""
    bucket = _home(tag)
    while _empty_slots(table, segment * SEGMENT_SLOTS + bucket) == 0:
        bucket = _next(bucket)
    return bucket


@inline_helper
def _is_far(bucket: int, tag: U64) -> bool:
    """Return whether a bucket is too far from the home bucket for a new key."""
    return ((bucket - _home(tag)) & _SLOT_MASK) >= LONGEST_WALK


@helper
def _place(table: Table, segment: int, word: U64) -> None:
    at = segment * SEGMENT_SLOTS + _vacancy(table, segment, word >> _SHIFT32)
    table.slots[at + lowest_bit(_empty_slots(table, at))] = word
    table.segments[segment, COUNT] += uint32(1)


@helper
def _split(table: Table, segment: int, tag: U64) -> bool:
    """Split the segment of a tag by the next tag bit: move the keys that have it set to a new segment.

    Keys in their home buckets keep their slots there. The others are placed again, because these buckets are no longer
    full. Returns False if there is no free segment or no further tag bit.
    """
    depth = int64(table.segments[segment, BITS])
    fresh = table.meta[NUM_SEGMENTS]
    if fresh == table.segments.shape[0]:
        return False
    if depth == table.meta[DEPTH]:
        size = 1 << depth
        if 2 * size > table.directory.shape[0]:
            return False
        for i in range(size):
            table.directory[size + i] = table.directory[i]
        table.meta[DEPTH] += 1
    table.meta[NUM_SEGMENTS] += 1
    table.segments[segment, BITS] = table.segments[fresh, BITS] = uint32(depth + 1)
    bit = uint64(1) << uint64(32 + depth)
    base, new = segment * SEGMENT_SLOTS, fresh * SEGMENT_SLOTS
    scratch = table.segments.shape[0] * SEGMENT_SLOTS
    num_far = int64(0)
    num_moved = num_kept = uint32(0)
    for i in range(SEGMENT_SLOTS):
        word = table.slots[base + i]
        is_home = _home(word >> _SHIFT32) == i - i % NUM_LANES
        moved = word if is_home and word & bit != _EMPTY else _EMPTY
        kept = word ^ moved if is_home else _EMPTY
        table.slots[new + i], table.slots[base + i], table.slots[scratch + num_far] = moved, kept, word
        num_far += word != moved | kept
        num_moved += uint32(moved != _EMPTY)
        num_kept += uint32(kept != _EMPTY)
    table.segments[segment, COUNT], table.segments[fresh, COUNT] = num_kept, num_moved
    for i in range(num_far):
        word = table.slots[scratch + i]
        _place(table, fresh if word & bit != _EMPTY else segment, word)
    first = (int64(tag) & ((1 << depth) - 1)) | (1 << depth)
    for i in range(first, 1 << table.meta[DEPTH], 1 << (depth + 1)):
        table.directory[i] = uint32(fresh)
    return True


@inline_helper
def _new_entry(table: Table, key: U64) -> int:
    """Assign an entry id to a key. The id that has been free for the longest time is reused first."""
    entry = table.meta[FREE_HEAD]
    if entry >= 0:
        table.meta[NUM_FREE] -= 1
        table.meta[FREE_HEAD] = int64(table.keys[entry]) if table.meta[NUM_FREE] > 0 else int64(-1)
    else:
        entry = table.meta[HIGH_WATER]
        table.meta[HIGH_WATER] += 1
    table.keys[entry] = key
    return entry


@inline_helper
def num_entries(table: Table) -> int:
    """Return the number of live entries, like `num_live`, inside a kernel."""
    return table.meta[HIGH_WATER] - table.meta[NUM_FREE]


@inline_helper
def _is_full(table: Table) -> bool:
    return num_entries(table) >= table.meta[CAPACITY]


@helper
def insert(table: Table, key: U64) -> int:
    """Insert an absent key. Returns its entry id, or -1 if the table or the part of it for this key is full."""
    if _is_full(table):
        return int64(-1)
    tag = _tag(table, key)
    segment = _segment_of(table, tag)
    is_far = _is_far(_vacancy(table, segment, tag), tag)
    while is_far or table.segments[segment, COUNT] >= SPLIT_AT:
        if not _split(table, segment, tag):
            if is_far or table.segments[segment, COUNT] >= SEGMENT_SLOTS - 1:
                return int64(-1)
            break
        segment = _segment_of(table, tag)
        is_far = _is_far(_vacancy(table, segment, tag), tag)
    entry = _new_entry(table, key)
    _place(table, segment, tag << _SHIFT32 | uint64(entry + 1))
    return entry


@inline_helper
def find_or_insert(table: Table, key: U64) -> tuple[int, bool]:
    """Return the entry id of a key and whether the key was absent, with a single search.

    An absent key is inserted. The id is -1 if there is no room, as in `insert`.
    """
    tag = _tag(table, key)
    segment = _segment_of(table, tag)
    base, bucket = segment * SEGMENT_SLOTS, _home(tag)
    entry, is_new = int64(-1), True
    while True:
        empty = _empty_slots(table, base + bucket)
        same = _same_slots(table, base + bucket, tag, empty)
        while same != 0 and is_new:
            entry = int64(table.slots[base + bucket + lowest_bit(same)] & LOW32) - 1
            is_new = table.keys[entry] != key
            same &= same - _ONE
        if empty != 0 or not is_new:
            break
        bucket = _next(bucket)
    if is_new:
        if table.segments[segment, COUNT] >= SPLIT_AT or _is_far(bucket, tag) or _is_full(table):
            entry = insert(table, key)
        else:
            entry = _new_entry(table, key)
            table.slots[base + bucket + lowest_bit(empty)] = tag << _SHIFT32 | uint64(entry + 1)
            table.segments[segment, COUNT] += uint32(1)
    return entry, is_new


@helper
def _refill(table: Table, base: int, bucket: int, hole: int) -> None:
    """Refill the only empty slot of a bucket with a key that was stored further on because the bucket was full.

    If there is such a key, its old slot is refilled in the same way.
    """
    other, is_over = _next(bucket), False
    while not is_over:
        empty = _empty_slots(table, base + other)
        passed = uint64(0)
        for i in range(NUM_LANES):
            home = _home(table.slots[base + other + i] >> _SHIFT32)
            has_passed = ((other - home) & _SLOT_MASK) >= ((other - bucket) & _SLOT_MASK)
            passed |= uint64(has_passed) << uint64(i)
        passed &= ~empty
        if passed != 0:
            slot = other + lowest_bit(passed)
            table.slots[base + hole], table.slots[base + slot] = table.slots[base + slot], _EMPTY
            bucket, hole = other, slot
        is_over = empty != 0  # no key was stored beyond a bucket with an empty slot
        other = _next(other)


@inline_helper
def remove(table: Table, entry: int) -> None:
    """Remove a live entry. Its id is appended to the queue of free ids."""
    tag = _tag(table, table.keys[entry])
    segment = _segment_of(table, tag)
    base, bucket = segment * SEGMENT_SLOTS, _home(tag)
    word = tag << _SHIFT32 | uint64(entry + 1)
    found = lanes_equal(table.slots, base + bucket, _ALL, word)
    while found == 0:
        bucket = _next(bucket)
        found = lanes_equal(table.slots, base + bucket, _ALL, word)
    hole = bucket + lowest_bit(found)
    was_full = _empty_slots(table, base + bucket) == 0
    table.slots[base + hole] = _EMPTY
    if was_full:
        _refill(table, base, bucket, hole)
    table.segments[segment, COUNT] -= uint32(1)
    if table.meta[FREE_HEAD] < 0:
        table.meta[FREE_HEAD] = entry
    else:
        table.keys[table.meta[FREE_TAIL]] = uint64(entry)
    table.meta[FREE_TAIL] = entry
    table.meta[NUM_FREE] += 1
