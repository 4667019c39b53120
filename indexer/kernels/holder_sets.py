"""Interned holder sets: who holds a page, and on which tiers.

A set is a bitmask of four planes, one a tier, of `width` words each; bit b of plane t = stream b holds the page on
tier t. Equal sets are one set with a count of users, so a page carries four bytes whatever the number of workers, and
pages that were stored together share one. Sets are found by a Zobrist hash (the XOR of one random word a bit), so the
neighbour of a set under one flipped bit is found without building it.

Set 0 is the empty set; it is never counted and never freed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import types

from kv_events.digest import mix
from kv_events.kernels import array_function, array_helper, array_kernel
from kv_events.schema import NUM_MEDIA

# columns of meta
_NUM_LIVE, _HIGH_WATER, _FREE_HEAD = range(3)

_ONE = np.uint64(1)


class HolderSets(NamedTuple):
    """Arrays of the interned sets; pass it to the kernels, never touch them from elsewhere."""

    words: npt.NDArray[np.uint64]
    """[capacity, 4 * width] plane after plane, fastest tier first."""
    hashes: npt.NDArray[np.uint64]
    """[capacity] Zobrist hash; a freed set holds the id of the next free one."""
    users: npt.NDArray[np.uint32]
    """[capacity] number of pages with this set; 0 = free."""
    buckets: npt.NDArray[np.uint32]
    """[power of two] open addressing: set id by hash, 0 = empty."""
    meta: npt.NDArray[np.int64]
    """[3] see the column numbers above."""


HOLDER_SET_ARRAYS = (
    types.Array(types.uint64, 2, "C"),
    types.Array(types.uint64, 1, "C"),
    types.Array(types.uint32, 1, "C"),
    types.Array(types.uint32, 1, "C"),
    types.Array(types.int64, 1, "C"),
)
"""numba types of a `HolderSets`' arrays; see `page_table.TABLE_ARRAYS`."""


def make_holder_sets(capacity: int, width: int) -> HolderSets:
    """No sets but the empty one. capacity: a power of two; width: words a plane, so streams / 64."""
    meta = np.zeros(3, np.int64)
    meta[_HIGH_WATER] = 1
    return HolderSets(
        words=np.zeros((capacity, NUM_MEDIA * width), np.uint64),
        hashes=np.zeros(capacity, np.uint64),
        users=np.zeros(capacity, np.uint32),
        buckets=np.zeros(2 * capacity, np.uint32),
        meta=meta,
    )


def num_sets(sets: HolderSets) -> int:
    """Sets in use, the empty one left out."""
    return int(sets.meta[_NUM_LIVE])


def room(sets: HolderSets) -> int:
    """How many more sets fit."""
    return len(sets.users) - 1 - num_sets(sets)


def bytes_used(sets: HolderSets) -> int:
    """Bytes of the arrays' used parts; the buckets count whole."""
    per_set = sets.words.shape[1] * 8 + 8 + 4
    return int(sets.meta[_HIGH_WATER]) * int(per_set) + sets.buckets.nbytes + sets.meta.nbytes


def grown(sets: HolderSets, capacity: int, width: int) -> HolderSets:
    """The same sets under the same ids in larger arrays."""
    larger = make_holder_sets(capacity, width)
    used, old_width = int(sets.meta[_HIGH_WATER]), sets.words.shape[1] // NUM_MEDIA
    planes = larger.words.reshape(capacity, NUM_MEDIA, width)
    planes[:used, :, :old_width] = sets.words[:used].reshape(used, NUM_MEDIA, old_width)
    larger.hashes[:used] = sets.hashes[:used]
    larger.users[:used] = sets.users[:used]
    larger.meta[:] = sets.meta
    _fill_buckets(*larger)
    return larger


@array_helper
def _zobrist(stream, tier):
    return mix(np.uint64(stream * NUM_MEDIA + tier))


@array_helper
def holds(sets, holders, stream, tier):
    """Whether a set has the bit of (stream, tier)."""
    width = sets.words.shape[1] // NUM_MEDIA
    word = sets.words[holders, tier * width + (stream >> 6)]
    return (word >> np.uint64(stream & 63)) & _ONE != np.uint64(0)


@array_helper
def _home(sets, zobrist):
    return np.int64(zobrist & np.uint64(sets.buckets.shape[0] - 1))


@array_function
def _insert_bucket(sets, holders):
    mask = sets.buckets.shape[0] - 1
    bucket = _home(sets, sets.hashes[holders])
    while sets.buckets[bucket] != 0:
        bucket = (bucket + 1) & mask
    sets.buckets[bucket] = np.uint32(holders)


@array_kernel(types.void(*HOLDER_SET_ARRAYS))
def _fill_buckets(words, hashes, users, buckets, meta):
    sets = HolderSets(words, hashes, users, buckets, meta)
    for holders in range(1, sets.meta[_HIGH_WATER]):
        if sets.users[holders] > 0:
            _insert_bucket(sets, holders)


@array_function
def _remove_bucket(sets, holders):
    mask = sets.buckets.shape[0] - 1
    hole = _home(sets, sets.hashes[holders])
    while sets.buckets[hole] != holders:
        hole = (hole + 1) & mask
    bucket = (hole + 1) & mask
    while sets.buckets[bucket] != 0:
        home = _home(sets, sets.hashes[sets.buckets[bucket]])
        if ((bucket - home) & mask) >= ((bucket - hole) & mask):
            sets.buckets[hole] = sets.buckets[bucket]
            hole = bucket
        bucket = (bucket + 1) & mask
    sets.buckets[hole] = np.uint32(0)


@array_helper
def _equals_flipped(sets, candidate, holders, flipped_word, flipped_bit):
    for i in range(sets.words.shape[1]):
        word = sets.words[holders, i]
        if i == flipped_word:
            word ^= flipped_bit
        if sets.words[candidate, i] != word:
            return False
    return True


@array_function
def flipped(sets, holders, stream, tier):
    """Id of the set that differs from `holders` in the bit of (stream, tier); built when it is new, without a user."""
    width = sets.words.shape[1] // NUM_MEDIA
    flipped_word = tier * width + (stream >> 6)
    flipped_bit = _ONE << np.uint64(stream & 63)
    zobrist = sets.hashes[holders] ^ _zobrist(stream, tier)
    if zobrist == np.uint64(0) and _equals_flipped(sets, np.int64(0), holders, flipped_word, flipped_bit):
        return np.int64(0)
    mask = sets.buckets.shape[0] - 1
    bucket = _home(sets, zobrist)
    while sets.buckets[bucket] != 0:
        candidate = np.int64(sets.buckets[bucket])
        if sets.hashes[candidate] == zobrist and _equals_flipped(sets, candidate, holders, flipped_word, flipped_bit):
            return candidate
        bucket = (bucket + 1) & mask
    fresh = _take_id(sets)
    for i in range(sets.words.shape[1]):
        sets.words[fresh, i] = sets.words[holders, i]
    sets.words[fresh, flipped_word] ^= flipped_bit
    sets.hashes[fresh] = zobrist
    sets.buckets[bucket] = np.uint32(fresh)
    return fresh


@array_helper
def _take_id(sets):
    fresh = sets.meta[_FREE_HEAD]
    if fresh > 0:
        sets.meta[_FREE_HEAD] = np.int64(sets.hashes[fresh])
    else:
        fresh = sets.meta[_HIGH_WATER]
        sets.meta[_HIGH_WATER] += 1
    sets.meta[_NUM_LIVE] += 1
    return fresh


@array_function
def adopt(sets, rows, row):
    """Id of a new set with the words of one row of `rows`; no equal set may be there. It has no user yet."""
    fresh = _take_id(sets)
    width = sets.words.shape[1] // NUM_MEDIA
    zobrist = np.uint64(0)
    for i in range(sets.words.shape[1]):
        word = rows[row, i]
        sets.words[fresh, i] = word
        for bit in range(64):
            if (word >> np.uint64(bit)) & _ONE != np.uint64(0):
                zobrist ^= _zobrist((i % width) * 64 + bit, i // width)
    sets.hashes[fresh] = zobrist
    _insert_bucket(sets, fresh)
    return fresh


@array_helper
def move_user(sets, old, new):
    """One page goes over from set `old` to set `new`; a set without users is freed."""
    if new > 0:
        sets.users[new] += np.uint32(1)
    if old > 0:
        sets.users[old] -= np.uint32(1)
        if sets.users[old] == 0:
            _remove_bucket(sets, old)
            sets.hashes[old] = np.uint64(sets.meta[_FREE_HEAD])
            sets.meta[_FREE_HEAD] = old
            sets.meta[_NUM_LIVE] -= 1


def check(sets: HolderSets, holders_of_pages: npt.NDArray[np.uint32]) -> None:
    """Recount users, hashes and buckets from scratch. Raises AssertionError with both figures."""
    used = int(sets.meta[_HIGH_WATER])
    users = np.bincount(holders_of_pages[holders_of_pages > 0], minlength=used)
    if not np.array_equal(users, sets.users[:used]):
        wrong = np.flatnonzero(users != sets.users[:used])[:5]
        raise AssertionError(f"sets {wrong}: {users[wrong]} users, counted {sets.users[wrong]}")
    live = np.flatnonzero(users)
    if len(live) != num_sets(sets):
        raise AssertionError(f"{len(live)} sets have users, counted {num_sets(sets)}")
    in_buckets = np.sort(sets.buckets[sets.buckets > 0])
    if not np.array_equal(in_buckets, live):
        raise AssertionError(f"buckets name {in_buckets.tolist()}, live are {live.tolist()}")
    if len(np.unique(sets.words[live], axis=0)) != len(live):
        raise AssertionError("two live sets are equal")
