"""Kernels that read the events of batches into rows.

msgpack values are self-delimiting, so the kernels skip an invalid event and continue with the next one. Only a broken
encoding ends the batch.
"""

from bridge.decoding.kernels import columns, fields
from bridge.decoding.kernels.columns import ScannedEvents
from bridge.decoding.kernels.runs import joins_run, shape
from kv_events.kernels.bundles import I64Matrix, I64Vector, U8Input, U8Vector, U32Vector, U64Vector
from kv_events.kernels.declare import helper, inline_helper, kernel
from kv_events.kernels.msgpack import ARRAY, BAD, MAP, NIL, POSITIVE, dictionary, read_head, read_key, skip
from kv_events.kernels.numbers import int64, uint64
from kv_events.limits import MAX_ENGINE_EVENTS, MAX_ENGINE_PAGES

# columns of the header for the current batch: its number, whether it was opened, position of the next event, events
# left, rank (-1: none), whether the rank was invalid, whether the rank follows the events
BATCH, IS_OPEN, AT, LEFT, BATCH_RANK, IS_RANK_BAD, RANK_FOLLOWS = range(7)
# columns for all batches that are read together: rank, batches with an invalid rank, rows, hashes, tokens, first row of
# the run
RANK, NUM_BAD_RANKS, NUM_ROWS, NUM_HASHES, NUM_TOKENS, RUN = range(7, 13)
NUM_HEADER = 13

_F_EVENTS, _F_RANK = 100, 101
_BATCH_TEXT, _BATCH_BORDERS, _BATCH_MEANINGS = dictionary(
    {"events": _F_EVENTS, "data_parallel_rank": _F_RANK, "attn_dp_rank": _F_RANK, "dp_rank": _F_RANK}
)
_MAX_RANK = uint64(2**31 - 1)


@helper
def _take_rank(data: U8Input, at: int, stop: int, header: I64Vector) -> None:
    kind, value, _ = read_head(data, at, stop)
    if kind == POSITIVE and value <= _MAX_RANK:
        header[BATCH_RANK] = int64(value)
    elif kind not in (NIL, BAD):
        header[IS_RANK_BAD] = 1


@helper
def _take_events(data: U8Input, at: int, stop: int, header: I64Vector) -> bool:
    """Set the header to the first event. Returns whether the events are a list, and not too many."""
    kind, count, at = read_head(data, at, stop)
    header[AT], header[LEFT] = at, int64(count)
    return kind == ARRAY and header[LEFT] <= MAX_ENGINE_EVENTS


@helper
def _open_map(data: U8Input, at: int, stop: int, count: int, header: I64Vector) -> bool:
    found = False
    for _ in range(count):
        field, at = read_key(data, at, stop, _BATCH_TEXT, _BATCH_BORDERS, _BATCH_MEANINGS, fields.F_UNKNOWN)
        if at < 0:
            break
        if field == _F_EVENTS:
            found = _take_events(data, at, stop, header)
            if not found:
                break
        elif field == _F_RANK:
            _take_rank(data, at, stop, header)
        at = skip(data, at, stop)
        if at < 0:
            break
    return found


@helper
def open_batch(data: U8Input, at: int, stop: int, header: I64Vector) -> bool:
    """Find the events and the rank of a batch.

    Returns False unless the batch is a map or an array of at least two elements, and has no more events than it may.
    """
    header[BATCH_RANK], header[IS_RANK_BAD], header[RANK_FOLLOWS], header[LEFT] = -1, 0, 0, 0
    form, value, at = read_head(data, at, stop)
    count = int64(value)
    if form == MAP:
        found = _open_map(data, at, stop, count, header)
    elif form == ARRAY and count >= 2:
        at = skip(data, at, stop)  # timestamp
        found = at >= 0 and _take_events(data, at, stop, header)
        header[RANK_FOLLOWS] = count > 2
    else:
        found = False
    header[IS_OPEN] = found
    return found


@helper
def find_rank(data: U8Input, stop: int, header: I64Vector) -> None:
    """Read the rank that follows the events, without consuming the events that are left."""
    if header[RANK_FOLLOWS] == 0:
        return
    header[RANK_FOLLOWS] = 0
    at = header[AT]
    for _ in range(header[LEFT]):
        at = skip(data, at, stop)
        if at < 0:
            return
    _take_rank(data, at, stop, header)


_MAX_RUNS = 64
"""Bound on the runs of one call. Each costs Python some microseconds, up to about 200."""


@inline_helper
def _is_short(header: I64Vector, num_runs: int) -> bool:
    """Return whether one call may read more events: what it reads is applied in one step."""
    return num_runs < _MAX_RUNS and header[NUM_HASHES] < MAX_ENGINE_PAGES


@inline_helper
def _read_event(data: U8Input, at: int, stop: int, row: I64Vector, hashes: U64Vector, tokens: U32Vector) -> int:
    """Read an event into a row. Returns the position after it, or -1 with a reason in the row."""
    form, value, at = read_head(data, at, stop)
    count = int64(value)
    if form == MAP:
        for _ in range(count):
            field, at = fields.read_name(data, at, stop)
            if at < 0:
                return columns.reject(row, columns.TRUNCATED)
            if row[columns.KIND] == columns.MOONCAKE_EVENT:
                field = fields.F_UNKNOWN  # msgspec decodes its other fields
            at = fields.read_field(data, at, stop, field, row, hashes, tokens)
            if at < 0:
                if _is_mooncake_event(data, row[columns.START], stop):
                    row[columns.KIND] = columns.MOONCAKE_EVENT
                    return skip(data, row[columns.START], stop)
                return -1
    elif form == ARRAY and count > 0:
        at = fields.read_tag(data, at, stop, row)
        if at < 0:
            return -1
        layout = fields.STORED_FIELDS if row[columns.KIND] == columns.STORED else fields.REMOVED_FIELDS
        known = layout.shape[0] if row[columns.KIND] <= columns.REMOVED else 1
        for position in range(1, count):
            field = layout[position] if position < known else fields.F_UNKNOWN
            at = fields.read_field(data, at, stop, field, row, hashes, tokens)
            if at < 0:
                return -1
    else:
        return columns.reject(row, columns.TYPE)
    if row[columns.KIND] == columns.UNREADABLE:
        return columns.reject(row, columns.TAG)
    return at


@helper
def _is_mooncake_event(data: U8Input, at: int, stop: int) -> bool:
    """Return whether an event in map form has an `event_type`. Its other fields then have a different meaning."""
    _, count, at = read_head(data, at, stop)
    for _ in range(int64(count)):
        field, at = fields.read_name(data, at, stop)
        if at < 0:
            return False
        if field == fields.F_EVENT_TYPE:
            return True
        at = skip(data, at, stop)
        if at < 0:
            return False
    return False


@inline_helper
def _read_row(
    data: U8Input, stop: int, header: I64Vector, rows: I64Matrix, hashes: U64Vector, tokens: U32Vector
) -> None:
    """Read the next event into the next row, and advance the header."""
    row = rows[header[NUM_ROWS]]
    for column in range(columns.NUM_COLUMNS):
        row[column] = 0
    row[columns.KIND], row[columns.GROUP], row[columns.START] = columns.UNREADABLE, -1, header[AT]
    row[columns.HASH_FROM] = row[columns.HASH_TO] = header[NUM_HASHES]
    row[columns.TOKEN_FROM] = row[columns.TOKEN_TO] = header[NUM_TOKENS]
    end = _read_event(data, header[AT], stop, row, hashes, tokens)
    if end < 0:
        row[columns.KIND] = columns.BAD_STORE if row[columns.KIND] == columns.STORED else columns.UNREADABLE
        end = skip(data, header[AT], stop)
    elif row[columns.KIND] == columns.STORED:
        row[columns.SHAPE] = shape(row)
    elif row[columns.KIND] == columns.REMOVED:
        row[columns.TOKEN_TO] = row[columns.TOKEN_FROM]
    if row[columns.KIND] <= columns.REMOVED:
        row[columns.TIER] = fields.tier_of(data, row)
        header[NUM_HASHES], header[NUM_TOKENS] = row[columns.HASH_TO], row[columns.TOKEN_TO]
    header[LEFT] -= 1
    if end < 0:
        row[columns.KIND], row[columns.REASON] = columns.UNREADABLE, columns.TRUNCATED  # and so are all after it
        header[LEFT], end = 0, stop
    row[columns.STOP] = header[AT] = end


@inline_helper
def _put_in_run(data: U8Input, header: I64Vector, rows: I64Matrix, kinds: U8Vector) -> bool:
    """Add the newest row to the current run, or begin a new run with it. Returns whether it begins one."""
    number = header[NUM_ROWS]
    row, is_store = rows[number], rows[number][columns.KIND] == columns.STORED
    row[columns.CONTINUES] = number > 0 and joins_run(data, rows, header[RUN], number)
    if row[columns.CONTINUES] == 0:
        header[RUN], row[columns.STORE_ROW] = number, -1
    kinds[number] = row[columns.TIER] + columns.REMOVAL * (row[columns.KIND] == columns.REMOVED)
    first = rows[header[RUN]]
    if is_store and first[columns.STORE_ROW] < 0:
        first[columns.STORE_ROW] = number
    if kinds[number] != kinds[header[RUN]]:
        first[columns.IS_MIXED] = 1
    return row[columns.CONTINUES] == 0


# --- entry point ----------------------------------------------------------------------------------------------------


@kernel
def scan_batches(data: U8Input, borders: I64Vector, header: I64Vector, out: ScannedEvents) -> bool:
    """Read the next events of consecutive batches of one rank, until `out` is full, or they have many runs or pages.

    data: uint8, the concatenated payloads of b batches. borders: int64[b + 1]. header: int64[13], initially zeros; the
    kernel advances it. Returns False if the first payload is not a batch; that payload is skipped.
    """
    rows = out.rows
    num_batches, is_first, num_runs = borders.shape[0] - 1, True, 0
    header[RANK:] = 0
    while header[BATCH] < num_batches and header[NUM_ROWS] < rows.shape[0] and _is_short(header, num_runs):
        stop = borders[header[BATCH] + 1]
        if header[IS_OPEN] == 0 and not open_batch(data, borders[header[BATCH]], stop, header):
            header[BATCH] += is_first
            return not is_first
        mark, run = header[NUM_ROWS], header[RUN]
        while header[NUM_ROWS] < rows.shape[0] and header[LEFT] > 0 and _is_short(header, num_runs):
            number = header[NUM_ROWS]
            _read_row(data, stop, header, rows, out.hashes, out.tokens)
            row = rows[number]
            out.lengths[number] = row[columns.HASH_TO] - row[columns.HASH_FROM]
            out.parents[number], out.has_parent[number] = uint64(row[columns.PARENT]), row[columns.HAS_PARENT]
            num_runs += _put_in_run(data, header, rows, out.kinds)
            header[NUM_ROWS] += 1
        find_rank(data, stop, header)
        if is_first:
            header[RANK] = header[BATCH_RANK]
        elif header[RANK] != header[BATCH_RANK]:  # another rank: the next call reads the batch again
            if rows[run, columns.STORE_ROW] >= mark:
                rows[run, columns.STORE_ROW] = -1
            header[NUM_ROWS], header[IS_OPEN] = mark, 0
            return True
        header[NUM_BAD_RANKS] += header[IS_RANK_BAD]
        header[IS_RANK_BAD], is_first = 0, False
        if header[LEFT] == 0:
            header[IS_OPEN] = 0
            header[BATCH] += 1
    return True
