"""The kernel that decodes the batches of many records at once."""

from typing import NamedTuple

from kv_events.digest import DIGEST_BYTES
from kv_events.kernels.bundles import I64Matrix, I64Vector, Spread, U8Input, U8Vector, U64Vector
from kv_events.kernels.declare import helper, inline_helper, kernel
from kv_events.kernels.log_records import CHANNEL, END, PAYLOAD, TIMESTAMP_MS
from kv_events.kernels.msgpack import ARRAY, BIN, NIL, POSITIVE, STR, big_endian, dictionary, look_up, read_head
from kv_events.kernels.numbers import int64, uint8, uint64
from kv_events.limits import MAX_EVENTS_PER_BATCH, MAX_PAGES_PER_BATCH, MAX_RECORD_BYTES
from kv_events.records import Channel
from kv_events.schema import MEDIUM_INDEX, SCHEMA_VERSION

NUM_BATCH_FIELDS = 8
NAMES, NAMES_END, EPOCH, SEQ, TIME, FIRST_EVENT, END_EVENT, DIGEST = range(NUM_BATCH_FIELDS)
"""Columns of batches. NAMES, NAMES_END and DIGEST are positions in the data; TIME has the bits of a float64."""

NUM_EVENT_FIELDS = 7
ROW, IS_REMOVAL, MEDIUM, NUM_PAGES, PAGES, STARTS, NUM_CHAINS = range(NUM_EVENT_FIELDS)
"""Columns of events. ROW: of the record. PAGES: position in the words. STARTS: that of `chain_starts` in the data."""

LEAST_EVENT_BYTES = 20
"""No encoded store or removal is shorter."""

_EVENTS = int(Channel.EVENTS)
_EXACT_MS = 2**53  # times up to here are exact as float64
_FLOAT64 = 0xCB
_EXPONENT = uint64(0x7FF << 52)
_MOST_SIGNED = uint64(2**63 - 1)
_TAGS = dictionary({"BlockStored": 0, "BlockRemoved": 1})
_TAG_TEXT, _TAG_BORDERS, _TAG_MEANINGS = _TAGS
_MEDIUM_TEXT, _MEDIUM_BORDERS, _MEDIUM_MEANINGS = dictionary(MEDIUM_INDEX)


class BatchArrays(NamedTuple):
    """What `decode_batches` writes."""

    plain: U8Vector
    """[n] 1: the batch is plain, see `BatchColumns`."""
    batches: I64Matrix
    """[n, NUM_BATCH_FIELDS] of plain batches; NAMES and NAMES_END of all others, too. NAMES_END 0: unreadable."""
    events: I64Matrix
    """[events, NUM_EVENT_FIELDS] the events of all plain batches."""
    words: U64Vector
    """Sequence hashes of an event, followed by its block hashes and, of a store, by the parents of its chains."""


@inline_helper
def _copy_words(data: U8Input, at: int, num_words: int, words: U64Vector, to: int) -> None:
    """Copy little-endian u64 values."""
    for i in range(num_words):
        word = uint64(0)
        for k in range(8):
            word |= uint64(data[at + 8 * i + k]) << uint64(8 * k)
        words[to + i] = word


@inline_helper
def _is_ascii(data: U8Input, start: int, stop: int) -> bool:
    bits = uint8(0)
    for i in range(start, stop):
        bits |= data[i]
    return bits < 128


@helper
def _read_words(data: U8Input, at: int, stop: int, wanted: int, words: U64Vector, to: int) -> tuple[int, int]:
    """Copy packed hashes to `words`. wanted: their number; -1: any.

    Returns (position after them or -1, their number).
    """
    kind, length, at = read_head(data, at, stop)
    num_words = int64(length) // 8
    if kind != BIN or length % uint64(8) != 0 or (wanted >= 0 and num_words != wanted):
        return int64(-1), int64(0)
    _copy_words(data, at, num_words, words, to)
    return at + 8 * num_words, num_words


@helper
def _read_starts(data: U8Input, at: int, stop: int, num_pages: int) -> tuple[int, int]:
    """Read the bitmap of a store. Returns (position after it or -1, number of chains)."""
    kind, length, at = read_head(data, at, stop)
    num_bytes = int64(length)
    if kind != BIN or num_bytes != (num_pages + 7) // 8:
        return int64(-1), int64(0)
    num_chains = int64(0)
    for i in range(num_bytes):
        byte = data[at + i]
        while byte != 0:
            num_chains += 1
            byte &= byte - uint8(1)
    if num_pages > 0 and data[at] & uint8(1) == 0:
        return int64(-1), int64(0)
    if num_pages % 8 and data[at + num_bytes - 1] >> uint8(num_pages % 8) != 0:
        return int64(-1), int64(0)
    return at + num_bytes, num_chains


@helper
def _skip_details(data: U8Input, at: int, stop: int, num_fields: int) -> int:
    """Skip the tokens and the extra key of a store. Returns the position after them, or -1."""
    if num_fields > 0:
        kind, length, at = read_head(data, at, stop)
        if kind != NIL and kind != BIN:
            return int64(-1)
        at += int64(length) if kind == BIN else 0
    if num_fields > 1:
        kind, length, at = read_head(data, at, stop)
        if kind == STR and _is_ascii(data, at, at + int64(length)):
            at += int64(length)
        elif kind != NIL:
            return int64(-1)
    return at


@helper
def _read_event(data: U8Input, at: int, stop: int, event: I64Vector, words: U64Vector, to: int) -> tuple[int, int]:
    """Read one store or removal. Returns (position after it or -1, position after its words)."""
    failed = int64(-1), to
    kind, num_fields, at = read_head(data, at, stop)
    if kind != ARRAY:
        return failed
    kind, length, at = read_head(data, at, stop)
    if kind != STR:
        return failed
    is_removal = look_up(data, at, int64(length), _TAG_TEXT, _TAG_BORDERS, _TAG_MEANINGS, -1)
    at += int64(length)
    if is_removal < 0 or (is_removal == 1 and num_fields != 4):
        return failed
    if is_removal == 0 and not 6 <= num_fields <= 8:
        return failed
    kind, length, at = read_head(data, at, stop)
    if kind != STR:
        return failed
    event[IS_REMOVAL] = is_removal
    event[MEDIUM] = look_up(data, at, int64(length), _MEDIUM_TEXT, _MEDIUM_BORDERS, _MEDIUM_MEANINGS, -1)
    event[PAGES] = to
    at, num_pages = _read_words(data, at + int64(length), stop, -1, words, to)
    if event[MEDIUM] < 0 or at < 0:
        return failed
    at, _ = _read_words(data, at, stop, num_pages, words, to + num_pages)
    event[NUM_PAGES], event[STARTS], event[NUM_CHAINS] = num_pages, 0, 0
    to += 2 * num_pages
    if at < 0 or is_removal == 1:
        return at, to
    end, num_chains = _read_starts(data, at, stop, num_pages)
    if end < 0:
        return failed
    event[STARTS], event[NUM_CHAINS] = end - (num_pages + 7) // 8, num_chains
    at, _ = _read_words(data, end, stop, num_chains, words, to)
    if at < 0:
        return failed
    return _skip_details(data, at, stop, int64(num_fields) - 6), to + num_chains


@helper
def _read_names(data: U8Input, at: int, stop: int, batch: I64Vector) -> int:
    """Read the names, the rank and the block size. Returns the position after them, or -1."""
    batch[NAMES] = at
    for _ in range(3):
        kind, length, at = read_head(data, at, stop)
        if kind != STR:
            return int64(-1)
        at += int64(length)
    for _ in range(2):
        kind, _number, at = read_head(data, at, stop)
        if kind != POSITIVE:
            return int64(-1)
    batch[NAMES_END] = at
    return at


@helper
def _read_batch(
    data: U8Input, row: int, at: int, stop: int, arrays: BatchArrays, num_events: int, to: int
) -> tuple[int, int]:
    """Read one batch. Returns (end of its events or -1, end of its words)."""
    failed, batch, events = (int64(-1), to), arrays.batches[row], arrays.events
    kind, num_fields, at = read_head(data, at, stop)
    if kind != ARRAY or not 11 <= num_fields <= 12:
        return failed
    kind, version, at = read_head(data, at, stop)
    if kind != POSITIVE or version != SCHEMA_VERSION:
        return failed
    at = _read_names(data, at, stop, batch)
    if at < 0:
        return failed
    for field in (EPOCH, SEQ):
        kind, number, at = read_head(data, at, stop)
        if kind != POSITIVE or number > _MOST_SIGNED:
            return failed
        batch[field] = int64(number)
    if at + 9 > stop or data[at] != _FLOAT64:
        return failed
    time = big_endian(data, at + 1, 8)
    if time & _EXPONENT == _EXPONENT:  # infinite or not a number
        return failed
    batch[TIME] = int64(time)
    kind, count, at = read_head(data, at + 9, stop)
    if kind != ARRAY or count > MAX_EVENTS_PER_BATCH:
        return failed
    batch[FIRST_EVENT] = num_events
    num_pages = int64(0)
    for _ in range(int64(count)):
        if num_events == events.shape[0]:
            return failed
        at, to = _read_event(data, at, stop, events[num_events], arrays.words, to)
        if at < 0:
            return failed
        events[num_events, ROW] = row
        num_pages += events[num_events, NUM_PAGES]
        num_events += 1
    batch[END_EVENT] = num_events
    kind, length, at = read_head(data, at, stop)
    if num_pages > MAX_PAGES_PER_BATCH or kind != BIN or length != DIGEST_BYTES:
        return failed
    batch[DIGEST] = at
    at += DIGEST_BYTES
    if num_fields == 12:
        kind, length, at = read_head(data, at, stop)
        if kind != STR or length != 0:
            return failed
    return (num_events, to) if at == stop else failed


@kernel
def decode_batches(data: U8Input, rows: I64Matrix, arrays: Spread[BatchArrays]) -> tuple[int, int]:
    """Decode the batches of records. Returns the numbers of events and of words.

    data, rows: as in `log_records.find_records`. arrays: one element for each record, at least one event for each
    LEAST_EVENT_BYTES of the data, and one word for each eight.
    """
    num_events = num_words = int64(0)
    for i in range(rows.shape[0]):
        arrays.plain[i] = 0
        arrays.batches[i, NAMES_END] = 0
        start, stop = rows[i, PAYLOAD], rows[i, END]
        if rows[i, CHANNEL] != _EVENTS or stop - start > MAX_RECORD_BYTES or abs(rows[i, TIMESTAMP_MS]) > _EXACT_MS:
            continue
        end_event, end_word = _read_batch(data, i, start, stop, arrays, num_events, num_words)
        if end_event >= 0:
            arrays.plain[i] = 1
            num_events, num_words = end_event, end_word
    return num_events, num_words
