"""The kernel that applies the plain batches of many records at once, in the same way as `View.apply`."""

from typing import NamedTuple

from indexer.kernels import views
from indexer.kernels.apply import Pages, remove, store
from indexer.kernels.views import ViewColumns, note_lateness
from kv_events.digest import DIGEST_WORDS
from kv_events.kernels import batches
from kv_events.kernels.batches import BatchArrays
from kv_events.kernels.bundles import (
    BoolVector,
    F64Vector,
    I64Matrix,
    I64Vector,
    Spread,
    U8Input,
    U8Vector,
    U64Matrix,
    U64Vector,
    reader,
)
from kv_events.kernels.declare import helper, inline_helper, kernel
from kv_events.kernels.numbers import int64, uint64

NO_SPACE = -1
"""Space of a stream without a view: none of its batches can be applied here."""

NOT_PLAIN, DIGEST_DIFFERS = range(2)
"""Why `apply_batches` ended early: the next record is not for it, or the view of the last one is not right after it."""


class Space(NamedTuple):
    """The index and the views of a namespace."""

    pages: Pages
    columns: ViewColumns


class Arrivals(NamedTuple):
    """Records that arrived together."""

    wanted: BoolVector
    """[n] whether to apply it. Only records of events are."""
    streams: I64Vector
    """[n] row of `Streams.places`; -1: unknown."""
    made_at: F64Vector
    """[n] the time in a plain batch, seconds since 1970."""
    at: F64Vector
    """[n] when it was received, in seconds since 1970."""
    ticks: F64Vector
    """[n] the same on the clock of `Freshness`."""


class Streams(NamedTuple):
    """Where the streams are."""

    places: I64Matrix
    """[streams, 2] row of `spaces`, or NO_SPACE, and number in the index."""
    spaces: U64Matrix
    """[namespaces, words] the pinned `Space` of each namespace."""
    no_marks: U8Vector
    """[0]"""


_MOST_TRANSIT_S = 0.5  # with more, a batch might be delayed

_read_space = reader(Space)
_note_lateness = inline_helper(note_lateness)


@helper
def _is_next(columns: ViewColumns, stream: int, arrays: BatchArrays, i: int, most_pages: int) -> bool:
    """Return whether a batch is the next one of a live view, of which it can leave only the digest wrong."""
    batch, numbers = arrays.batches[i], columns.numbers[stream]
    if batch[batches.EPOCH] != numbers[views.EPOCH] or batch[batches.SEQ] != numbers[views.LAST_SEQ] + 1:
        return False
    if columns.states[stream] != views.LIVE or columns.faults[stream] != views.FAULT_NONE:
        return False
    if abs(columns.times[stream, views.TRANSIT]) >= _MOST_TRANSIT_S:
        return False
    longest = int64(0)
    for event in range(batch[batches.FIRST_EVENT], batch[batches.END_EVENT]):
        longest = max(longest, arrays.events[event, batches.NUM_PAGES])
    return longest <= most_pages


@helper
def _apply_event(
    pages: Pages, numbers: I64Vector, stream: int, marks: U8Vector, data: U8Input, event: I64Vector, words: U64Vector
) -> None:
    """Apply a store or a removal."""
    num_pages, at, tier = event[batches.NUM_PAGES], event[batches.PAGES], event[batches.MEDIUM]
    hashes = words[at : at + num_pages]
    if event[batches.IS_REMOVAL] == 1:
        unknown, refused = remove(pages, marks, hashes, stream, tier, 0, num_pages)
        numbers[views.UNKNOWN] += unknown
        numbers[views.REMOVED] += num_pages - unknown - refused
    else:
        starts = data[event[batches.STARTS] : event[batches.STARTS] + (num_pages + 7) // 8]
        parents = words[at + 2 * num_pages : at + 2 * num_pages + event[batches.NUM_CHAINS]]
        known, refused = store(pages, marks, hashes, starts, parents, stream, tier, 0, num_pages)
        numbers[views.KNOWN] += known
        numbers[views.STORED] += num_pages - known - refused
    numbers[views.REFUSED] += refused
    numbers[views.REFUSED_NOW] += refused


@helper
def _equals_stated(digest: U64Vector, data: U8Input, at: int) -> bool:
    for i in range(DIGEST_WORDS):
        word = uint64(0)
        for k in range(8):
            word |= uint64(data[at + 8 * i + k]) << uint64(8 * k)
        if word != digest[i]:
            return False
    return True


@kernel
def apply_batches(
    data: U8Input,
    arrays: Spread[BatchArrays],
    arrivals: Spread[Arrivals],
    streams: Spread[Streams],
    start: int,
    most_pages: int,
) -> tuple[int, int]:
    """Apply wanted records from `start` on, up to one that cannot be applied here.

    data: that of the records. arrays: from `decode_batches`. most_pages: the longest event to apply here.

    Returns (the first record that was not applied, why it ended).
    """
    for i in range(start, arrivals.wanted.shape[0]):
        if not arrivals.wanted[i]:
            continue
        row = arrivals.streams[i]
        if arrays.plain[i] == 0 or row < 0 or streams.places[row, 0] == NO_SPACE:
            return i, NOT_PLAIN
        space, stream = _read_space(streams.spaces[streams.places[row, 0]]), streams.places[row, 1]
        pages, columns = space.pages, space.columns
        if not _is_next(columns, stream, arrays, i, most_pages):
            return i, NOT_PLAIN
        at, tick = arrivals.at[i], arrivals.ticks[i]
        numbers, times = columns.numbers[stream], columns.times[stream]
        numbers[views.LAST_SEQ] += 1
        numbers[views.BATCHES] += 1
        columns.last_batch_at[stream] = at
        times[views.SILENT_FROM] = max(times[views.SILENT_FROM], tick)
        _note_lateness(times, arrivals.made_at[i], at, tick)
        columns.last_batch_tick[stream] = max(columns.last_batch_tick[stream], tick - times[views.SECONDS])
        for event in range(arrays.batches[i, batches.FIRST_EVENT], arrays.batches[i, batches.END_EVENT]):
            _apply_event(pages, numbers, stream, streams.no_marks, data, arrays.events[event], arrays.words)
        if not _equals_stated(pages.digests[stream], data, arrays.batches[i, batches.DIGEST]):
            return i + 1, DIGEST_DIFFERS
        times[views.AGREED_AT] = at
    return int64(arrivals.wanted.shape[0]), NOT_PLAIN
