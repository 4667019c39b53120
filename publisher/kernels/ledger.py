"""Kernels of the ledger. They use arrays only, no Python objects.

The ledger has two tables of `kv_events.kernels.page_table`. *Blocks* are pages by the engine's identifier, see
`publisher.kernels.blocks`. *Pages* are pages by sequence hash. Several blocks may carry the same page, for example
multimodal prompts with equal tokens, or copies with two block hashes. A page counts once per medium, because the
indexer keeps a set; the digest is also that of a set.
"""

from typing import NamedTuple

from kv_events.digest import add_page, remove_page
from kv_events.kernels.bundles import (
    BoolVector,
    I64Vector,
    Spread,
    U8Vector,
    U32Matrix,
    U32Vector,
    U64Input,
    U64Matrix,
    U64Vector,
)
from kv_events.kernels.declare import helper, inline_helper, kernel
from kv_events.kernels.numbers import U32, U64, int64, uint8, uint32, uint64
from kv_events.kernels.page_table import Table
from kv_events.kernels.page_table_ops import AHEAD, fetch, find, find_or_insert, remove, was_used
from kv_events.schema import NUM_MEDIA
from publisher.kernels.blocks import COPIED, HELD, IS_SHARED, PAGE, STATE, Blocks, is_held
from publisher.kernels.changes import CLEARED, COPY_REMOVAL, REMOVAL, SPAN, QueueArrays, append
from publisher.kernels.events import PageEvents

# columns of page_words
PARENT, FIRST_BLOCK = range(2)

SLICE_BITS = 12
SLICE_PAGES = 1 << SLICE_BITS
"""Number of pages copied in one step."""

FOUND_BLOCKS = 64
"""Number of blocks that are looked up before the first is removed, so that the memory of their pages is prefetched."""

COUNT_NAMES = (
    "stored",
    "removed",
    "stored_again",
    "removed_unknown",
    "ledger_full",
    "kept_first_hash",
    "parent_unknown",
)
"""Names of the elements of `counts`: total pages by result."""
_STORED, _REMOVED, _STORED_AGAIN, _REMOVED_UNKNOWN, NUM_LEFT_OUT, _KEPT_FIRST_HASH, _PARENT_UNKNOWN = range(
    len(COUNT_NAMES)
)

_NO_HASH = uint64(0)
_MEDIA_BITS = uint32(NUM_MEDIA)
_SPAN_MASK = uint32(2**32 - 2**NUM_MEDIA)


class LedgerArrays(NamedTuple):
    """What the worker holds. A column whose name begins with `page` is indexed by the entries of `pages`."""

    blocks: Blocks
    pages: Table
    page_media: U8Vector
    """[capacity] bit m is set if the page is held on medium m: `num_groups` blocks carry it there. 0 for a free entry
    too."""
    page_copies: U32Matrix
    """[4, capacity] number of blocks that carry the page, per medium. 0 for a free entry."""
    page_words: U64Matrix
    """[capacity, 2] sequence hash of the parent (0 if there is none or it is unknown); block hash of the first block
    that carried the page."""
    page_stored_in: U32Vector
    """[capacity] when the page was last queued as stored. The upper 28 bits are the number of the span modulo 2**28.
    Bit m of the lower four bits is set if the page was stored on medium m in that span."""
    page_changed: BoolVector
    """[capacity / SLICE_PAGES, rounded up] whether `page_media` changed in the slice since it was last copied."""
    num_groups: I64Vector
    """[1] attention groups that must all hold a page."""
    found: I64Vector
    """[FOUND_BLOCKS] scratch space for the entries of blocks that are about to be removed."""
    digest: U64Vector
    """[8] see `kv_events.digest`."""
    counts: I64Vector
    """[7] see `COUNT_NAMES`."""
    queue: QueueArrays
    """Receives each page that becomes resident or is removed."""


@inline_helper
def _span_mark(ledger: LedgerArrays) -> U32:
    """Return the number of the current span in the format of `page_stored_in`, without media bits."""
    return uint32(uint32(ledger.queue.cursors[SPAN]) << _MEDIA_BITS)  # numba shifts into 64 bits


@inline_helper
def _queue_store(ledger: LedgerArrays, page: int, medium: int, name: U64, block_hash: U64, parent: U64) -> None:
    stored_in = ledger.page_stored_in[page]
    if stored_in & _SPAN_MASK != _span_mark(ledger):
        stored_in = _span_mark(ledger)
    ledger.page_stored_in[page] = stored_in | uint32(1 << medium)
    append(ledger.queue, medium, name, block_hash, parent)


@inline_helper
def _queue_removal(ledger: LedgerArrays, page: int, medium: int, block_hash: U64) -> None:
    """Queue a removal. A new span begins if the page was stored on the medium in the current span.

    This is necessary because the removals of a span may be sent before its stores.
    """
    stored_in = ledger.page_stored_in[page]
    if stored_in & _SPAN_MASK == _span_mark(ledger) and stored_in & uint32(1 << medium):
        ledger.queue.cursors[SPAN] += 1
    append(ledger.queue, REMOVAL + medium, ledger.pages.keys[page], block_hash, _NO_HASH)


@inline_helper
def _is_block(ledger: LedgerArrays, entry: int, key: U64) -> bool:
    blocks = ledger.blocks
    is_used = was_used(blocks.table, entry) and blocks.table.keys[entry] == key
    return is_used and blocks.columns[entry, STATE] != 0


@inline_helper
def _expected_block(ledger: LedgerArrays, expected_after: int, key: U64) -> int:
    """Return the block's entry if it directly follows or precedes `expected_after` (-1 if unknown), otherwise -1.

    Entries are reused in the order in which they were freed, and engines evict the last pages of a prompt first.
    Therefore, the entries of a prompt may be in descending order.
    """
    entry = expected_after + 1
    if _is_block(ledger, entry, key):
        return entry
    entry = expected_after - 1
    return entry if entry >= 0 and _is_block(ledger, entry, key) else int64(-1)


@helper
def _find_or_insert_block(ledger: LedgerArrays, key: U64) -> int:
    """Return the entry of a block, or -1 if the table is full. An absent block is inserted."""
    blocks = ledger.blocks
    entry, is_new = find_or_insert(blocks.table, key)
    if is_new and entry >= 0:
        blocks.columns[entry, STATE] = uint32(0)  # a clear leaves old values
    return entry


@inline_helper
def _hold_block(ledger: LedgerArrays, entry: int, block_hash: U64, sequence_hash: U64, parent: U64) -> int:
    """Prepare a block that is on no medium for a store. Its page is inserted if it is unknown.

    Returns the block's entry, or -1 if the ledger is full.
    """
    page, is_new = find_or_insert(ledger.pages, sequence_hash)
    if page < 0:
        if ledger.blocks.tally[IS_SHARED] == 0:
            remove(ledger.blocks.table, entry)
        return page
    if is_new:
        ledger.page_words[page, PARENT] = parent
        ledger.page_words[page, FIRST_BLOCK] = block_hash
    ledger.blocks.columns[entry, PAGE] = uint32(page)
    ledger.blocks.tally[HELD] += 1
    return entry


@inline_helper
def _release_block(ledger: LedgerArrays, entry: int, page: int) -> None:
    """Release a block that is no longer on any medium, and its page if no other block carries it."""
    ledger.blocks.tally[HELD] -= 1
    if ledger.blocks.tally[IS_SHARED] == 0:
        remove(ledger.blocks.table, entry)
    if ledger.page_media[page] == 0 and (ledger.num_groups[0] == 1 or _has_no_block(ledger, page)):
        remove(ledger.pages, page)


@inline_helper
def _has_no_block(ledger: LedgerArrays, page: int) -> bool:
    num_blocks = uint32(0)
    for medium in range(NUM_MEDIA):
        num_blocks |= ledger.page_copies[medium, page]
    return num_blocks == 0


@inline_helper
def _enter_block(
    ledger: LedgerArrays, expected_after: int, key: U64, block_hash: U64, sequence_hash: U64, parent: U64
) -> int:
    """Return the entry of a block, or -1 if there is no room for it.

    Its page is inserted if it is unknown, and the block itself if the ledger owns the table.
    """
    entry = _expected_block(ledger, expected_after, key)
    if entry < 0:
        entry = find(ledger.blocks.table, key) if ledger.blocks.tally[IS_SHARED] else _find_or_insert_block(ledger, key)
    if entry >= 0 and not is_held(ledger.blocks, entry):
        entry = _hold_block(ledger, entry, block_hash, sequence_hash, parent)
    return entry


@helper
def _parent_name(ledger: LedgerArrays, key: U64) -> U64:
    """Return the sequence hash of a parent block. An unknown parent is counted and returns 0."""
    entry = find(ledger.blocks.table, key)
    if entry >= 0 and is_held(ledger.blocks, entry):
        return ledger.pages.keys[int64(ledger.blocks.columns[entry, PAGE])]
    ledger.counts[_PARENT_UNKNOWN] += 1
    return _NO_HASH


@inline_helper
def _add_copy(ledger: LedgerArrays, page: int, medium: int) -> bool:
    """Count one more block that carries the page on a medium. Returns True if the page is now held there."""
    ledger.page_copies[medium, page] += uint32(1)
    if ledger.page_copies[medium, page] != ledger.num_groups[0]:
        ledger.counts[_STORED_AGAIN] += 1
        return False
    ledger.page_media[page] |= uint8(1 << medium)
    ledger.page_changed[page >> SLICE_BITS] = True
    add_page(ledger.digest, medium, ledger.pages.keys[page])
    ledger.counts[_STORED] += 1
    return True


@inline_helper
def _drop_copy(ledger: LedgerArrays, page: int, medium: int) -> bool:
    """Count one block less that carries the page on a medium. Returns True if the page is no longer held there."""
    ledger.page_copies[medium, page] -= uint32(1)
    if ledger.page_copies[medium, page] != ledger.num_groups[0] - 1:
        return False
    _leave_medium(ledger, page, medium)
    return True


@inline_helper
def _leave_medium(ledger: LedgerArrays, page: int, medium: int) -> None:
    ledger.page_media[page] &= uint8(~(1 << medium))
    ledger.page_changed[page >> SLICE_BITS] = True
    remove_page(ledger.digest, medium, ledger.pages.keys[page])
    ledger.counts[_REMOVED] += 1


@inline_helper
def _add_to_block(blocks: Blocks, entry: int, medium: int) -> None:
    """Count one more copy of a block."""
    if blocks.columns[entry, STATE] & uint32(COPIED) == 0:
        blocks.columns[entry, STATE] |= uint32(COPIED)
        blocks.more_copies[entry, :] = uint32(0)  # values of an earlier life
    blocks.more_copies[entry, medium] += uint32(1)


@inline_helper
def _take_from_block(blocks: Blocks, entry: int, medium: int, is_copy: bool) -> bool:
    """Take one copy of a block away, or all. Returns whether the block is still on the medium."""
    if blocks.columns[entry, STATE] & uint32(COPIED) == 0 or blocks.more_copies[entry, medium] == 0:
        return False
    blocks.more_copies[entry, medium] = blocks.more_copies[entry, medium] - uint32(1) if is_copy else uint32(0)
    return is_copy


@inline_helper
def _store_block(
    ledger: LedgerArrays, entry: int, block_hash: U64, name: U64, parent: U64, medium: int
) -> tuple[U64, bool]:
    """Store a known block on a medium.

    Returns the sequence hash of its page and whether the page became resident on the medium.
    """
    page = int64(ledger.blocks.columns[entry, PAGE])
    if ledger.pages.keys[page] != name:  # a block keeps its first sequence hash while it is held
        ledger.counts[_KEPT_FIRST_HASH] += 1
        name = ledger.pages.keys[page]
    bit = uint32(1 << medium)
    if ledger.blocks.columns[entry, STATE] & bit:
        _add_to_block(ledger.blocks, entry, medium)
        ledger.counts[_STORED_AGAIN] += 1
        return name, False
    ledger.blocks.columns[entry, STATE] |= bit
    is_new = _add_copy(ledger, page, medium)
    if is_new:
        _queue_store(ledger, page, medium, name, block_hash, parent)
    return name, is_new


@inline_helper
def _store(
    ledger: LedgerArrays,
    pages: PageEvents,
    start: int,
    stop: int,
    parent: U64,
    salt: U64,
    medium: int,
    queued: BoolVector,
    entry: int,
) -> tuple[U64, int]:
    """Store the pages of one event.

    entry: entry of the block stored before, next to which the first block is expected. Returns the sequence hash of
    the last page and the entry of its block.
    """
    block_hashes, hashes, name = pages.block_hashes, pages.hashes, parent
    for i in range(start, stop):
        ahead = i + AHEAD
        if ahead < block_hashes.shape[0]:
            if ledger.blocks.tally[IS_SHARED] == 0:  # the owner of a shared table has just accessed the block
                fetch(ledger.blocks.table, block_hashes[ahead] ^ salt)
            fetch(ledger.pages, hashes[ahead])
        key, name = block_hashes[i] ^ salt, hashes[i]
        entry = _enter_block(ledger, entry, key, block_hashes[i], name, parent)
        if entry < 0:
            ledger.counts[NUM_LEFT_OUT] += 1
        else:
            name, queued[i] = _store_block(ledger, entry, block_hashes[i], name, parent, medium)
        parent = name
    return name, entry


@inline_helper
def _find_blocks(ledger: LedgerArrays, block_hashes: U64Input, start: int, stop: int, salt: U64, entry: int) -> int:
    """Write the entries of blocks to `found` and prefetch the memory needed to remove their pages.

    entry: entry of the block before. Returns the entry of the last block.
    """
    for i in range(start, stop):
        if (
            i + AHEAD < block_hashes.shape[0] and ledger.blocks.tally[IS_SHARED] == 0
        ):  # entries of a shared table stay adjacent
            fetch(ledger.blocks.table, block_hashes[i + AHEAD] ^ salt)
        key = block_hashes[i] ^ salt
        expected = _expected_block(ledger, entry, key)
        entry = expected if expected >= 0 else find(ledger.blocks.table, key)
        ledger.found[i - start] = entry
        if entry >= 0 and is_held(ledger.blocks, entry):
            fetch(ledger.pages, ledger.pages.keys[int64(ledger.blocks.columns[entry, PAGE])])
    return entry


@inline_helper
def _remove_block(ledger: LedgerArrays, entry: int, block_hash: U64, medium: int, is_copy: bool) -> None:
    """Remove one copy of a block from a medium, or all copies.

    entry: the entry found before other blocks of the event were removed. If the event contains the block twice, its
    state no longer has the bit of the medium.
    """
    bit = uint32(1 << medium)
    if entry < 0 or ledger.blocks.columns[entry, STATE] & bit == 0:
        ledger.counts[_REMOVED_UNKNOWN] += 1
        return
    if _take_from_block(ledger.blocks, entry, medium, is_copy):
        return
    page = int64(ledger.blocks.columns[entry, PAGE])
    if _drop_copy(ledger, page, medium):
        _queue_removal(ledger, page, medium, block_hash)
    ledger.blocks.columns[entry, STATE] &= ~bit
    if not is_held(ledger.blocks, entry):
        ledger.blocks.columns[entry, STATE] &= ~uint32(COPIED)
        _release_block(ledger, entry, page)


@inline_helper
def _remove(
    ledger: LedgerArrays,
    block_hashes: U64Input,
    start: int,
    stop: int,
    salt: U64,
    medium: int,
    entry: int,
    is_copy: bool,
) -> int:
    """Remove the pages of one event.

    Returns the entry of the last block, next to which the first block of the next event is expected.
    """
    for first in range(start, stop, FOUND_BLOCKS):
        end = min(first + FOUND_BLOCKS, stop)
        entry = _find_blocks(ledger, block_hashes, first, end, salt, entry)
        for i in range(first, end):
            _remove_block(ledger, ledger.found[i - first], block_hashes[i], medium, is_copy)
    return entry


# --- entry points -------------------------------------------------------------------------------------------------


@kernel
def change_pages(ledger: LedgerArrays, pages: Spread[PageEvents], salt: U64, queued: BoolVector) -> None:
    """Apply the events of one namespace in order, and queue each page that became resident or was removed.

    pages: m events. salt: salt of the namespace. queued: bool[n], set for each stored page that became resident on
    its medium.
    """
    previous_key, previous_name, is_held = _NO_HASH, _NO_HASH, False  # the page stored last
    stored, removed = int64(-1), int64(-1)
    start = event = 0
    kinds = pages.kinds
    while event < pages.lengths.shape[0]:
        kind, stop = int64(kinds[event]), start + pages.lengths[event]
        if kind < REMOVAL:
            parent = _NO_HASH
            if pages.has_parent[event]:
                key = pages.parents[event] ^ salt
                parent = previous_name if is_held and key == previous_key else _parent_name(ledger, key)
            name, stored = _store(ledger, pages, start, stop, parent, salt, kind, queued, stored)
            if stop > start:
                previous_key, previous_name, is_held = pages.block_hashes[stop - 1] ^ salt, name, True
        elif kind < CLEARED or COPY_REMOVAL <= kind < COPY_REMOVAL + NUM_MEDIA:
            while event + 1 < pages.lengths.shape[0] and kinds[event + 1] == kind:  # merge adjacent removals
                event += 1
                stop += pages.lengths[event]
            is_copy = kind >= COPY_REMOVAL
            medium = kind - COPY_REMOVAL if is_copy else kind - REMOVAL
            removed = _remove(ledger, pages.block_hashes, start, stop, salt, medium, removed, is_copy)
            is_held = False
        start = stop
        event += 1


@kernel
def require_groups(ledger: LedgerArrays, num_entries: int) -> None:
    """Remove the pages that fewer than `num_groups` blocks carry, after that number has grown.

    num_entries: upper bound of the used entries of pages.
    """
    for page in range(num_entries):
        for medium in range(NUM_MEDIA):
            is_on_medium = ledger.page_media[page] >> uint8(medium) & uint8(1)
            if is_on_medium and ledger.page_copies[medium, page] < ledger.num_groups[0]:
                _leave_medium(ledger, page, medium)
                _queue_removal(ledger, page, medium, ledger.page_words[page, FIRST_BLOCK])


@kernel
def queue_cleared(ledger: LedgerArrays) -> None:
    """Queue a clear of all pages, in its own span."""
    ledger.queue.cursors[SPAN] += 1
    append(ledger.queue, CLEARED, _NO_HASH, _NO_HASH, _NO_HASH)
    ledger.queue.cursors[SPAN] += 1


@kernel
def find_entry(key: U64, table: Spread[Table]) -> int:
    """Return the entry of a key in a table, or -1."""
    return find(table, key)
