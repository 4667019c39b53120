"""Kernels over page changes that lie column by column: their digest, their order, how many fit a batch."""

from __future__ import annotations

import numpy as np
from numba import njit, types

from kv_events.digest import add_page, remove_page
from kv_events.kernels import array_kernel
from kv_events.schema import NUM_MEDIA

# kinds of change: stores on medium 0 .. 3, removals from medium 0 .. 3, everything cleared
REMOVAL = NUM_MEDIA
CLEARED = 2 * NUM_MEDIA
_RANKS = 2 * NUM_MEDIA

_U8_IN = types.Array(types.uint8, 1, "C", readonly=True)
_U64_IN = types.Array(types.uint64, 1, "C", readonly=True)
_I64_IN = types.Array(types.int64, 1, "C", readonly=True)
_U8_OUT, _U64_OUT = types.uint8[::1], types.uint64[::1]


@array_kernel(types.void(types.uint64[::1], _U8_IN, _U64_IN))
def advance_digest(digest, kinds, hashes):
    """Bring a digest (uint64[8], changed in place) from before the changes to after them."""
    for i in range(kinds.shape[0]):
        kind = np.int64(kinds[i])
        if kind < REMOVAL:
            add_page(digest, kind, hashes[i])
        elif kind < CLEARED:
            remove_page(digest, kind - REMOVAL, hashes[i])
        else:
            for word in range(digest.shape[0]):
                digest[word] = np.uint64(0)


@array_kernel(types.int64(_U8_IN, _U64_IN, _U64_IN, types.int64, types.int64, types.int64, types.int64))
def batch_length(kinds, hashes, parents, max_events, max_bytes, event_bytes, page_bytes):
    """How many of the changes fit one batch; at least one.

    A run of equal kind is one event of `event_bytes`; a page costs `page_bytes`, a chain that begins 8 bytes more.
    """
    num_events, num_bytes = 0, 0
    for i in range(kinds.shape[0]):
        new_run = i == 0 or kinds[i] != kinds[i - 1] or kinds[i] == CLEARED
        if new_run:
            num_events += 1
            num_bytes += event_bytes
        if kinds[i] < REMOVAL and (new_run or parents[i] != hashes[i - 1]):
            num_bytes += 8
        num_bytes += page_bytes
        if i > 0 and (num_events > max_events or num_bytes > max_bytes):
            return i
    return kinds.shape[0]


@array_kernel(types.int64(_U8_IN, _U64_IN, types.int64[::1], types.uint64[::1], types.int64[::1]))
def rank_changes(kinds, hashes, ranks, table_hashes, table_uses):
    """Give changes ranks by which they can be sorted (stably) into few runs of a kind, without a change of meaning.
    Returns a number that all ranks are smaller than.

    A removal may come before stores of other pages that it followed, so removals come first, up to a page that was
    both stored and removed, or a clear: from there on, ranks are higher. ranks: int64[n], written. table_hashes,
    table_uses: uint64 and zeros of int64, [a power of two of at least 2 n], scratch.
    """
    mask = np.int64(table_hashes.shape[0] - 1)
    group = 1
    for i in range(kinds.shape[0]):
        kind = np.int64(kinds[i])
        if kind == CLEARED:
            ranks[i] = (group + 1) * _RANKS
            group += 2
            continue
        is_store = np.int64(kind < REMOVAL)
        place = np.int64(hashes[i] >> np.uint64(32)) & mask
        while table_uses[place] >> 1 >= group and table_hashes[place] != hashes[i]:
            place = (place + 1) & mask
        if table_uses[place] >> 1 >= group and table_uses[place] & 1 != is_store:
            group += 1
            place = np.int64(hashes[i] >> np.uint64(32)) & mask
            while table_uses[place] >> 1 >= group:
                place = (place + 1) & mask
        table_hashes[place], table_uses[place] = hashes[i], group << 1 | is_store
        ranks[i] = group * _RANKS + (kind + REMOVAL if is_store else kind - REMOVAL)
    return (group + 1) * _RANKS


@array_kernel(
    types.void(_I64_IN, types.int64[::1], _U8_IN, _U64_IN, _U64_IN, _U64_IN, _U8_OUT, _U64_OUT, _U64_OUT, _U64_OUT)
)
def sort_changes(
    ranks, places, kinds, hashes, block_hashes, parents, out_kinds, out_hashes, out_block_hashes, out_parents
):
    """Changes by their ranks, those of equal rank in their order. Columns are as in `PageChanges`.

    places: int64, zeros, one for each rank there may be: scratch. A counting sort.
    """
    for i in range(ranks.shape[0]):
        places[ranks[i]] += 1
    end = 0
    for rank in range(places.shape[0]):
        places[rank], end = end, end + places[rank]
    for i in range(ranks.shape[0]):
        place = places[ranks[i]]
        places[ranks[i]] += 1
        out_kinds[place], out_hashes[place] = kinds[i], hashes[i]
        out_block_hashes[place], out_parents[place] = block_hashes[i], parents[i]


@njit(types.int64(_U8_IN, _I64_IN, types.int64[::1]), nogil=True, cache=True)
def order_by_prefix(media, parents, order):
    """Fill `order` with the live entries, parents before children and, where possible, right before one.

    media: uint8[n], 0 marks a free entry. parents: int64[n], entry of the page before, or -1. order: int64[n].
    Returns how many there are. Links that form a ring are cut somewhere.
    """
    n = media.shape[0]
    first_child = np.full(n, -1, np.int64)
    next_sibling = np.full(n, -1, np.int64)
    for i in range(n):
        if media[i] != 0 and parents[i] >= 0:
            next_sibling[i] = first_child[parents[i]]
            first_child[parents[i]] = i
    seen = np.zeros(n, np.bool_)
    stack = np.empty(n + 1, np.int64)
    count = 0
    for take_all in (False, True):  # from the roots down first; what is then left hangs on a ring of links
        for root in range(n):
            if media[root] == 0 or seen[root] or (parents[root] >= 0 and not take_all):
                continue
            height = 1
            stack[0] = root
            while height > 0:
                height -= 1
                entry = stack[height]
                if seen[entry]:
                    continue
                seen[entry] = True
                order[count] = entry
                count += 1
                child = first_child[entry]
                while child >= 0:
                    stack[height] = child
                    height += 1
                    child = next_sibling[child]
    return count
