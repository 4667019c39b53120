"""A hash table with open addressing from 64-bit keys to dense entry ids, on flat arrays for numba kernels.

The index has a table of sequence hashes. A publisher's ledger has a table of sequence hashes and one of block hashes.
Entry ids are small, stable integers. The owner keeps its own columns indexed by them. Ids are assigned in order of
arrival, so the pages of one prompt tend to be adjacent, and a walk along a prompt reads memory sequentially.

The layout is *extendible hashing* (Fagin et al., 1979). A directory maps the low bits of a key's tag to a segment of
4096 slots. A full segment is split in two, so the table grows by one segment at a time. A slot is `tag << 32 | id + 1`,
or 0 if it is empty. Tags alone decide almost every comparison, and splits and removals do not read the keys. Eight
slots, which are one cache line, form a *bucket* and are compared at once. The high bits of a tag select the key's home
bucket. If that is full, the key is stored in the next bucket that is not full. A search therefore ends at the first
bucket with an empty slot, which is usually the home bucket. The arrays are reserved at their maximum size, but memory
is only used for the parts in use. The kernels are in `page_table_ops`.

Keys come from outside, so each table draws a secret, a 128-bit number. The tag is the upper 32 bits of key * secret
modulo 2**128 (multiply-shift hashing: Dietzfelbinger and others, 1997). For any two keys that were chosen without the
secret, the lowest or highest d bits of their tags are equal with a probability of at most 2 / 2**d. This does not hold
against someone who learns the secret, for example by timing many queries. Even then no search takes long: a key whose
buckets are full over `LONGEST_WALK` slots splits its segment, or is refused if that is not possible.
"""

import secrets
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kv_events.errors import InvalidValueError
from kv_events.kernels.arrays import zeros
from kv_events.kernels.bundles import I64Vector, U32Matrix, U32Vector, U64Vector
from kv_events.kernels.instructions import NUM_LANES

_SEGMENT_BITS = 12
SEGMENT_SLOTS = 1 << _SEGMENT_BITS
SPLIT_AT = SEGMENT_SLOTS * 85 // 100
LONGEST_WALK = SEGMENT_SLOTS // 8
"""Largest distance in slots from a new key's home bucket. Keys of a well-filled segment stay far below it."""
HOME_BITS = _SEGMENT_BITS - (NUM_LANES - 1).bit_length()
_MAX_DEPTH = 32 - HOME_BITS  # a tag has 32 bits: directory bits and home bucket bits

LOW32 = np.uint64(0xFFFFFFFF)

# columns of segments
BITS, COUNT = range(2)
# columns of meta
DEPTH, NUM_SEGMENTS, HIGH_WATER, NUM_FREE, FREE_HEAD, FREE_TAIL, CAPACITY, SECRET = range(8)
_SECRET_WORDS = 2

MAX_CAPACITY = 2**31


class Table(NamedTuple):
    """The arrays of one table. Only this module and the kernels may access them."""

    keys: U64Vector
    """[capacity + 1] key of each live entry. A free entry holds the id of the next free one. The last element is never
    used, so that reads of an entry's neighbour stay in bounds."""
    directory: U32Vector
    """[2**max_depth] segment number for each value of a tag's low bits."""
    slots: U64Vector
    """[(segments + 1) * 4096] tag << 32 | id + 1, or 0; eight per bucket. The last 4096 slots are scratch space."""
    segments: U32Matrix
    """[segments, 2] number of tag bits shared by all keys of the segment; number of used slots."""
    meta: I64Vector
    """[9] see the column numbers above. SECRET: the lower half of the secret; the upper half follows."""


def new_secret() -> bytes:
    """Return the secret of one more table."""
    return secrets.token_bytes(8 * _SECRET_WORDS)


def make_table(capacity: int, secret: bytes | None = None) -> Table:
    """Create an empty table for at most `capacity` live entries.

    Reserves address space, not memory. secret: only for tests; None: a new one. Raises InvalidValueError.
    """
    if not 1 <= capacity <= MAX_CAPACITY:
        raise InvalidValueError("capacity", capacity, f"1 .. {MAX_CAPACITY}")
    # after a split, a segment holds on average at least half of SPLIT_AT; twice as many segments leave room for skew
    num_segments = max(4, 4 * capacity // SPLIT_AT)
    max_depth = min(_MAX_DEPTH, max(4, (2 * num_segments - 1).bit_length()))
    meta = np.zeros(SECRET + _SECRET_WORDS, np.int64)
    meta[CAPACITY] = capacity
    meta[SECRET:] = np.frombuffer(new_secret() if secret is None else secret, "<i8")
    _reset_meta(meta)
    return Table(
        keys=zeros(capacity + 1, np.uint64),
        directory=zeros(1 << max_depth, np.uint32),
        slots=_in_lines(zeros((num_segments + 1) * SEGMENT_SLOTS + NUM_LANES, np.uint64)),
        segments=zeros((num_segments, 2), np.uint32),
        meta=meta,
    )


def _in_lines(array: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return all elements of an array except NUM_LANES, aligned to a cache line."""
    first = -array.ctypes.data % (8 * NUM_LANES) // 8
    return array[first : first + len(array) - NUM_LANES]


def insert_zero(table: Table) -> None:
    """Insert the key 0 into an empty table. It gets entry 0, and its tag is 0 with every secret."""
    table.slots[0] = table.segments[0, COUNT] = table.meta[HIGH_WATER] = 1


def num_live(table: Table) -> int:
    """Return the number of live entries."""
    return int(table.meta[HIGH_WATER] - table.meta[NUM_FREE])


def high_water(table: Table) -> int:
    """Return the length of the used part of an owner's columns. All ids assigned since the last clear are smaller."""
    return int(table.meta[HIGH_WATER])


def capacity(table: Table) -> int:
    """Return the maximum number of live entries."""
    return int(table.meta[CAPACITY])


def limit(table: Table, capacity: int) -> None:
    """Change the maximum number of live entries, at most to that of `make_table`. Existing entries stay."""
    table.meta[CAPACITY] = min(capacity, len(table.keys) - 1)


def bytes_used(table: Table) -> int:
    """Return the size of the arrays' used parts in bytes."""
    segments = int(table.meta[NUM_SEGMENTS])
    return (
        high_water(table) * 8 + (4 << int(table.meta[DEPTH])) + segments * (SEGMENT_SLOTS + 1) * 8 + table.meta.nbytes
    )


def clear(table: Table) -> None:
    """Remove all entries. Takes microseconds, because the slots of a segment are only cleared when it is used again."""
    table.slots[:SEGMENT_SLOTS] = 0
    table.segments[: int(table.meta[NUM_SEGMENTS])] = 0
    table.directory[: 1 << int(table.meta[DEPTH])] = 0
    _reset_meta(table.meta)


def _reset_meta(meta: npt.NDArray[np.int64]) -> None:
    meta[:CAPACITY] = 0
    meta[NUM_SEGMENTS] = 1
    meta[FREE_HEAD] = meta[FREE_TAIL] = -1


def check(table: Table) -> None:
    """Recount everything from scratch. Raises AssertionError with both figures."""
    used = table.slots[: int(table.meta[NUM_SEGMENTS]) * SEGMENT_SLOTS]
    words = used[used != 0]
    entries = (words & LOW32).astype(np.int64) - 1
    if len(entries) != num_live(table) or len(np.unique(entries)) != len(entries):
        raise AssertionError(f"{len(entries)} slots, {len(np.unique(entries))} ids, {num_live(table)} live entries")
    counts = (used.reshape(-1, SEGMENT_SLOTS) != 0).sum(axis=1)
    stated = table.segments[: len(counts), COUNT]
    if not np.array_equal(counts, stated):
        raise AssertionError(f"segments hold {counts.tolist()}, counted {stated.tolist()}")
    free, entry = set(), int(table.meta[FREE_HEAD])
    for _ in range(int(table.meta[NUM_FREE])):
        free.add(entry)
        entry = int(table.keys[entry])
    if len(free) != int(table.meta[NUM_FREE]) or free & set(entries.tolist()):
        raise AssertionError(f"{len(free)} distinct free ids of {int(table.meta[NUM_FREE])}, some of them live")
