"""Kernels that find the most shared prefixes of an index: where prompts part, and how many streams hold them there."""

from indexer.kernels.apply import Pages, look_up
from indexer.kernels.holder_sets import HolderSets
from kv_events.kernels.bundles import I64Vector, U8Vector, U32Vector, U64Vector
from kv_events.kernels.declare import helper, kernel
from kv_events.kernels.numbers import int64, uint8, uint32, uint64
from kv_events.schema import NUM_MEDIA

UNREACHABLE = 0xFFFFFFFF
"""Depth of a page of which a page before it is held by no stream."""

_MAX_DEPTH = 2**17
_DEPTH_BITS = 18
_DEPTH_MASK = (1 << _DEPTH_BITS) - 1


@helper
def _num_holders(sets: HolderSets, holders: int) -> int:
    """Return the number of streams in a holder set, on any tier."""
    width = sets.words.shape[1] // NUM_MEDIA
    found = 0
    for word in range(width):
        held = uint64(0)
        for tier in range(NUM_MEDIA):
            held |= sets.words[holders, tier * width + word]
        while held != uint64(0):
            held &= held - uint64(1)
            found += 1
    return found


@helper
def _parent(pages: Pages, entry: int) -> int:
    """Return the entry of a page's parent, -1 for the first page of a prompt, or -2 if no stream holds the parent."""
    parent = pages.parents[entry]
    if parent == uint64(0):
        return int64(-1)
    found = look_up(pages.table, pages.holders, entry, parent)
    return found if found >= 0 and pages.holders[found] != 0 else int64(-2)


@helper
def _depth(pages: Pages, entry: int, depths: U32Vector) -> int:
    """Return the number of pages up to an entry. Fills `depths` along the way, so that each page is visited twice."""
    steps = 0
    above = entry
    known = int64(-1)
    while known < 0:
        if steps > _MAX_DEPTH:
            known = int64(UNREACHABLE)  # a cycle, which only a faulty publisher sends
        elif above == -1:
            known = int64(0)
        elif above == -2 or above >= depths.shape[0]:
            known = int64(UNREACHABLE)
        elif depths[above] != 0:
            known = int64(depths[above])
        else:
            above = _parent(pages, above)
            steps += 1
    here = entry
    for step in range(steps):
        depths[here] = uint32(UNREACHABLE if known == UNREACHABLE else known + steps - step)
        here = _parent(pages, here)
        if here < 0 or here >= depths.shape[0]:
            break
    return int64(depths[entry])


@kernel
def survey(pages: Pages, depths: U32Vector, is_inner: U8Vector, start: int, stop: int) -> None:
    """Compute the depths of the entries [start, stop), and mark the parents of those that as many streams hold.

    depths: uint32[capacity], 0 where it is not known yet; UNREACHABLE. is_inner: uint8[capacity]. Both are updated, and
    start with zeros.
    """
    for entry in range(start, stop):
        held = int64(pages.holders[entry])
        if held == 0 or _depth(pages, int64(entry), depths) == UNREACHABLE:
            continue
        parent = _parent(pages, int64(entry))
        if parent < 0 or parent >= is_inner.shape[0]:
            continue
        above = int64(pages.holders[parent])
        if above == held or _num_holders(pages.sets, held) >= _num_holders(pages.sets, above):
            is_inner[parent] = uint8(1)


@helper
def _lowest(worths: I64Vector) -> int:
    lowest = 0
    for i in range(1, worths.shape[0]):
        if worths[i] < worths[lowest]:
            lowest = i
    return lowest


@kernel
def select(
    pages: Pages, depths: U32Vector, is_inner: U8Vector, start: int, stop: int, best: I64Vector, worths: I64Vector
) -> None:
    """Keep the most shared of the entries [start, stop) that end a prefix.

    depths, is_inner: see `survey`. best: int64[k], entries, or -1. worths: int64[k], pages that are held more than
    once, then pages. Both are updated, and start with -1.
    """
    last_held = int64(-1)
    holders = 0
    lowest = _lowest(worths)
    for entry in range(start, stop):
        held = int64(pages.holders[entry])
        depth = int64(depths[entry])
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


@kernel
def trail(pages: Pages, entry: int, hashes: U64Vector) -> int:
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
