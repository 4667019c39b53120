"""Kernels of the ledger. Arrays only, no Python objects.

Two tables of `kv_events.page_table`. *Blocks*: what the engine calls a page, see `publisher.blocks`. *Pages*: what the
router calls it (sequence hash). Several blocks may carry one page: multimodal prompts of equal tokens, copies under two
names. A page counts once per medium, however many blocks carry it, because the router keeps a set; so the digest is
that of a set, too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types

from kv_events.bundles import (
    BoolVector,
    I64Vector,
    U8Input,
    U8Vector,
    U32Matrix,
    U32Vector,
    U64Matrix,
    U64Vector,
    spread,
)
from kv_events.digest import add_page, remove_page
from kv_events.kernels import array_function, array_helper, array_kernel
from kv_events.page_table import Table
from kv_events.page_table_kernels import AHEAD, fetch, find, find_or_insert, remove, was_used
from kv_events.schema import NUM_MEDIA
from publisher.blocks import HELD, IS_SHARED, PAGE, STATE, Blocks, is_held
from publisher.change_kernels import CLEARED, REMOVAL
from publisher.event_columns import StoredColumns
from publisher.queue_kernels import SPAN, QueueArrays, append

# columns of page_words
PARENT, FIRST_BLOCK = range(2)

SLICE_BITS = 12
SLICE_PAGES = 1 << SLICE_BITS
"""Pages that are copied in one step."""

FOUND_BLOCKS = 64
"""Blocks that are looked up before the first of them is removed: what memory their pages need comes near meanwhile."""

COUNT_NAMES = ("stored", "removed", "stored_again", "removed_unknown", "ledger_full", "renamed", "parent_unknown")
"""Names of the elements of counts: pages by what became of them."""
_STORED, _REMOVED, _STORED_AGAIN, _REMOVED_UNKNOWN, _LEDGER_FULL, _RENAMED, _PARENT_UNKNOWN = range(len(COUNT_NAMES))

_NO_HASH = np.uint64(0)
_MEDIA_BITS = np.uint32(NUM_MEDIA)
_SPAN_MASK = np.uint32(2**32 - 2**NUM_MEDIA)


class LedgerArrays(NamedTuple):
    """What the worker holds. Columns are indexed by the entry ids of the table that their name begins with."""

    blocks: Blocks
    pages: Table
    page_media: U8Vector
    """[capacity] bit m: some block carries the page on medium m. 0: a free entry."""
    page_copies: U32Matrix
    """[4, capacity] blocks that carry the page, per medium. 0 for a free entry."""
    page_words: U64Matrix
    """[capacity, 2] sequence hash of the page before it (0: none, or not known); first block that carried it."""
    page_stored_in: U32Vector
    """[capacity] where the page was queued as stored the last time: number of the span modulo 2**28, and behind it
    four bits, bit m: on medium m."""
    page_changed: BoolVector
    """[capacity / SLICE_PAGES, rounded up] whether media of the slice's pages changed since it was last copied."""
    found: I64Vector
    """[FOUND_BLOCKS] scratch: entries of blocks that are about to be removed."""
    digest: U64Vector
    """[8] see `kv_events.digest`."""
    counts: I64Vector
    """[7] see `COUNT_NAMES`."""


@array_helper
def _span_mark(queue):
    """The span that is being queued, as in `page_stored_in`, without media."""
    return np.uint32(np.uint32(queue.cursors[SPAN]) << _MEDIA_BITS)  # numba shifts into 64 bits


@array_helper
def _queue_store(ledger, queue, page, medium, name, block_hash, parent):
    stored_in = ledger.page_stored_in[page]
    if stored_in & _SPAN_MASK != _span_mark(queue):
        stored_in = _span_mark(queue)
    ledger.page_stored_in[page] = stored_in | np.uint32(1 << medium)
    append(queue, medium, name, block_hash, parent)


@array_helper
def _queue_removal(ledger, queue, page, medium, block_hash):
    """A span in which the page was stored there ends here: its removals may be told before its stores."""
    stored_in = ledger.page_stored_in[page]
    if stored_in & _SPAN_MASK == _span_mark(queue) and stored_in & np.uint32(1 << medium):
        queue.cursors[SPAN] += 1
    append(queue, REMOVAL + medium, ledger.pages.keys[page], block_hash, _NO_HASH)


@array_helper
def _is_block(ledger, entry, key):
    blocks = ledger.blocks
    is_used = was_used(blocks.table, entry) and blocks.table.keys[entry] == key
    return is_used and blocks.columns[entry, STATE] != 0


@array_helper
def _expected_block(ledger, expected_after, key):
    """Entry of a block that is expected right behind another entry (-1: no expectation), or before it; else -1.

    Entries are used again in the order in which they became free, and engines give up the last pages of a prompt first:
    so there are prompts that lie backwards.
    """
    entry = expected_after + 1
    if _is_block(ledger, entry, key):
        return entry
    entry = expected_after - 1
    return entry if entry >= 0 and _is_block(ledger, entry, key) else np.int64(-1)


@array_helper
def _find_block(ledger, expected_after, key):
    """Entry of a block, or -1."""
    entry = _expected_block(ledger, expected_after, key)
    return entry if entry >= 0 else find(ledger.blocks.table, key)


@array_function
def _make_block(ledger, key):
    """Entry of a block that is not where it was expected, entered if that is the ledger's to do; or -1."""
    blocks = ledger.blocks
    if blocks.tally[IS_SHARED]:
        return find(blocks.table, key)
    entry, is_new = find_or_insert(blocks.table, key)
    if is_new and entry >= 0:
        blocks.columns[entry, STATE] = np.uint32(0)  # a clear leaves what was there
    return entry


@array_helper
def _pick_up(ledger, entry, block_hash, sequence_hash, parent):
    """A block that lay nowhere is about to be stored: the page that it carries is entered if that is unknown.

    Returns the block's entry; -1: the ledger is full.
    """
    page, is_new = find_or_insert(ledger.pages, sequence_hash)
    if page < 0:
        if ledger.blocks.tally[IS_SHARED] == 0:
            remove(ledger.blocks.table, entry)
        return page
    if is_new:
        ledger.page_words[page, PARENT] = parent
        ledger.page_words[page, FIRST_BLOCK] = block_hash
    ledger.blocks.columns[entry, PAGE] = np.uint32(page)
    ledger.blocks.tally[HELD] += 1
    return entry


@array_helper
def _lay_down(ledger, entry, page):
    """A block lies nowhere any more."""
    blocks = ledger.blocks
    blocks.tally[HELD] -= 1
    if blocks.columns[entry, STATE] == 0:
        remove(blocks.table, entry)
    if ledger.page_media[page] == 0:
        remove(ledger.pages, page)


@array_helper
def _enter_block(ledger, expected_after, key, block_hash, sequence_hash, parent):
    """Entry of a block that carries its page, both entered if they are unknown. -1: the ledger is full."""
    entry = _expected_block(ledger, expected_after, key)
    if entry < 0:
        entry = _make_block(ledger, key)
    if entry >= 0 and not is_held(ledger.blocks, entry):
        entry = _pick_up(ledger, entry, block_hash, sequence_hash, parent)
    return entry


@array_function
def _parent_name(ledger, key):
    """Sequence hash of a parent block, or 0 with a count."""
    entry = find(ledger.blocks.table, key)
    if entry >= 0 and is_held(ledger.blocks, entry):
        return ledger.pages.keys[np.int64(ledger.blocks.columns[entry, PAGE])]
    ledger.counts[_PARENT_UNKNOWN] += 1
    return _NO_HASH


@array_helper
def _add_copy(ledger, page, medium):
    """One more block carries the page on a medium. True: the first one."""
    ledger.page_copies[medium, page] += np.uint32(1)
    if ledger.page_copies[medium, page] > 1:
        ledger.counts[_STORED_AGAIN] += 1
        return False
    ledger.page_media[page] |= np.uint8(1 << medium)
    ledger.page_changed[page >> SLICE_BITS] = True
    add_page(ledger.digest, medium, ledger.pages.keys[page])
    ledger.counts[_STORED] += 1
    return True


@array_helper
def _drop_copy(ledger, page, medium):
    """One block less carries the page on a medium. True: it was the last one."""
    ledger.page_copies[medium, page] -= np.uint32(1)
    if ledger.page_copies[medium, page] > 0:
        return False
    ledger.page_media[page] &= np.uint8(~(1 << medium))
    ledger.page_changed[page >> SLICE_BITS] = True
    remove_page(ledger.digest, medium, ledger.pages.keys[page])
    ledger.counts[_REMOVED] += 1
    return True


@array_helper
def _store_block(ledger, queue, entry, block_hash, name, parent, medium):
    """A block that the ledger knows is on a medium. Returns the page's name and whether it became resident there."""
    page = np.int64(ledger.blocks.columns[entry, PAGE])
    if ledger.pages.keys[page] != name:  # a block keeps its first name as long as it is held
        ledger.counts[_RENAMED] += 1
        name = ledger.pages.keys[page]
    bit = np.uint32(1 << medium)
    if ledger.blocks.columns[entry, STATE] & bit:
        ledger.counts[_STORED_AGAIN] += 1
        return name, False
    ledger.blocks.columns[entry, STATE] |= bit
    is_new = _add_copy(ledger, page, medium)
    if is_new:
        _queue_store(ledger, queue, page, medium, name, block_hash, parent)
    return name, is_new


@array_helper
def _store(ledger, queue, pages, start, stop, parent, salt, medium, queued, entry):
    """Pages of one event. entry: that of the block stored before, where the first one is looked for first.

    Returns the last page's name and its block's entry.
    """
    block_hashes, hashes = pages.block_hashes, pages.hashes
    name, is_shared = parent, ledger.blocks.tally[IS_SHARED] != 0
    for i in range(start, stop):
        ahead = i + AHEAD
        if ahead < block_hashes.shape[0]:
            if not is_shared:  # else it was touched when the block was named
                fetch(ledger.blocks.table, block_hashes[ahead] ^ salt)
            fetch(ledger.pages, hashes[ahead])
        key, name = block_hashes[i] ^ salt, hashes[i]
        entry = _enter_block(ledger, entry, key, block_hashes[i], name, parent)
        if entry < 0:
            ledger.counts[_LEDGER_FULL] += 1
        else:
            name, queued[i] = _store_block(ledger, queue, entry, block_hashes[i], name, parent, medium)
        parent = name
    return name, entry


@array_helper
def _find_blocks(ledger, block_hashes, start, stop, salt, entry):
    """Note the entries of blocks, and have the memory by which their pages are removed brought near.

    entry: that of the block before. Returns the last one's.
    """
    is_shared = ledger.blocks.tally[IS_SHARED] != 0
    for i in range(start, stop):
        if i + AHEAD < block_hashes.shape[0] and not is_shared:  # else the entry stays, and is next to the one before
            fetch(ledger.blocks.table, block_hashes[i + AHEAD] ^ salt)
        entry = _find_block(ledger, entry, block_hashes[i] ^ salt)
        ledger.found[i - start] = entry
        if entry >= 0 and is_held(ledger.blocks, entry):
            fetch(ledger.pages, ledger.pages.keys[np.int64(ledger.blocks.columns[entry, PAGE])])
    return entry


@array_helper
def _remove_block(ledger, queue, entry, block_hash, medium):
    """entry: as it was found before others were removed. One that was named twice has no state by now."""
    bit = np.uint32(1 << medium)
    if entry < 0 or ledger.blocks.columns[entry, STATE] & bit == 0:
        ledger.counts[_REMOVED_UNKNOWN] += 1
        return
    page = np.int64(ledger.blocks.columns[entry, PAGE])
    if _drop_copy(ledger, page, medium):
        _queue_removal(ledger, queue, page, medium, block_hash)
    ledger.blocks.columns[entry, STATE] &= ~bit
    if not is_held(ledger.blocks, entry):
        _lay_down(ledger, entry, page)


@array_helper
def _remove(ledger, queue, block_hashes, start, stop, salt, medium, entry):
    """Pages of one event. Returns the last block's entry, behind which the next event's first one is looked for."""
    for first in range(start, stop, FOUND_BLOCKS):
        end = min(first + FOUND_BLOCKS, stop)
        entry = _find_blocks(ledger, block_hashes, first, end, salt, entry)
        for i in range(first, end):
            _remove_block(ledger, queue, ledger.found[i - first], block_hashes[i], medium)
    return entry


# --- entry points -------------------------------------------------------------------------------------------------


@array_kernel(types.void, LedgerArrays, QueueArrays, U8Input, spread(StoredColumns), types.uint64, BoolVector)
def change_pages(ledger, queue, kinds, pages, salt, queued):
    """Take the events of one namespace in their order: enter stored pages, take removed ones off their medium, and
    queue those that became resident or left.

    kinds: uint8[m], medium of a store, REMOVAL + medium, or anything larger: an event to pass over. pages: m events.
    salt: of the namespace. queued: bool[n], set where a stored page became resident on the medium.
    """
    previous_key, previous_name, is_held = _NO_HASH, _NO_HASH, False  # of the page stored last
    stored, removed = np.int64(-1), np.int64(-1)
    start = event = 0
    while event < pages.lengths.shape[0]:
        kind, stop = np.int64(kinds[event]), start + pages.lengths[event]
        if kind < REMOVAL:
            parent = _NO_HASH
            if pages.has_parent[event]:
                key = pages.parents[event] ^ salt
                parent = previous_name if is_held and key == previous_key else _parent_name(ledger, key)
            name, stored = _store(ledger, queue, pages, start, stop, parent, salt, kind, queued, stored)
            if stop > start:
                previous_key, previous_name, is_held = pages.block_hashes[stop - 1] ^ salt, name, True
        elif kind < CLEARED:
            while event + 1 < pages.lengths.shape[0] and kinds[event + 1] == kind:  # small ones in a row: one large one
                event += 1
                stop += pages.lengths[event]
            removed = _remove(ledger, queue, pages.block_hashes, start, stop, salt, kind - REMOVAL, removed)
            is_held = False
        start = stop
        event += 1


@array_kernel(types.int64, types.uint64, spread(Table))
def find_entry(key, table):
    """Entry id of a key in a table, or -1."""
    return find(table, key)
