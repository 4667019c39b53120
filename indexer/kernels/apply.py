"""Kernels that change the index: stores, removals and sweeps of one worker stream.

Events may arrive in any order, because the hash of a page identifies its whole prefix. A child may be stored before its
parent. Pages that are stored twice and removals of unknown pages are counted and have no effect.
"""

from typing import NamedTuple

from indexer.kernels.holder_sets import HolderSets, adopt, flipped, holds, move_user
from kv_events.digest import add_page, remove_page
from kv_events.kernels import page_table_ops
from kv_events.kernels.bundles import (
    I64Vector,
    U8Input,
    U8Vector,
    U32Input,
    U32Vector,
    U64Input,
    U64Matrix,
    U64MatrixInput,
    U64Vector,
)
from kv_events.kernels.declare import inline_helper, kernel
from kv_events.kernels.numbers import U64, int64, uint8, uint32
from kv_events.kernels.page_table import CAPACITY, Table
from kv_events.schema import NUM_MEDIA


class Pages(NamedTuple):
    """All page data of the index: the page table and columns indexed by its entry ids."""

    table: Table
    parents: U64Vector
    """[capacity] sequence hash of the parent page; 0 = first page of a prompt, or unknown."""
    holders: U32Vector
    """[capacity] holder set; 0 = the entry is free."""
    sets: HolderSets
    digests: U64Matrix
    """[streams, DIGEST_WORDS] digest of what each stream holds."""


@inline_helper
def neighbour(table: Table, holders: U32Vector, previous: int, key: U64) -> int:
    """Return the entry of a page if it directly follows or precedes the entry `previous`, else -1.

    previous: -1 if there is none. The pages of a prompt are stored together and get neighbouring entries, so most
    look-ups end here and access memory sequentially. Engines evict the last pages of a prompt first, and entries are
    reused in the order in which they became free, so some prompts are stored in descending entries.
    """
    entry = previous + 1
    if entry > 0 and table.keys[entry] == key and holders[entry] != 0:
        return entry
    entry = previous - 1
    if entry >= 0 and table.keys[entry] == key and holders[entry] != 0:
        return entry
    return int64(-1)


@inline_helper
def look_up(table: Table, holders: U32Vector, previous: int, key: U64) -> int:
    """Return the entry of a page, or -1. Tries `neighbour` first."""
    entry = neighbour(table, holders, previous, key)
    return entry if entry >= 0 else page_table_ops.find(table, key)


@inline_helper
def _give_up(pages: Pages, entry: int, old: int, new: int) -> None:
    """Move a page to a smaller holder set. A page without holders is removed from the table."""
    move_user(pages.sets, old, new)
    pages.holders[entry] = uint32(new)
    if new == 0:
        page_table_ops.remove(pages.table, entry)


@inline_helper
def _starts_chain(bitmap: U8Input, i: int) -> bool:
    return (bitmap[i >> 3] >> uint8(i & 7)) & uint8(1) != 0


@inline_helper
def _has_sets(sets: HolderSets) -> bool:
    """Return whether stores may add holder sets: an eighth is reserved for removals, which may need new sets, too."""
    return 8 * (page_table_ops.num_entries(sets.table) - 1) <= 7 * (sets.table.meta[CAPACITY] - 1)


@kernel
def store(
    pages: Pages,
    marks: U8Vector,
    hashes: U64Input,
    chain_starts: U8Input,
    parents: U64Input,
    stream: int,
    tier: int,
    start: int,
    stop: int,
) -> tuple[int, int]:
    """Store pages [start, stop) of an event for one stream on one tier, and update its digest.

    marks: uint8[capacity] or empty; bit `tier` of each stored page is set.
    hashes: uint64[n]; chain_starts: uint8[ceil(n / 8)] bitmap; parents: uint64[chains], as in `PackedStored`.
    Returns (pages that the stream held there already, pages refused because the table or the holder sets are full).
    """
    if not _has_sets(pages.sets):
        return 0, stop - start
    digest = pages.digests[stream]
    known = refused = 0
    is_cold = False  # whether pages are new, so that the entry of the previous page does not predict theirs
    chain = -1
    for i in range(start):
        if _starts_chain(chain_starts, i):
            chain += 1
    entry = int64(-1)
    last_from = last_to = int64(-1)
    for i in range(start, stop):
        key = hashes[i]
        starts = _starts_chain(chain_starts, i)
        if starts:
            chain += 1
        if is_cold and i + page_table_ops.AHEAD < stop:
            page_table_ops.fetch(pages.table, hashes[i + page_table_ops.AHEAD])
        entry = neighbour(pages.table, pages.holders, entry, key)
        is_cold = entry < 0
        is_new = False
        if is_cold:
            entry, is_new = page_table_ops.find_or_insert(pages.table, key)
            if entry < 0:
                refused += 1
                continue
        if is_new:
            pages.holders[entry] = 0
            pages.parents[entry] = parents[chain] if starts else hashes[i - 1]
        old = int64(pages.holders[entry])
        if old != last_from:
            last_from = old
            last_to = old if holds(pages.sets, old, stream, tier) else flipped(pages.sets, old, stream, tier)
        if last_to < 0:
            refused += 1
            last_from = int64(-1)
            if old == 0:
                page_table_ops.remove(pages.table, entry)
            continue
        if last_to == old:
            known += 1
        else:
            move_user(pages.sets, old, last_to)
            pages.holders[entry] = uint32(last_to)
            add_page(digest, tier, key)
        if marks.shape[0] > 0:
            marks[entry] |= uint8(1 << tier)
    return known, refused


@kernel
def remove(
    pages: Pages, marks: U8Vector, hashes: U64Input, stream: int, tier: int, start: int, stop: int
) -> tuple[int, int]:
    """Remove pages [start, stop) of an event from one tier of a stream. Arguments as in `store`.

    Returns (pages that the stream did not hold there, pages that remain because the holder sets are full).
    """
    digest = pages.digests[stream]
    unknown = refused = 0
    entry = int64(-1)
    last_from = last_to = int64(-1)
    for i in range(start, stop):
        if i + page_table_ops.AHEAD < stop:
            page_table_ops.fetch(pages.table, hashes[i + page_table_ops.AHEAD])
        key = hashes[i]
        entry = look_up(pages.table, pages.holders, entry, key)
        if entry < 0:
            unknown += 1
            continue
        old = int64(pages.holders[entry])
        if old != last_from:
            last_from = old
            last_to = flipped(pages.sets, old, stream, tier) if holds(pages.sets, old, stream, tier) else old
        if last_to < 0:
            refused += 1
            last_from = int64(-1)
            continue
        if last_to == old:
            unknown += 1
            continue
        _give_up(pages, entry, old, last_to)
        remove_page(digest, tier, key)
        if marks.shape[0] > 0:
            marks[entry] &= ~uint8(1 << tier)
    return unknown, refused


@kernel
def sweep(pages: Pages, marks: U8Vector, stream: int, start: int, stop: int) -> int:
    """Remove a stream from the entries [start, stop), except on tiers whose bit is set in `marks`.

    If marks is empty, nothing is kept. Other arguments as in `store`. Returns the number of removed (page, tier) pairs.
    """
    digest = pages.digests[stream]
    removed = 0
    for entry in range(start, stop):
        old = int64(pages.holders[entry])
        if old == 0:
            continue
        keep = marks[entry] if marks.shape[0] > 0 else uint8(0)
        for tier in range(NUM_MEDIA):
            if (keep >> uint8(tier)) & uint8(1) == 0 and holds(pages.sets, old, stream, tier):
                new = flipped(pages.sets, old, stream, tier)
                if new < 0:
                    continue
                key = pages.table.keys[entry]
                _give_up(pages, entry, old, new)
                remove_page(digest, tier, key)
                removed += 1
                old = new
                if old == 0:
                    break
    return removed


@kernel
def collect(pages: Pages, stream: int, start: int, stop: int, entries: I64Vector, tiers: U8Vector) -> int:
    """Collect the entries in [start, stop) that a stream holds, each with a bitmask of tiers. Returns their number.

    entries: int64, tiers: uint8; both are written and have at least stop - start elements.
    """
    found = 0
    for entry in range(start, stop):
        held = int64(pages.holders[entry])
        mask = uint8(0)
        if held > 0:
            for tier in range(NUM_MEDIA):
                if holds(pages.sets, held, stream, tier):
                    mask |= uint8(1 << tier)
        if mask:
            entries[found] = entry
            tiers[found] = mask
            found += 1
    return found


@kernel
def restore_sets(pages: Pages, rows: U64MatrixInput, ids: U32Vector) -> bool:
    """Intern distinct holder sets. rows: uint64[s, 4 * width]. ids: uint32[s], written: the set id of each row.

    Returns False if two rows are equal, a row is empty, or there is no room. Some sets are then interned already.
    """
    for row in range(rows.shape[0]):
        holder_set = adopt(pages.sets, rows, row)
        if holder_set < 0:
            return False
        ids[row] = uint32(holder_set)
    return True


@kernel
def restore_pages(
    pages: Pages, hashes: U64Input, saved_parents: U64Input, rows_of_pages: U32Input, ids: U32Vector
) -> bool:
    """Add new pages: page i has hashes[i], saved_parents[i] and the holder set ids[rows_of_pages[i]].

    Returns False if a hash is already in the table or there is no room. Some pages are then added already.
    """
    for i in range(hashes.shape[0]):
        if page_table_ops.find(pages.table, hashes[i]) >= 0:
            return False
        entry = page_table_ops.insert(pages.table, hashes[i])
        if entry < 0:
            return False
        pages.parents[entry] = saved_parents[i]
        pages.holders[entry] = ids[rows_of_pages[i]]
        move_user(pages.sets, int64(0), int64(ids[rows_of_pages[i]]))
    return True
