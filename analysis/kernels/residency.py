"""Kernels that follow which pages each stream holds, on which media, and since when."""

from typing import NamedTuple

from kv_events.kernels import page_table_ops
from kv_events.kernels.bundles import (
    I64Matrix,
    I64Vector,
    U8Input,
    U8Vector,
    U16Vector,
    U32Matrix,
    U32Vector,
    U64Input,
    U64Vector,
)
from kv_events.kernels.declare import inline_helper, kernel
from kv_events.kernels.instructions import leading_zeros
from kv_events.kernels.numbers import U64, int64, uint8, uint16, uint32, uint64
from kv_events.kernels.page_table import HIGH_WATER, Table
from kv_events.schema import NUM_MEDIA

# what is counted, for each medium
STORED, REMOVED, DOUBLE, ORPHAN, UNKNOWN, CHURNED, BOUNCED, SWEPT = range(8)
COUNT_NAMES = ("stored", "removed", "double", "orphan", "unknown", "churned", "bounced", "swept")
UNTRACKED = NUM_MEDIA * len(COUNT_NAMES)
"""Place of the count of pages for which there was no room."""

DOUBLING = 16
"""Classes of lifetimes between a time and twice that time. Shorter ones than this, in milliseconds, have their own."""
NUM_LIFETIMES = DOUBLING * 29

_HELD = uint8(0x0F)


class Residencies(NamedTuple):
    """The pages that streams hold, one entry for each stream and page."""

    table: Table
    """Keys: sequence hash XOR the stream's key."""
    hashes: U64Vector
    parents: U64Vector
    """Sequence hash of the parent; 0: none."""
    streams: U16Vector
    media: U8Vector
    """Bits 0 to 3: held on this medium. Bits 4 to 7: removed from this medium, while it stayed on another one."""
    since: U32Matrix
    """[capacity, 4] milliseconds modulo 2**32 at which the page came to a medium, or was removed from it."""
    began: U32Vector
    """Number of the batch since which the stream holds the page without a break, on any medium."""
    marks: U16Vector
    """Number of the resync that named the page last."""
    seen: U8Vector
    """Media on which that resync named the page."""


class KnownPages(NamedTuple):
    """Every page that any stream has held, one entry for each page of a namespace."""

    table: Table
    """Keys: sequence hash XOR the namespace's key."""
    hashes: U64Vector
    parents: U32Vector
    """Entry of the parent + 1; 0: none or unknown."""
    depths: U32Vector
    """Pages from the beginning of the prompt, as far as it is known."""
    stores: U32Vector
    """How often a stream began to hold the page."""
    requests: U32Vector
    """Prompts that contain the page."""


class PageArrays(NamedTuple):
    """Everything that is followed."""

    held: Residencies
    known: KnownPages
    counts: I64Vector
    """[4 * counts + 1] see the names above: index `count * 4 + medium`."""
    lifetimes: I64Matrix
    """[4, NUM_LIFETIMES] removed pages by the time that they were held on a medium, see `_lifetime`."""


@inline_helper
def _count(counts: I64Vector, what: int, medium: int) -> None:
    counts[what * NUM_MEDIA + medium] += 1


@inline_helper
def _lifetime(ms: int) -> int:
    """Return the class of a lifetime: its highest five bits, and how many follow them."""
    shift = max(int64(0), 59 - leading_zeros(uint64(ms | 1)))
    return shift * DOUBLING + (ms >> shift)


@inline_helper
def _is_held(held: Residencies, entry: int) -> bool:
    return held.media[entry] & _HELD != 0


@inline_helper
def _know(known: KnownPages, key: U64, page_hash: U64, parent: int) -> int:
    """Note that a page exists. parent: entry of its parent, or -1. Returns its entry, or -1 without room."""
    entry, is_new = page_table_ops.find_or_insert(known.table, key)
    if entry >= 0 and is_new:
        known.hashes[entry] = page_hash
        known.parents[entry] = uint32(parent + 1)
        known.depths[entry] = known.depths[parent] + uint32(1) if parent >= 0 else uint32(1)
        known.stores[entry] = 0
        known.requests[entry] = 0
    return entry


@kernel
def store(book: PageArrays, hashes: U64Input, chain_starts: U8Input, parents: U64Input, facts: I64Vector) -> None:
    """Note pages that were stored. hashes, chain_starts and parents: as in `PackedStored`.

    facts: int64[9]: keys of stream and namespace as u64, stream, medium, milliseconds, batch, resync, whether the pages
    are part of a resync, and the time in milliseconds that pages are expected to stay.
    """
    held, known = book.held, book.known
    stream_key, namespace_key = uint64(facts[0]), uint64(facts[1])
    stream, medium, now, batch = facts[2], facts[3], uint32(facts[4]), uint32(facts[5])
    mark, is_resync, bounce_ms = uint16(facts[6]), facts[7] != 0, facts[8]
    bit, left = uint8(1 << medium), uint8(16 << medium)
    chain, above = -1, int64(-1)
    for i in range(hashes.shape[0]):
        if i + page_table_ops.AHEAD < hashes.shape[0]:
            page_table_ops.fetch(held.table, hashes[i + page_table_ops.AHEAD] ^ stream_key)
        page = hashes[i]
        starts = (chain_starts[i >> 3] >> uint8(i & 7)) & uint8(1) != 0
        parent = hashes[i - 1] if not starts else uint64(0)
        if starts:
            chain += 1
            parent = parents[chain]
            above = int64(-1)
            if parent != 0:
                above = page_table_ops.find(known.table, parent ^ namespace_key)
                entry = page_table_ops.find(held.table, parent ^ stream_key)
                if entry < 0 and not is_resync:
                    _count(book.counts, ORPHAN, medium)
        entry, is_new = page_table_ops.find_or_insert(held.table, page ^ stream_key)
        if entry < 0:
            book.counts[UNTRACKED] += 1
            continue
        above = _know(known, page ^ namespace_key, page, above)
        if above < 0:
            book.counts[UNTRACKED] += 1
        if is_new:
            held.hashes[entry] = page
            held.streams[entry] = uint16(stream)
            held.media[entry] = 0
            held.began[entry] = batch
            held.seen[entry] = 0
            if above >= 0:
                known.stores[above] += uint32(1)
        held.parents[entry] = parent
        if held.media[entry] & bit != 0:
            if not is_resync:
                _count(book.counts, DOUBLE, medium)
        else:
            if held.media[entry] & left != 0 and int64(uint32(now - held.since[entry, medium])) < bounce_ms:
                _count(book.counts, BOUNCED, medium)
            _count(book.counts, STORED, medium)
            held.media[entry] = (held.media[entry] | bit) & ~left
            held.since[entry, medium] = now
        if held.marks[entry] != mark or is_new:
            held.marks[entry] = mark
            held.seen[entry] = 0
        held.seen[entry] |= bit


@kernel
def remove(book: PageArrays, hashes: U64Input, facts: I64Vector) -> None:
    """Note pages that were removed from a medium. Arguments as in `store`."""
    held = book.held
    stream_key, medium, now = uint64(facts[0]), facts[3], uint32(facts[4])
    bit, left, churn_ms = uint8(1 << medium), uint8(16 << medium), facts[8]
    for i in range(hashes.shape[0]):
        if i + page_table_ops.AHEAD < hashes.shape[0]:
            page_table_ops.fetch(held.table, hashes[i + page_table_ops.AHEAD] ^ stream_key)
        entry = page_table_ops.find(held.table, hashes[i] ^ stream_key)
        if entry < 0 or held.media[entry] & bit == 0:
            _count(book.counts, UNKNOWN, medium)
            continue
        _count(book.counts, REMOVED, medium)
        held_ms = int64(uint32(now - held.since[entry, medium]))
        if held_ms < churn_ms:
            _count(book.counts, CHURNED, medium)
        if held.began[entry] > 0:  # not before the log
            book.lifetimes[medium, _lifetime(held_ms)] += 1
        held.media[entry] = (held.media[entry] & ~bit) | left
        held.since[entry, medium] = now
        if not _is_held(held, entry):
            held.media[entry] = 0
            page_table_ops.remove(held.table, entry)


@kernel
def sweep(book: PageArrays, stream: int, mark: int) -> None:
    """Drop the pages of a stream that resync number `mark` did not name, medium by medium. mark: -1: all pages."""
    held = book.held
    for entry in range(held.table.meta[HIGH_WATER]):
        if not _is_held(held, entry) or int64(held.streams[entry]) != stream:
            continue
        kept = held.seen[entry] if int64(held.marks[entry]) == mark else uint8(0)
        for medium in range(NUM_MEDIA):
            bit = uint8(1 << medium)
            if held.media[entry] & bit != 0 and kept & bit == 0:
                _count(book.counts, SWEPT, medium)
                held.media[entry] &= ~bit
        if not _is_held(held, entry):
            held.media[entry] = 0
            page_table_ops.remove(held.table, entry)


@kernel
def first_lost(book: PageArrays, stream_key: U64, hashes: U64Input, start: int, stop: int, since: int) -> int:
    """Return the first page in [start, stop) of a prompt that the stream does not hold now, or not without a break.

    since: number of a batch after which the stream must not have lost the page; -1: it only has to hold it now.
    Returns `stop` if there is none.
    """
    held = book.held
    for i in range(start, stop):
        entry = page_table_ops.find(held.table, hashes[i] ^ stream_key)
        if entry < 0 or (since >= 0 and int64(held.began[entry]) > since):
            return i
    return stop


@kernel
def note_request(book: PageArrays, namespace_key: U64, hashes: U64Input) -> int:
    """Count a request for the pages of a prompt that any stream has held. Returns the number of these pages."""
    known = book.known
    found = 0
    for i in range(hashes.shape[0]):
        entry = page_table_ops.find(known.table, hashes[i] ^ namespace_key)
        if entry < 0:
            break
        known.requests[entry] += uint32(1)
        found += 1
    return found


@kernel
def count_orphans(book: PageArrays, stream_keys: I64Vector) -> int:
    """Return how many held pages have a parent that their stream does not hold. stream_keys: by stream, as u64."""
    held = book.held
    found = 0
    for entry in range(held.table.meta[HIGH_WATER]):
        if _is_held(held, entry) and held.parents[entry] != 0:
            key = held.parents[entry] ^ uint64(stream_keys[held.streams[entry]])
            if page_table_ops.find(held.table, key) < 0:
                found += 1
    return found
