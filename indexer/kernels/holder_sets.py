"""Interned holder sets: the streams that hold a page, and the tiers on which they hold it.

A set is a bitmask of four planes, one for each tier, with `width` words each. Bit b of plane t means that stream b
holds the page on tier t. Equal sets are stored once, with a count of the pages that use them. A page therefore needs
four bytes for its holders, regardless of the number of workers. Sets are found by their Zobrist hash, the XOR of one
random word for each bit, so a set that differs in one bit is found without building it. The hash is the key of a
`page_table`, whose entry ids are the ids of the sets.

Set 0 is the empty set. Its hash is 0, its users are not counted, and it is never freed.
"""

from collections.abc import Generator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kv_events.digest import mix
from kv_events.hashing import U64Array
from kv_events.kernels import page_table, page_table_ops
from kv_events.kernels.arrays import zeros
from kv_events.kernels.bundles import U32Vector, U64Matrix, U64MatrixInput
from kv_events.kernels.declare import helper, inline_helper
from kv_events.kernels.numbers import U64, int64, uint32, uint64
from kv_events.kernels.page_table import Table
from kv_events.schema import NUM_MEDIA

_SLICE_BYTES = 2**17
"""Memory that is written in one slice of a copy. It is fresh, and each of its pages may take ten microseconds."""

_ONE = uint64(1)
_EMPTY = uint64(0)


class HolderSets(NamedTuple):
    """Arrays of the interned sets. Only the kernels may access them."""

    table: Table
    """Zobrist hash -> id."""
    words: U64Matrix
    """[capacity, 4 * width] the planes of each set in sequence, fastest tier first."""
    users: U32Vector
    """[capacity] number of pages with this set; 0 = free."""


def make_holder_sets(capacity: int, width: int) -> HolderSets:
    """Create the arrays with the empty set only.

    capacity: maximum number of sets, including the empty one. It reserves address space only. width: words per plane,
    which is the number of streams / 64.
    """
    table = page_table.make_table(capacity)
    page_table.insert_zero(table)
    return HolderSets(table, zeros((capacity, NUM_MEDIA * width), np.uint64), zeros(capacity, np.uint32))


def num_sets(sets: HolderSets) -> int:
    """Return the number of sets in use, without the empty one."""
    return page_table.num_live(sets.table) - 1


def capacity_of(sets: HolderSets) -> int:
    """Return the maximum number of sets, without the empty one."""
    return page_table.capacity(sets.table) - 1


def bytes_used(sets: HolderSets) -> int:
    """Return the number of bytes in use."""
    per_set = sets.words.shape[1] * sets.words.itemsize + sets.users.itemsize
    return page_table.high_water(sets.table) * int(per_set) + page_table.bytes_used(sets.table)


def widened(sets: HolderSets, capacity: int, width: int) -> Generator[None, None, HolderSets]:
    """Return a copy with the same sets and ids and wider planes, made in slices. Nothing may change in between."""
    used, old_width = page_table.high_water(sets.table), sets.words.shape[1] // NUM_MEDIA
    words = zeros((max(capacity, used), NUM_MEDIA * width), np.uint64)
    planes = words.reshape(-1, NUM_MEDIA, width)
    for start in range(0, used, step := slice_rows(words)):
        here = slice(start, min(start + step, used))
        planes[here, :, :old_width] = sets.words[here].reshape(-1, NUM_MEDIA, old_width)
        yield
    page_table.limit(sets.table, capacity)
    return sets._replace(words=words)


def slice_rows(words: U64Array) -> int:
    """Return the number of sets to copy in one slice. words: uint64[s, 4 * width]."""
    return max(1, _SLICE_BYTES // int(words.shape[1] * words.itemsize))


@inline_helper
def _zobrist(stream: int, tier: int) -> U64:
    return mix(uint64(stream * NUM_MEDIA + tier))


@inline_helper
def holds(sets: HolderSets, holders: int, stream: int, tier: int) -> bool:
    """Return whether a set contains (stream, tier)."""
    width = sets.words.shape[1] // NUM_MEDIA
    word = sets.words[holders, tier * width + (stream >> 6)]
    return (word >> uint64(stream & 63)) & _ONE != _EMPTY


@inline_helper
def _equals_flipped(sets: HolderSets, candidate: int, holders: int, flipped_word: int, flipped_bit: U64) -> bool:
    for i in range(sets.words.shape[1]):
        word = sets.words[holders, i]
        if i == flipped_word:
            word ^= flipped_bit
        if sets.words[candidate, i] != word:
            return False
    return True


@helper
def flipped(sets: HolderSets, holders: int, stream: int, tier: int) -> int:
    """Return the id of the set that differs from `holders` in the bit of (stream, tier), or -1 if there is no room.

    A set that does not exist yet is created without users.
    """
    width = sets.words.shape[1] // NUM_MEDIA
    flipped_word = tier * width + (stream >> 6)
    flipped_bit = _ONE << uint64(stream & 63)
    zobrist = sets.table.keys[holders] ^ _zobrist(stream, tier)
    candidate = page_table_ops.find(sets.table, zobrist)
    if candidate >= 0 and _equals_flipped(sets, candidate, holders, flipped_word, flipped_bit):
        return candidate
    if candidate >= 0:
        return int64(-1)  # 64-bit hash collision: handled like a lack of room; the digest then differs
    fresh = page_table_ops.insert(sets.table, zobrist)
    if fresh >= 0:
        for i in range(sets.words.shape[1]):
            sets.words[fresh, i] = sets.words[holders, i]
        sets.words[fresh, flipped_word] ^= flipped_bit
    return fresh


@inline_helper
def move_user(sets: HolderSets, old: int, new: int) -> None:
    """Move one page from set `old` to set `new`. Frees `old` if it has no users left."""
    if new > 0:
        sets.users[new] += uint32(1)
    if old > 0:
        sets.users[old] -= uint32(1)
        if sets.users[old] == 0:
            page_table_ops.remove(sets.table, old)


@helper
def adopt(sets: HolderSets, rows: U64MatrixInput, row: int) -> int:
    """Create a set from one row of `rows`, without users. Returns its id, or -1 if it exists or there is no room."""
    width = sets.words.shape[1] // NUM_MEDIA
    zobrist = _EMPTY
    for i in range(sets.words.shape[1]):
        for bit in range(64):
            if (rows[row, i] >> uint64(bit)) & _ONE != _EMPTY:
                zobrist ^= _zobrist((i % width) * 64 + bit, i // width)
    if page_table_ops.find(sets.table, zobrist) >= 0:
        return int64(-1)
    fresh = page_table_ops.insert(sets.table, zobrist)
    if fresh >= 0:
        for i in range(sets.words.shape[1]):
            sets.words[fresh, i] = rows[row, i]
    return fresh


def check(sets: HolderSets, holders_of_pages: npt.NDArray[np.uint32]) -> None:
    """Recount users and sets from scratch. Raises AssertionError with the stored and the counted figure."""
    page_table.check(sets.table)
    used = page_table.high_water(sets.table)
    users = np.bincount(holders_of_pages[holders_of_pages > 0], minlength=used)
    if not np.array_equal(users, sets.users[:used]):
        wrong = np.flatnonzero(users != sets.users[:used])[:5]
        raise AssertionError(f"sets {wrong}: {users[wrong]} users, counted {sets.users[wrong]}")
    live = np.flatnonzero(users)
    if len(live) != num_sets(sets):
        raise AssertionError(f"{len(live)} sets have users, counted {num_sets(sets)}")
    if len(np.unique(sets.words[live], axis=0)) != len(live) or not sets.words[live].any(axis=1).all():
        raise AssertionError("two live sets are equal, or one is empty")
