"""Kernels of page changes: digests, chains and batches over columns, and the queue that the ledger's kernels fill."""

from typing import NamedTuple

from kv_events.digest import add_page, remove_page
from kv_events.kernels.bundles import I64Vector, Spread, U8Input, U8Vector, U32Input, U32Vector, U64Input, U64Vector
from kv_events.kernels.declare import inline_helper, kernel
from kv_events.kernels.numbers import U32, U64, int64, uint8, uint32, uint64
from kv_events.schema import NUM_MEDIA

# kinds of change: stores on medium 0 .. 3, removals from medium 0 .. 3, everything cleared
REMOVAL = NUM_MEDIA
CLEARED = 2 * NUM_MEDIA
# only in events: removals of one copy of a block, which stays held while it has others
COPY_REMOVAL = 3 * NUM_MEDIA
NUM_RANKS = 2 * NUM_MEDIA
"""Number of kinds that can occur in a span."""


class PageChanges(NamedTuple):
    """Stores and removals of single pages, and clears, in the order in which they happened, as columns."""

    kinds: U8Vector
    """[n] medium for a store, REMOVAL + medium for a removal, or CLEARED."""
    hashes: U64Vector
    """[n] sequence hashes."""
    block_hashes: U64Vector
    """[n] block hashes."""
    parents: U64Vector
    """[n] for a store, sequence hash of the parent. 0 if there is none or it is unknown."""
    spans: U32Vector
    """[n] number of the span, ascending modulo 2**32. Within one span, no page is removed from a medium after it was
    stored there, so the removals of a span may be sent before its stores. A clear has its own span."""

    def part(self, start: int, stop: int) -> "PageChanges":
        """Return views of changes `start` to `stop` (exclusive)."""
        return PageChanges._make(column[start:stop] for column in self)


@kernel
def advance_digest(digest: U64Vector, kinds: U8Input, hashes: U64Input) -> None:
    """Apply changes to a digest, uint64[8], in place."""
    for i in range(kinds.shape[0]):
        kind = int64(kinds[i])
        if kind < REMOVAL:
            add_page(digest, kind, hashes[i])
        elif kind < CLEARED:
            remove_page(digest, kind - REMOVAL, hashes[i])
        else:
            for word in range(digest.shape[0]):
                digest[word] = uint64(0)


@kernel
def batch_length(
    changes: Spread[PageChanges], max_events: int, max_bytes: int, event_bytes: int, page_bytes: int
) -> int:
    """Return how many of the changes fit into one batch, sorted or not; at least one.

    A run of changes of one kind and span counts as an event of `event_bytes`. Each page adds `page_bytes`, and each
    start of a chain adds 8.
    """
    kinds, hashes, parents, spans = changes.kinds, changes.hashes, changes.parents, changes.spans
    num_events, num_bytes = 0, 0
    for i in range(kinds.shape[0]):
        new_run = i == 0 or kinds[i] != kinds[i - 1] or spans[i] != spans[i - 1] or kinds[i] == CLEARED
        if new_run:
            num_events += 1
            num_bytes += event_bytes
        if kinds[i] < REMOVAL and (new_run or parents[i] != hashes[i - 1]):
            num_bytes += 8
        num_bytes += page_bytes
        if i > 0 and (num_events > max_events or num_bytes > max_bytes):
            return i
    return kinds.shape[0]


@inline_helper
def _rank(kind: int, span: U32, first_span: U32) -> int:
    """Return the sort key of a change: by span, then removals before stores, then by medium."""
    place = kind + REMOVAL if kind < REMOVAL else kind - REMOVAL if kind < CLEARED else int64(0)
    return int64(uint32(span - first_span)) * NUM_RANKS + place


@inline_helper
def _copy(column: U64Input, start: int, out: U64Vector, place: int, length: int) -> None:
    for i in range(length):
        out[place + i] = column[start + i]


@inline_helper
def _find_runs(kinds: U8Input, spans: U32Input, borders: I64Vector) -> int:
    """Write the start of each run of one kind and span, and the end of the last one, to `borders`.

    Returns the number of runs.
    """
    num_runs = borders[0] = 0
    for i in range(1, kinds.shape[0]):
        if kinds[i] != kinds[i - 1] or spans[i] != spans[i - 1]:
            num_runs += 1
            borders[num_runs] = i
    borders[num_runs + 1] = kinds.shape[0]
    return num_runs + 1


@kernel
def sort_changes(changes: Spread[PageChanges], places: I64Vector, out: Spread[PageChanges], borders: I64Vector) -> int:
    """Sort changes into few runs of one kind, with the same effect. Returns the number of runs.

    This is a counting sort of the existing runs. Changes of one kind and span keep their order. places:
    int64[NUM_RANKS * spans], scratch space filled with zeros. out: all columns but spans are written. borders:
    int64[n + 1], receives the start of each run and the end of the last one.
    """
    kinds, spans = changes.kinds, changes.spans
    num_old = _find_runs(kinds, spans, borders)
    for run in range(num_old):
        i = borders[run]
        places[_rank(int64(kinds[i]), spans[i], spans[0])] += borders[run + 1] - i
    end = 0
    for rank in range(places.shape[0]):
        places[rank], end = end, end + places[rank]
    for run in range(num_old):
        start = borders[run]
        length = borders[run + 1] - start
        rank = _rank(int64(kinds[start]), spans[start], spans[0])
        place = places[rank]
        places[rank] += length
        for i in range(length):
            out.kinds[place + i] = kinds[start]
        _copy(changes.hashes, start, out.hashes, place, length)
        _copy(changes.block_hashes, start, out.block_hashes, place, length)
        _copy(changes.parents, start, out.parents, place, length)
    num_runs = borders[0] = 0
    for rank in range(places.shape[0]):
        if places[rank] > borders[num_runs]:
            num_runs += 1
            borders[num_runs] = places[rank]
    return num_runs


@kernel
def mark_chains(hashes: U64Input, parents: U64Input, starts: U8Vector, firsts: U64Vector) -> int:
    """Find the chains of stored pages and return their number.

    A chain begins at each page whose parent is not the previous page. starts: uint8[ceil(n / 8)], filled with zeros;
    bit i % 8 of byte i // 8 is set if page i begins a chain. firsts: uint64[n], receives the parent of the first page
    of each chain.
    """
    num_chains = 0
    for i in range(hashes.shape[0]):
        if i == 0 or parents[i] != hashes[i - 1]:
            starts[i >> 3] |= uint8(1 << (i & 7))
            firsts[num_chains] = parents[i]
            num_chains += 1
    return num_chains


# --- the queue of changes --------------------------------------------------------------------------------------------

# elements of cursors: numbers of changes queued, taken and confirmed since the ring was last empty; total changes
# dropped; whether the stream is broken; number of the current span
HEAD, TAKEN, TAIL, DROPPED, BROKEN, SPAN = range(6)


class QueueArrays(NamedTuple):
    """A ring of page changes."""

    ring: PageChanges
    """[capacity] change i is at index i modulo capacity."""
    cursors: I64Vector
    """[6] see HEAD, TAKEN, TAIL, DROPPED, BROKEN, SPAN."""


@inline_helper
def append(queue: QueueArrays, kind: int, sequence_hash: U64, block_hash: U64, parent: U64) -> None:
    """Append one change. If the queue is full, all changes not taken yet are dropped and the stream is broken."""
    cursors, ring = queue.cursors, queue.ring
    capacity = ring.kinds.shape[0]
    if cursors[BROKEN] != 0:
        cursors[DROPPED] += 1
    elif cursors[HEAD] - cursors[TAIL] >= capacity:
        cursors[DROPPED] += cursors[HEAD] - cursors[TAKEN] + 1
        cursors[HEAD] = cursors[TAKEN]
        cursors[BROKEN] = 1
    else:
        i = cursors[HEAD] if cursors[HEAD] < capacity else cursors[HEAD] % capacity  # a division is slow
        ring.kinds[i], ring.spans[i] = uint8(kind), uint32(cursors[SPAN])
        ring.hashes[i], ring.block_hashes[i], ring.parents[i] = sequence_hash, block_hash, parent
        cursors[HEAD] += 1
