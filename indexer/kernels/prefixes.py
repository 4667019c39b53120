"""Kernels that find the most shared prefixes of an index: where prompts part, and how many streams hold them there."""

import numpy as np
from numba import types

from indexer.kernels.apply import Pages, look_up
from kv_events.kernels.bundles import I64Vector, U8Vector, U32Vector, U64Vector
from kv_events.kernels.declare import array_function, array_kernel
from kv_events.schema import NUM_MEDIA

UNREACHABLE = 0xFFFFFFFF
"""Depth of a page of which a page before it is held by no stream."""

_MAX_DEPTH = 2**17
_DEPTH_BITS = 18
_DEPTH_MASK = (1 << _DEPTH_BITS) - 1


@array_function
def _num_holders(sets, holders):
    """Return the number of streams in a holder set, on any tier."""
    width = sets.words.shape[1] // NUM_MEDIA
    found = 0
    for word in range(width):
        held = np.uint64(0)
        for tier in range(NUM_MEDIA):
            held |= sets.words[holders, tier * width + word]
        while held != np.uint64(0):
            held &= held - np.uint64(1)
            found += 1
    return found


@array_function
def _parent(pages, entry):
    """Return the entry of a page's parent, -1 for the first page of a prompt, or -2 if no stream holds the parent."""
    parent = pages.parents[entry]
    if parent == np.uint64(0):
        return np.int64(-1)
    found = look_up(pages, entry, parent)
    return found if found >= 0 and pages.holders[found] != 0 else np.int64(-2)


@array_function
def _depth(pages, entry, depths):
    """Return the number of pages up to an entry. Fills `depths` along the way, so that each page is visited twice."""
    steps = 0
    above = entry
    known = np.int64(-1)
    while known < 0:
        if steps > _MAX_DEPTH:
            known = np.int64(UNREACHABLE)  # a cycle, which only a faulty publisher sends
        elif above == -1:
            known = np.int64(0)
        elif above == -2 or above >= depths.shape[0]:
            known = np.int64(UNREACHABLE)
        elif depths[above] != 0:
            known = np.int64(depths[above])
        else:
            above = _parent(pages, above)
            steps += 1
    here = entry
    for step in range(steps):
        depths[here] = np.uint32(UNREACHABLE if known == UNREACHABLE else known + steps - step)
        here = _parent(pages, here)
        if here < 0 or here >= depths.shape[0]:
            break
    return np.int64(depths[entry])


@array_kernel(types.void, Pages, U32Vector, U8Vector, types.int64, types.int64)
def survey(pages, depths, is_inner, start, stop):
    """Compute the depths of the entries [start, stop), and mark the parents of those that as many streams hold.

    depths: uint32[capacity], 0 where it is not known yet; UNREACHABLE. is_inner: uint8[capacity]. Both are updated, and
    start with zeros.
    """
    for entry in range(start, stop):
        held = np.int64(pages.holders[entry])
        if held == 0 or _depth(pages, np.int64(entry), depths) == UNREACHABLE:
            continue
        parent = _parent(pages, np.int64(entry))
        if parent < 0 or parent >= is_inner.shape[0]:
            continue
        above = np.int64(pages.holders[parent])
        if above == held or _num_holders(pages.sets, held) >= _num_holders(pages.sets, above):
            is_inner[parent] = np.uint8(1)


@array_function
def _lowest(worths):
    lowest = 0
    for i in range(1, worths.shape[0]):
        if worths[i] < worths[lowest]:
            lowest = i
    return lowest


@array_kernel(types.void, Pages, U32Vector, U8Vector, types.int64, types.int64, I64Vector, I64Vector)
def select(pages, depths, is_inner, start, stop, best, worths):
    """Keep the most shared of the entries [start, stop) that end a prefix.

    depths, is_inner: see `survey`. best: int64[k], entries, or -1. worths: int64[k], pages that are held more than
    once, then pages. Both are updated, and start with -1.
    """
    last_held = np.int64(-1)
    holders = 0
    lowest = _lowest(worths)
    for entry in range(start, stop):
        held = np.int64(pages.holders[entry])
        depth = np.int64(depths[entry])
        if held == 0 or is_inner[entry] or depth == 0 or depth == UNREACHABLE:
            continue
        if held != last_held:
            last_held = held
            holders = _num_holders(pages.sets, held)
        worth = (((holders - 1) * depth) << _DEPTH_BITS) | min(depth, _DEPTH_MASK)
        if worth > worths[lowest]:
            worths[lowest] = worth
            best[lowest] = entry
            lowest = _lowest(worths)


@array_kernel(types.int64, Pages, types.int64, U64Vector)
def trail(pages, entry, hashes):
    """Write the hashes from the first page of a prompt to an entry. Returns their number.

    hashes: uint64[n]. Returns 0 if there are more than n, or if a page between is not held.
    """
    count = 0
    above = entry
    while above >= 0:
        if count == hashes.shape[0]:
            return 0
        hashes[count] = pages.table.keys[above]
        count += 1
        above = _parent(pages, above)
    if above == -2:
        return 0
    for i in range(count // 2):
        last = count - 1 - i
        hashes[i], hashes[last] = hashes[last], hashes[i]
    return count
