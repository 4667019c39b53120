"""The query kernel: finds how much of a prompt each worker stream holds, by cumulative tier."""

from typing import NamedTuple

from indexer.kernels.apply import look_up
from kv_events.kernels.bundles import I32Vector, U32Matrix, U32Vector, U64Input, U64Matrix
from kv_events.kernels.declare import helper, inline_helper, kernel
from kv_events.kernels.instructions import lowest_bit
from kv_events.kernels.numbers import U64, int32, int64, uint32, uint64
from kv_events.kernels.page_table import Table
from kv_events.schema import NUM_MEDIA

_FIRST_STEP, _LARGEST_STEP = 8, 32
"""Pages that are compared at once: first few, because holder sets may change often, then more and more."""


class PageLookup(NamedTuple):
    """The part of `apply.Pages` that a query reads."""

    table: Table
    holders: U32Vector
    words: U64Matrix
    alive: U64Matrix
    """[4, width] scratch: the streams that hold every page so far on a tier or a faster one."""


@inline_helper
def _record(bits: U64, word: int, tier: int, num_pages: int, out_pages: U32Matrix) -> None:
    """Record `num_pages` for each stream whose bit is set in a word of dropped bits."""
    while bits != uint64(0):
        out_pages[word * 64 + lowest_bit(bits), tier] = uint32(num_pages)
        bits &= bits - uint64(1)


@helper
def _narrow(pages: PageLookup, held: int, alive: U64Matrix, num_pages: int, out_pages: U32Matrix) -> bool:
    """Intersect `alive` with the holders of a page on cumulative tiers. Returns whether any stream is left.

    alive: uint64[4, width]. Row t contains the streams that hold every page so far on tier t or a faster one.
    """
    width = alive.shape[1]
    left = uint64(0)
    for word in range(width):
        held_so_far = uint64(0)
        for tier in range(NUM_MEDIA):
            held_so_far |= pages.words[held, tier * width + word]
            dropped = alive[tier, word] & ~held_so_far
            if dropped != uint64(0):
                _record(dropped, word, tier, num_pages, out_pages)
                alive[tier, word] &= held_so_far
        left |= alive[NUM_MEDIA - 1, word]
    return left != uint64(0)


@helper
def _begin(pages: PageLookup, held: int, alive: U64Matrix, out_streams: I32Vector, out_pages: U32Matrix) -> int:
    """Initialize `alive` with the holders of the first page. Returns their number."""
    width = alive.shape[1]
    found = 0
    for word in range(width):
        held_so_far = uint64(0)
        for tier in range(NUM_MEDIA):
            held_so_far |= pages.words[held, tier * width + word]
            alive[tier, word] = held_so_far
        while held_so_far != uint64(0):
            stream = word * 64 + lowest_bit(held_so_far)
            out_streams[found] = int32(stream)
            for tier in range(NUM_MEDIA):
                out_pages[stream, tier] = uint32(0)
            found += 1
            held_so_far &= held_so_far - uint64(1)
    return found


@inline_helper
def _num_alike(pages: PageLookup, entry: int, hashes: U64Input, start: int) -> int:
    """Return how many pages from `start` on are in the entries after `entry`, with its holder set.

    Steps of which a page differs do not count. They are loops without branches, for vector instructions.
    """
    held = pages.holders[entry]
    count, size = int64(0), int64(_FIRST_STEP)
    most = min(hashes.shape[0] - start, pages.holders.shape[0] - 1 - entry)
    while count < most:
        wanted, keys = hashes[start + count :], pages.table.keys[entry + 1 + count :]
        holders = pages.holders[entry + 1 + count :]
        step = min(most - count, size)
        differ, moved = uint64(0), uint32(0)
        for i in range(step):
            differ |= wanted[i] ^ keys[i]
            moved |= holders[i] ^ held
        if differ | uint64(moved) != uint64(0):
            break
        count += step
        size = min(2 * size, int64(_LARGEST_STEP))
    return count


@helper
def put_sets_of_pages(table: Table, holders: U32Vector, hashes: U64Input, out_sets: U32Vector) -> None:
    """Look up the holder set of each page of a prompt.

    hashes: uint64[n], sequence hashes. out_sets: uint32[n], written; 0, the empty set, for pages without holders. The
    result is valid until the next change of the index.
    """
    entry = int64(-1)
    for i in range(hashes.shape[0]):
        entry = look_up(table, holders, entry, hashes[i])
        out_sets[i] = holders[entry] if entry >= 0 else uint32(0)


@kernel
def sets_of_pages(pages: PageLookup, hashes: U64Input, out_sets: U32Vector) -> None:
    """Call `put_sets_of_pages`."""
    put_sets_of_pages(pages.table, pages.holders, hashes, out_sets)


@kernel
def find(pages: PageLookup, hashes: U64Input, out_streams: I32Vector, out_pages: U32Matrix) -> int:
    """Find the longest held prefix of a prompt for each stream that holds the first page on any tier.

    hashes: uint64[n], sequence hashes. out_streams: int32[64 * width], the streams found, in ascending order.
    out_pages: uint32[64 * width, 4]; out_pages[stream, t] is the number of leading pages that the stream holds on tier
    t or a faster one. Rows of other streams are not written. Returns the number of streams found.
    """
    n = hashes.shape[0]
    if n == 0:
        return 0
    entry = look_up(pages.table, pages.holders, int64(-1), hashes[0])
    if entry < 0:
        return 0
    width = pages.words.shape[1] // NUM_MEDIA
    held = pages.holders[entry]
    found = _begin(pages, int64(held), pages.alive, out_streams, out_pages)
    last = n
    i = retry_at = 1
    while i < n:
        if i == retry_at:
            alike = _num_alike(pages, entry, hashes, i)
            i, entry = i + alike, entry + alike
            retry_at = i + _FIRST_STEP
            if i == n:
                break
        entry = look_up(pages.table, pages.holders, entry, hashes[i])
        if entry < 0:
            last = i
            break
        if pages.holders[entry] != held:
            held = pages.holders[entry]
            if not _narrow(pages, int64(held), pages.alive, i, out_pages):
                return found
        i += 1
    for word in range(width):
        for tier in range(NUM_MEDIA):
            _record(pages.alive[tier, word], word, tier, last, out_pages)
    return found
