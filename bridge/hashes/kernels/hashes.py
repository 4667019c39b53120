"""Kernels that compute the sequence hashes of an engine's pages and remember them. They use arrays only.

A page is remembered under its engine hash XOR the salt of its hash namespace. It is still remembered after its removal,
because a later page may refer to it as its parent, and a later event may report it on another medium. The number of
remembered pages that are on no medium is limited to the largest number of pages that the worker has held at a time, but
not to less than 65,536 if the bound allows. This covers much of an engine's past work and keeps the table small enough
for the processor's caches. The CLOCK algorithm (Corbato, 1968) chooses the page to forget: one that has not been used
since the hand last passed it.

Pages with different seeds may share an engine hash, because SGLang does not mix the salt into its hashes. The first one
is remembered under the hash itself. The others *collide* and are remembered under the hash XOR their mixed seed.
"""

from typing import NamedTuple

from bridge.decoding.kernels.columns import REMOVAL
from kv_events.digest import mix
from kv_events.kernels.bundles import I64Vector, Spread, U8Vector, U16Vector, U64Input, U64Matrix, U64Vector
from kv_events.kernels.declare import helper, inline_helper, kernel
from kv_events.kernels.numbers import U8, U16, U64, int64, uint32, uint64
from kv_events.kernels.page_table_ops import (
    AHEAD,
    fetch,
    find,
    find_or_insert,
    insert,
    num_entries,
    remove,
    was_used,
)
from kv_events.kernels.xxh3 import hash_pair
from publisher.kernels.blocks import HELD, MOST_HELD, RECENTLY_USED, REMEMBERED, STATE, Blocks, is_held
from publisher.kernels.events import PageEvents

# elements of the cursor: next event, positions in input and output, and counts of unknown and ambiguous pages
EVENT, PAGE_IN, LOCAL_IN, PAGE_OUT, NUM_UNKNOWN, NUM_AMBIGUOUS = range(6)
NUM_CURSORS = 6

# flags of a translated page, as bits
UNIQUE, COLLIDING, REASSIGNED = 0, 1, 2

# elements of the clock: position of the hand; maximum number of remembered pages that are not held; 1 if there may be
# collisions
HAND, MOST_IDLE, HAS_COLLISIONS = range(3)

_NO_HASH = uint64(0)
_FEWEST_IDLE = 65_536
"""Minimum number of pages that are remembered although they are not held, if the bound allows."""
_AT_A_TIME = 4096
"""Pages that a call may forget in addition to two for each translated page. The limit keeps every call short."""
_MOST_FORGOTTEN = 4
"""Maximum number of pages forgotten to make room for one. If its segment of the table is still full, the page is left
out.
"""


class HashArrays(NamedTuple):
    """Remembered data of one worker's pages, in columns indexed by the entry ids of the table."""

    blocks: Blocks
    """Page table, shared with the ledger, which marks the pages that are held."""
    sequence_hashes: U64Vector
    """[capacity + 1]"""
    seeds: U64Vector
    """[capacity + 1] seed of the page's namespace, which its children inherit."""
    namespaces: U16Vector
    """[capacity + 1] number of the page's hash namespace."""
    clock: I64Vector
    """[3] see HAND, MOST_IDLE, HAS_COLLISIONS."""


class TranslatedColumns(NamedTuple):
    """Output of `translate_pages`: n stored and removed pages, and m events, some of which are empty."""

    engine_hashes: U64Vector
    """[n]"""
    block_hashes: U64Vector
    """[n] hashes for the ledger. They differ from the engine's hashes where pages collide."""
    sequence_hashes: U64Vector
    """[n] 0 for removed pages."""
    flags: U8Vector
    """[n] UNIQUE, or bits COLLIDING and REASSIGNED."""
    lengths: I64Vector
    """[m] pages of each event."""
    parents: U64Vector
    """[m] ledger hash of the parent of each stored event's first page."""
    has_parent: U8Vector
    """[m] whether `parents` is valid."""


@inline_helper
def _num_idle(blocks: Blocks) -> int:
    """Return the number of pages that are remembered but not held."""
    return num_entries(blocks.table) - blocks.tally[HELD]


@inline_helper
def _forget_one(arrays: HashArrays) -> None:
    """Advance the hand to a page that is not held and was not used, and forget it.

    At least one page must not be held.
    """
    blocks, clock = arrays.blocks, arrays.clock
    while True:
        entry = clock[HAND] + 1
        if not was_used(blocks.table, entry):
            entry = int64(0)
        clock[HAND] = entry
        if was_used(blocks.table, entry + AHEAD):
            fetch(blocks.table, blocks.table.keys[entry + AHEAD])
        state = blocks.columns[entry, STATE]
        if state == uint32(REMEMBERED):
            remove(blocks.table, entry)
            blocks.columns[entry, STATE] = uint32(0)
            return
        if state != 0 and not is_held(blocks, entry):
            blocks.columns[entry, STATE] = uint32(REMEMBERED)


@inline_helper
def _tidy_up(arrays: HashArrays, num_pages: int) -> None:
    """Forget pages beyond the bound, before `num_pages` are translated.

    The ledger must have applied all pages translated before.
    """
    blocks = arrays.blocks
    blocks.tally[MOST_HELD] = max(blocks.tally[MOST_HELD], blocks.tally[HELD])
    most = min(arrays.clock[MOST_IDLE], max(int64(_FEWEST_IDLE), blocks.tally[MOST_HELD]))
    for _ in range(min(_num_idle(blocks) - most, _AT_A_TIME + 2 * num_pages)):
        _forget_one(arrays)


@inline_helper
def _write(arrays: HashArrays, entry: int, sequence_hash: U64, seed: U64, namespace: U16) -> None:
    arrays.sequence_hashes[entry], arrays.seeds[entry], arrays.namespaces[entry] = sequence_hash, seed, namespace
    arrays.blocks.columns[entry, STATE] = uint32(REMEMBERED)


@helper
def _remember(arrays: HashArrays, key: U64, sequence_hash: U64, seed: U64, namespace: U16) -> None:
    """Remember a page that is not in the table. Forgets other pages if there is no room."""
    blocks = arrays.blocks
    entry = insert(blocks.table, key)
    for _ in range(_MOST_FORGOTTEN):
        if entry >= 0 or _num_idle(blocks) == 0:
            break
        _forget_one(arrays)
        entry = insert(blocks.table, key)
    if entry >= 0:
        _write(arrays, entry, sequence_hash, seed, namespace)


@inline_helper
def _mark_used(arrays: HashArrays, entry: int) -> None:
    arrays.blocks.columns[entry, STATE] |= uint32(RECENTLY_USED)


@inline_helper
def _update(arrays: HashArrays, entry: int, sequence_hash: U64) -> int:
    """Set the sequence hash of a remembered engine hash. Returns REASSIGNED if it had a different one, else UNIQUE."""
    _mark_used(arrays, entry)
    is_reassigned = arrays.sequence_hashes[entry] != sequence_hash
    arrays.sequence_hashes[entry] = sequence_hash
    return REASSIGNED if is_reassigned else UNIQUE


@helper
def _remember_collision(
    arrays: HashArrays, block_hash: U64, salt: U64, namespace: U16, sequence_hash: U64, seed: U64
) -> int:
    """Remember a page that shares its engine hash with another page."""
    key = block_hash ^ mix(seed) ^ salt
    entry = find(arrays.blocks.table, key)
    if entry >= 0:
        return COLLIDING | _update(arrays, entry, sequence_hash)
    _remember(arrays, key, sequence_hash, seed, namespace)
    arrays.clock[HAS_COLLISIONS] = 1
    return COLLIDING


@helper
def _collided_before(arrays: HashArrays, key: U64, seed: U64) -> bool:
    """Return whether the page collided with a page that has since been forgotten."""
    return find(arrays.blocks.table, key) < 0 and find(arrays.blocks.table, key ^ mix(seed)) >= 0


@inline_helper
def _remember_page(
    arrays: HashArrays, block_hash: U64, salt: U64, namespace: U16, sequence_hash: U64, seed: U64
) -> tuple[U64, int]:
    """Remember a page. Returns its ledger hash and flags."""
    flag, key = UNIQUE, block_hash ^ salt
    if arrays.clock[HAS_COLLISIONS] and _collided_before(arrays, key, seed):
        flag = _remember_collision(arrays, block_hash, salt, namespace, sequence_hash, seed)
        block_hash ^= mix(seed)
    else:
        entry, is_new = find_or_insert(arrays.blocks.table, key)
        if entry < 0:
            _remember(arrays, key, sequence_hash, seed, namespace)
        elif is_new:
            _write(arrays, entry, sequence_hash, seed, namespace)
        elif arrays.seeds[entry] == seed:
            flag = _update(arrays, entry, sequence_hash)
        else:
            flag = _remember_collision(arrays, block_hash, salt, namespace, sequence_hash, seed)
            block_hash ^= mix(seed)
    return block_hash, flag


@inline_helper
def _look_up(arrays: HashArrays, block_hash: U64, salt: U64, seed: U64, is_stated: bool) -> tuple[int, U64]:
    """Find a page with this seed, or with any seed unless is_stated. Returns (entry or -1, ledger hash)."""
    entry = find(arrays.blocks.table, block_hash ^ salt)
    if entry < 0 or arrays.seeds[entry] != seed:
        colliding = block_hash ^ mix(seed)
        other = find(arrays.blocks.table, colliding ^ salt)
        if other >= 0 and arrays.seeds[other] == seed:
            entry, block_hash = other, colliding
        elif is_stated:
            entry = int64(-1)
    if entry >= 0:
        _mark_used(arrays, entry)
    return entry, block_hash


@inline_helper
def _translate_event(
    arrays: HashArrays,
    out: TranslatedColumns,
    cursor: I64Vector,
    pages: PageEvents,
    event: int,
    local: U64Vector,
    salt: U64,
    namespace: U16,
    seed: U64,
    base: U64,
    parent: U64,
    has_parent: U8,
) -> None:
    block_hashes = pages.block_hashes
    first, first_local, position = cursor[PAGE_IN], cursor[LOCAL_IN], cursor[PAGE_OUT]
    sequence_hash = parent
    for i in range(pages.lengths[event]):
        ahead = first + i + AHEAD
        if ahead < block_hashes.shape[0]:
            fetch(arrays.blocks.table, block_hashes[ahead] ^ salt)
        is_child = has_parent or i > 0
        sequence_hash = hash_pair(sequence_hash, local[first_local + i], base) if is_child else local[first_local + i]
        block_hash, flag = _remember_page(arrays, block_hashes[first + i], salt, namespace, sequence_hash, seed)
        out.engine_hashes[position] = block_hashes[first + i]
        out.block_hashes[position], out.sequence_hashes[position], out.flags[position] = block_hash, sequence_hash, flag
        if flag != UNIQUE:
            cursor[NUM_AMBIGUOUS] += 1
        position += 1
    cursor[PAGE_OUT] = position


@inline_helper
def _pass_on(out: TranslatedColumns, cursor: I64Vector, block_hashes: U64Input, num_pages: int) -> None:
    """Copy removed pages to the output unchanged."""
    first, position = cursor[PAGE_IN], cursor[PAGE_OUT]
    for i in range(num_pages):
        out.engine_hashes[position + i] = out.block_hashes[position + i] = block_hashes[first + i]
        out.sequence_hashes[position + i], out.flags[position + i] = _NO_HASH, UNIQUE
    cursor[PAGE_OUT] = position + num_pages


# --- entry points -----------------------------------------------------------------------------------------------------


@kernel
def translate_pages(
    arrays: HashArrays,
    out: Spread[TranslatedColumns],
    pages: Spread[PageEvents],
    local: U64Vector,
    seeds: U64Vector,
    cursor: I64Vector,
    seed: U64,
    base: U64,
    is_stated: bool,
    salt: U64,
    namespace: U16,
) -> int:
    """Translate stored pages and copy removed ones. Returns the event where it stopped, or the number of events.

    out: as long as `pages`. local: uint64[stored pages], local hashes made with `seeds` (uint64[m], one per event).
    cursor: int64[6], initially zeros. base: seed with which all hashes are rolled. salt, namespace: those of the hash
    namespace. seed: seed of the events; a child inherits the seed of its parent unless is_stated. If an event needs a
    different seed than its local hashes were made with, the kernel writes that seed to `seeds` and returns the event.
    The caller then hashes the pages of the event again and repeats the call.
    """
    if cursor[EVENT] == 0:
        _tidy_up(arrays, local.shape[0])
    for event in range(cursor[EVENT], pages.lengths.shape[0]):
        num_pages = pages.lengths[event]
        out.lengths[event], out.has_parent[event] = num_pages, 0
        if pages.kinds[event] & REMOVAL:
            _pass_on(out, cursor, pages.block_hashes, num_pages)
            cursor[PAGE_IN] += num_pages
            continue
        needed, parent, has_parent = seed, _NO_HASH, pages.has_parent[event]
        entry = int64(0)
        if has_parent:
            entry, parent_hash = _look_up(arrays, pages.parents[event], salt, seed, is_stated)
            if entry >= 0:
                needed, parent = arrays.seeds[entry], arrays.sequence_hashes[entry]
                out.parents[event], out.has_parent[event] = parent_hash, 1
        if entry < 0:
            cursor[NUM_UNKNOWN] += num_pages
            out.lengths[event] = 0
        elif needed != seeds[event]:
            seeds[event] = needed
            cursor[EVENT] = event
            return event
        else:
            _translate_event(
                arrays, out, cursor, pages, event, local, salt, namespace, needed, base, parent, has_parent
            )
        cursor[PAGE_IN] += num_pages
        cursor[LOCAL_IN] += num_pages
    return pages.lengths.shape[0]


@kernel
def look_up_pages(
    arrays: HashArrays, block_hashes: U64Input, found: U64Matrix, seed: U64, is_stated: bool, salt: U64
) -> int:
    """Look up pages by engine hash alone. Returns the number of known pages.

    found: uint64[3, n], written from the start: engine, ledger and sequence hashes of the known pages.
    """
    known = 0
    for i in range(block_hashes.shape[0]):
        entry, block_hash = _look_up(arrays, block_hashes[i], salt, seed, is_stated)
        if entry >= 0:
            found[0, known], found[1, known] = block_hashes[i], block_hash
            found[2, known] = arrays.sequence_hashes[entry]
            known += 1
    return known


@kernel
def remember_pages(
    arrays: HashArrays,
    block_hashes: U64Input,
    sequence_hashes: U64Input,
    known_as: U64Vector,
    flags: U8Vector,
    seed: U64,
    salt: U64,
    namespace: U16,
) -> None:
    """Remember pages whose sequence hashes were sent by the engine.

    known_as: uint64[n], set to the ledger's hashes. flags: uint8[n], set to UNIQUE, COLLIDING, REASSIGNED.
    """
    _tidy_up(arrays, block_hashes.shape[0])
    for i in range(block_hashes.shape[0]):
        known_as[i], flags[i] = _remember_page(arrays, block_hashes[i], salt, namespace, sequence_hashes[i], seed)
