"""Kernels that give an engine's pages their sequence hashes and remember them. Arrays only, no Python objects.

A name is entered under the engine's hash XOR the salt of its attention group, and stays when the page is removed: a
later page may name it as its parent, a later event may say that the same hash now lies on another medium. Of the pages
that lie nowhere any more as many are remembered as ever lay somewhere at a time, but not fewer than 65,536, if the
bound is not lower: that goes far back in an engine's work, and keeps the table near to what fits a processor's caches.
Which one is forgotten is up to CLOCK (Corbato, 1968): one that nobody asked for since the hand last came by.

One hash may be said of pages with different seeds (SGLang does not mix the salt into its hashes). The first one is
entered under the hash itself, the others, *variants*, under the hash XOR their mixed seed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import types

from bridge.decoding.runs import PageEvents
from kv_events.digest import mix
from kv_events.kernels import array_function, array_helper, array_kernel
from kv_events.page_table import Table
from kv_events.page_table_kernels import (
    AHEAD,
    fetch,
    find,
    find_or_insert,
    insert,
    num_entries,
    remove,
    was_used,
)
from kv_events.xxh3 import hash_pair
from publisher.blocks import ASKED_FOR, BLOCK_ARRAYS, HELD, MOST_HELD, REMEMBERED, STATE, Blocks, is_held

# elements of cursor: the event to go on with, places in input and output, and pages by what was special about them
EVENT, PAGE_IN, LOCAL_IN, PAGE_OUT, NUM_UNKNOWN, NUM_SPECIAL = range(6)
NUM_CURSORS = 6

# flags of a page that was given a name, as bits
PLAIN, VARIANT, RENAMED = 0, 1, 2

# elements of clock: where the hand stands; most names of pages that lie nowhere; 1: there may be variants
HAND, MOST_IDLE, HAS_VARIANTS = range(3)

_NO_HASH = np.uint64(0)
_FEWEST_IDLE = 65_536
"""Names of pages that lie nowhere are not forgotten below that, if there is room."""
_AT_A_TIME = 4096
"""Names that are forgotten by a call beyond two for each page that it names, so that no call takes long."""
_MOST_FORGOTTEN = 4
"""To find room for one name. A table may be full in one segment only; then the page is left out."""


class NameArrays(NamedTuple):
    """What the bridge remembers of one worker's pages; columns by the table's entry ids."""

    blocks: Blocks
    """Shared with the ledger, which says which pages lie somewhere."""
    names: npt.NDArray[np.uint64]
    """[capacity + 1] sequence hash."""
    seeds: npt.NDArray[np.uint64]
    """[capacity + 1] seed of the page's namespace, which its children inherit."""
    groups: npt.NDArray[np.uint16]
    """[capacity + 1] number of the attention group, or of whatever else keeps equal hashes apart."""
    clock: npt.NDArray[np.int64]
    """[3] see HAND, MOST_IDLE, HAS_VARIANTS."""


class Named(NamedTuple):
    """Columns that `name_pages` writes: pages that got a name, removed ones, and all events, some of them empty."""

    bases: npt.NDArray[np.uint64]
    """The engine's hashes."""
    block_hashes: npt.NDArray[np.uint64]
    """Those that the ledger is to know them by: others for variants."""
    names: npt.NDArray[np.uint64]
    flags: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.int64]
    parents: npt.NDArray[np.uint64]
    has_parent: npt.NDArray[np.uint8]


_U64, _U64_IN = types.uint64[::1], types.Array(types.uint64, 1, "C", readonly=True)
_I64, _U8 = types.int64[::1], types.uint8[::1]
_NAMES = (*BLOCK_ARRAYS, _U64, _U64, types.uint16[::1], _I64)


@array_helper
def _num_idle(blocks):
    """Names of pages that lie nowhere."""
    return num_entries(blocks.table) - blocks.tally[HELD]


@array_helper
def _forget_one(arrays):
    """Let the hand go on to a page that lies nowhere and was not asked for, and forget its name. There is one."""
    blocks, clock = arrays.blocks, arrays.clock
    while True:
        entry = clock[HAND] + 1
        if not was_used(blocks.table, entry):
            entry = np.int64(0)
        clock[HAND] = entry
        if was_used(blocks.table, entry + AHEAD):
            fetch(blocks.table, blocks.table.keys[entry + AHEAD])
        state = blocks.columns[entry, STATE]
        if state == np.uint32(REMEMBERED):
            remove(blocks.table, entry)
            blocks.columns[entry, STATE] = np.uint32(0)
            return
        if state != 0 and not is_held(blocks, entry):
            blocks.columns[entry, STATE] = np.uint32(REMEMBERED)


@array_helper
def _tidy_up(arrays, num_pages):
    """Forget what is beyond the names that are to be remembered, before so many pages are named.

    Not while the ledger has still to hear of some.
    """
    blocks = arrays.blocks
    blocks.tally[MOST_HELD] = max(blocks.tally[MOST_HELD], blocks.tally[HELD])
    most = min(arrays.clock[MOST_IDLE], max(np.int64(_FEWEST_IDLE), blocks.tally[MOST_HELD]))
    for _ in range(min(_num_idle(blocks) - most, _AT_A_TIME + 2 * num_pages)):
        _forget_one(arrays)


@array_helper
def _write(arrays, entry, name, seed, group):
    arrays.names[entry], arrays.seeds[entry], arrays.groups[entry] = name, seed, group
    arrays.blocks.columns[entry, STATE] = np.uint32(REMEMBERED)


@array_function
def _remember(arrays, key, name, seed, group):
    """Enter an absent name, in place of others if there is no room."""
    blocks = arrays.blocks
    entry = insert(blocks.table, key)
    for _ in range(_MOST_FORGOTTEN):
        if entry >= 0 or _num_idle(blocks) == 0:
            break
        _forget_one(arrays)
        entry = insert(blocks.table, key)
    if entry >= 0:
        _write(arrays, entry, name, seed, group)


@array_helper
def _ask_for(arrays, entry):
    arrays.blocks.columns[entry, STATE] |= np.uint32(ASKED_FOR)


@array_helper
def _enter_again(arrays, entry, name):
    """A page that is remembered. Whether it meant another one until now."""
    _ask_for(arrays, entry)
    is_renamed = arrays.names[entry] != name
    arrays.names[entry] = name
    return RENAMED if is_renamed else PLAIN


@array_function
def _enter_variant(arrays, block_hash, salt, group, name, seed):
    """Remember a page whose hash is another page's, too."""
    key = block_hash ^ mix(seed) ^ salt
    entry = find(arrays.blocks.table, key)
    if entry >= 0:
        return VARIANT | _enter_again(arrays, entry, name)
    _remember(arrays, key, name, seed, group)
    arrays.clock[HAS_VARIANTS] = 1
    return VARIANT


@array_function
def _is_left_alone(arrays, key, seed):
    """Whether a page was a variant of one that is forgotten by now."""
    return find(arrays.blocks.table, key) < 0 and find(arrays.blocks.table, key ^ mix(seed)) >= 0


@array_helper
def _enter(arrays, block_hash, salt, group, name, seed):
    """Remember a page. Returns the hash that the ledger is to know it by, and a flag."""
    flag, key = PLAIN, block_hash ^ salt
    if arrays.clock[HAS_VARIANTS] and _is_left_alone(arrays, key, seed):
        flag = _enter_variant(arrays, block_hash, salt, group, name, seed)
        block_hash ^= mix(seed)
    else:
        entry, is_new = find_or_insert(arrays.blocks.table, key)
        if entry < 0:
            _remember(arrays, key, name, seed, group)
        elif is_new:
            _write(arrays, entry, name, seed, group)
        elif arrays.seeds[entry] == seed:
            flag = _enter_again(arrays, entry, name)
        else:
            flag = _enter_variant(arrays, block_hash, salt, group, name, seed)
            block_hash ^= mix(seed)
    return block_hash, flag


@array_function
def _recall(arrays, block_hash, salt, seed, is_stated):
    """Entry of a page of this seed; where the seed was only assumed, of any: -1 if there is none.

    Returns the hash that the ledger knows the page by, too.
    """
    entry = find(arrays.blocks.table, block_hash ^ salt)
    if entry < 0 or arrays.seeds[entry] != seed:
        variant = block_hash ^ mix(seed)
        other = find(arrays.blocks.table, variant ^ salt)
        if other >= 0 and arrays.seeds[other] == seed:
            entry, block_hash = other, variant
        elif is_stated:
            entry = np.int64(-1)
    if entry >= 0:
        _ask_for(arrays, entry)
    return entry, block_hash


@array_helper
def _arrays(keys, directory, slots, segments, meta, columns, tally, names, seeds, groups, clock):
    blocks = Blocks(Table(keys, directory, slots, segments, meta), columns, tally)
    return NameArrays(blocks, names, seeds, groups, clock)


@array_helper
def _name_event(arrays, out, cursor, pages, event, local, salt, group, seed, base, parent_name, has_parent):
    block_hashes = pages.block_hashes
    first, first_local, place = cursor[PAGE_IN], cursor[LOCAL_IN], cursor[PAGE_OUT]
    name = parent_name
    for i in range(pages.lengths[event]):
        ahead = first + i + AHEAD
        if ahead < block_hashes.shape[0]:
            fetch(arrays.blocks.table, block_hashes[ahead] ^ salt)
        is_child = has_parent or i > 0
        name = hash_pair(name, local[first_local + i], base) if is_child else local[first_local + i]
        block_hash, flag = _enter(arrays, block_hashes[first + i], salt, group, name, seed)
        out.bases[place] = block_hashes[first + i]
        out.block_hashes[place], out.names[place], out.flags[place] = block_hash, name, flag
        if flag != PLAIN:
            cursor[NUM_SPECIAL] += 1
        place += 1
    cursor[PAGE_OUT] = place


@array_function
def _pass_on(out, cursor, block_hashes, num_pages):
    """Removed pages."""
    first, place = cursor[PAGE_IN], cursor[PAGE_OUT]
    for i in range(num_pages):
        out.bases[place + i] = out.block_hashes[place + i] = block_hashes[first + i]
        out.names[place + i], out.flags[place + i] = _NO_HASH, PLAIN
    cursor[PAGE_OUT] = place + num_pages


@array_helper
def _name_pages(arrays, out, cursor, pages, local, seeds, seed, base, is_stated, salt, group):
    for event in range(cursor[EVENT], pages.lengths.shape[0]):
        num_pages = pages.lengths[event]
        out.lengths[event], out.has_parent[event] = num_pages, 0
        if pages.is_removal[event]:
            _pass_on(out, cursor, pages.block_hashes, num_pages)
            cursor[PAGE_IN] += num_pages
            continue
        needed, parent_name, has_parent = seed, _NO_HASH, pages.has_parent[event]
        entry = np.int64(0)
        if has_parent:
            entry, parent_hash = _recall(arrays, pages.parents[event], salt, seed, is_stated)
            if entry >= 0:
                needed, parent_name = arrays.seeds[entry], arrays.names[entry]
                out.parents[event], out.has_parent[event] = parent_hash, 1
        if entry < 0:
            cursor[NUM_UNKNOWN] += num_pages
            out.lengths[event] = 0
        elif needed != seeds[event]:
            seeds[event] = needed
            cursor[EVENT] = event
            return event
        else:
            _name_event(arrays, out, cursor, pages, event, local, salt, group, needed, base, parent_name, has_parent)
        cursor[PAGE_IN] += num_pages
        cursor[LOCAL_IN] += num_pages
    return pages.lengths.shape[0]


# --- entry points: bare arrays in -----------------------------------------------------------------------------------


@array_kernel(
    types.int64(
        _U64_IN, _I64, _U64, _U8, _U8, _U64, _U64, types.uint64, types.uint64, types.boolean, types.uint64,
        types.uint16, _I64, _U64, _U64, _U64, _U8, _I64, _U64, _U8, *_NAMES,
    )
)  # fmt: skip
def name_pages(
    block_hashes, lengths, parents, has_parent, is_removal, local, seeds, seed, base, is_stated, salt, group, cursor,
    out_bases, out_block_hashes, out_names, out_flags, out_lengths, out_parents, out_has_parent,
    keys, directory, slots, segments, meta, columns, tally, names, name_seeds, groups, clock,
):  # fmt: skip
    """Name the pages of stores, pass removed ones on. Returns the event where it stopped; the number of events: done.

    block_hashes, lengths, parents, has_parent, is_removal: see `PageEvents`, m events.
    local: uint64[stored pages], their local hashes by `seeds` (uint64[m], one an event). seed: that of the events' own
    words; a child inherits its parent's instead, unless the events' words are the whole truth (is_stated). An event
    whose local hashes were made with another seed than it needs is returned, with the right one put into `seeds`: hash
    its pages anew and call again. base: seed that pages are rolled with, whatever their own. cursor: int64[6], zeros at
    first. out_*: see `Named`; as long as the input.
    """
    arrays = _arrays(keys, directory, slots, segments, meta, columns, tally, names, name_seeds, groups, clock)
    out = Named(out_bases, out_block_hashes, out_names, out_flags, out_lengths, out_parents, out_has_parent)
    pages = PageEvents(block_hashes, lengths, parents, has_parent, is_removal)
    if cursor[EVENT] == 0:
        _tidy_up(arrays, local.shape[0])
    return _name_pages(arrays, out, cursor, pages, local, seeds, seed, base, is_stated, salt, group)


@array_kernel(types.int64(_U64_IN, types.uint64, types.boolean, types.uint64, _U64, _U64, _U64, *_NAMES))
def recall_pages(
    block_hashes, seed, is_stated, salt, out_bases, out_block_hashes, out_names,
    keys, directory, slots, segments, meta, columns, tally, names, name_seeds, groups, clock,
):  # fmt: skip
    """Names of pages by the engine's hashes alone. Returns how many are known, which fill columns of `Named`."""
    arrays = _arrays(keys, directory, slots, segments, meta, columns, tally, names, name_seeds, groups, clock)
    known = 0
    for i in range(block_hashes.shape[0]):
        entry, block_hash = _recall(arrays, block_hashes[i], salt, seed, is_stated)
        if entry >= 0:
            out_bases[known], out_block_hashes[known] = block_hashes[i], block_hash
            out_names[known] = arrays.names[entry]
            known += 1
    return known


@array_kernel(types.void(_U64_IN, _U64_IN, types.uint64, types.uint64, types.uint16, _U64, _U8, *_NAMES))
def enter_pages(
    block_hashes, page_names, seed, salt, group, out_block_hashes, out_flags,
    keys, directory, slots, segments, meta, columns, tally, names, name_seeds, groups, clock,
):  # fmt: skip
    """Remember pages whose names the engine gave itself."""
    arrays = _arrays(keys, directory, slots, segments, meta, columns, tally, names, name_seeds, groups, clock)
    _tidy_up(arrays, block_hashes.shape[0])
    for i in range(block_hashes.shape[0]):
        out_block_hashes[i], out_flags[i] = _enter(arrays, block_hashes[i], salt, group, page_names[i], seed)
