"""The kernel that writes the answer to a query as JSON text: fixed texts, and numbers in the gaps between them."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from api.fast.kernels.text import (
    CLOSE,
    COLON,
    COMMA,
    MARGIN,
    OPEN,
    Texts,
    put_byte,
    put_float,
    put_key,
    put_number,
    put_piece,
    put_text,
)
from indexer.kernels.reuse import Groups
from indexer.kernels.views import EXPIRED, LIVE, shown_state
from kv_events.kernels.bundles import BoolVector, F64Vector, I32Vector, I64Vector, U8Vector, U32Matrix
from kv_events.kernels.declare import inline_helper
from kv_events.kernels.numbers import U8, U32, int64, uint8, uint32

_LIVE, _EXPIRED = uint8(LIVE), uint8(EXPIRED)
BYTES_PER_WORKER, BYTES_PER_RANK = 512, 192
"""Bounds on the text of a worker without its name, and on that of one of its ranks."""

GPU, CPU, DISK, EXTERNAL, RANKS, STATE, AGE = range(7)
"""What a gap is filled with: tokens on a tier, tokens on the device by rank, the state, the age in ms."""


def _fixed(text: bytes) -> npt.NDArray[np.uint8]:
    """Return a fixed text and its margin."""
    return np.frombuffer(text + bytes(MARGIN), np.uint8)


_BETWEEN_PARTS = _fixed(b'},"frequencies":[],"instances":{')
_MATCHED_DP = _fixed(b',"matched_dp":{')
_WEIGHTED = _fixed(b',"weighted":')
_WEIGHTED_DP = _fixed(b',"weighted_dp":{')


class StreamTable(NamedTuple):
    """The streams of a namespace by number, and the names of their workers."""

    states: U8Vector
    """[streams] `ViewColumns.states`; the next three are those of `ViewColumns`, too."""
    faults: U8Vector
    last_batch_at: F64Vector
    last_batch_tick: F64Vector
    workers: I32Vector
    """[streams] number of the worker, -1 if the stream number is not in use."""
    ranks: I32Vector
    """[streams] DP rank."""
    following: I32Vector
    """[streams] next stream of the same worker, -1 after the last one."""
    names: Texts
    """Names of the workers, as JSON strings."""
    shown: U8Vector
    """[streams] scratch: the state to show."""
    found_in: I64Vector
    """[streams] scratch: the last query that found the stream."""
    written_in: I64Vector
    """[workers] scratch: the last part of an answer that contains the worker."""
    query: I64Vector
    """[1] number of the last query."""
    groups: Groups
    """Those of the namespace."""


class Layout(NamedTuple):
    """The text of one worker in a dialect. Gap i follows piece i."""

    pieces: Texts
    gaps: U8Vector
    state_names: Texts
    has_scores: BoolVector
    """[1] whether an answer begins with `scores` and `frequencies`."""


class _Found(NamedTuple):
    """What a query found."""

    table: StreamTable
    pages: U32Matrix
    """[streams, 4]"""
    query: int
    """Its number."""
    block_size: int


@inline_helper
def _following(found: _Found, stream: int) -> int:
    """Return the next stream of a worker that the query found; -1 if there is none."""
    stream = int64(found.table.following[stream])
    while stream >= 0 and found.table.found_in[stream] != found.query:
        stream = int64(found.table.following[stream])
    return stream


@inline_helper
def _is_new(found: _Found, stream: int, part: int) -> bool:
    """Return whether a stream was found and is the first of its worker in this part (0 or 1) of the answer."""
    table, written = found.table, 2 * found.query + part
    worker = table.workers[stream]
    if table.found_in[stream] != found.query or table.written_in[worker] == written:
        return False
    table.written_in[worker] = written
    return True


class _Holdings(NamedTuple):
    """What a worker holds, over all its ranks. A list of ranks begins at their first stream."""

    first: int
    num_ranks: int
    gpu: U32
    """Pages of the best rank, as on the next three tiers."""
    cpu: U32
    disk: U32
    external: U32
    state: U8
    """Number of the least trusted state."""
    last_batch_at: float
    """The oldest."""
    ranks_differ: bool
    """Whether any rank holds more than what is on its device."""


@inline_helper
def _holdings(found: _Found, first: int) -> _Holdings:
    """Sum up the found streams of a worker. first: the first of them.

    Streams are followed one by one: most workers have one rank, for which a vectorized loop would take twice as long.
    """
    table, pages = found.table, found.pages
    num_ranks, gpu, cpu, disk, external = 0, uint32(0), uint32(0), uint32(0), uint32(0)
    state, last_batch_at, ranks_differ = table.shown[first], table.last_batch_at[first], False
    stream = first
    while stream >= 0:
        num_ranks += 1
        gpu, cpu = max(gpu, pages[stream, GPU]), max(cpu, pages[stream, CPU])
        disk, external = max(disk, pages[stream, DISK]), max(external, pages[stream, EXTERNAL])
        state, last_batch_at = max(state, table.shown[stream]), min(last_batch_at, table.last_batch_at[stream])
        ranks_differ |= pages[stream, GPU] != pages[stream, EXTERNAL]
        stream = _following(found, stream)
    return _Holdings(first, num_ranks, gpu, cpu, disk, external, state, last_batch_at, ranks_differ)


@inline_helper
def _put_tokens(out: U8Vector, at: int, num_pages: U32, block_size: int) -> int:
    return put_number(out, at, int64(num_pages) * block_size)


@inline_helper
def _put_ranks(out: U8Vector, at: int, found: _Found, first: int, tier: int, with_zeros: bool) -> int:
    """Write the tokens of each rank on a tier."""
    written, stream = 0, first
    while stream >= 0:
        num_pages = found.pages[stream, tier]
        if with_zeros or num_pages > 0:
            at = put_key(out, at, written, found.table.ranks[stream])
            at = _put_tokens(out, at, num_pages, found.block_size)
            written += 1
        stream = _following(found, stream)
    return at


@inline_helper
def _put_gap(out: U8Vector, at: int, found: _Found, layout: Layout, held: _Holdings, gap: U8) -> int:
    """Write the number or word of one gap."""
    if gap == GPU:
        return _put_tokens(out, at, held.gpu, found.block_size)
    if gap == CPU:
        return _put_tokens(out, at, held.cpu, found.block_size)
    if gap == DISK:
        return _put_tokens(out, at, held.disk, found.block_size)
    if gap == EXTERNAL:
        return _put_tokens(out, at, held.external, found.block_size)
    if gap == RANKS:
        return _put_ranks(out, at, found, held.first, GPU, True)
    return put_piece(out, at, layout.state_names, held.state)


@inline_helper
def _put_holdings(out: U8Vector, at: int, found: _Found, layout: Layout, held: _Holdings) -> int:
    """Write what a worker holds, up to its age, which comes last."""
    for i in range(len(layout.gaps)):
        at = put_piece(out, at, layout.pieces, i)
        if layout.gaps[i] != AGE:
            at = _put_gap(out, at, found, layout, held, layout.gaps[i])
    return at


@inline_helper
def _are_alike(table: StreamTable, held: _Holdings, other: _Holdings) -> bool:
    """Return whether two workers of one rank have the same text, up to their ages."""
    return (
        held.num_ranks == 1
        and other.num_ranks == 1
        and held.gpu == other.gpu
        and held.cpu == other.cpu
        and held.disk == other.disk
        and held.external == other.external
        and held.state == other.state
        and table.ranks[held.first] == table.ranks[other.first]
    )


@inline_helper
def _put_matched_ranks(out: U8Vector, at: int, found: _Found, held: _Holdings) -> int:
    """Write the tokens of each rank on any tier, unless they equal those on the device."""
    if held.ranks_differ:
        at = put_text(out, at, _MATCHED_DP, 0, len(_MATCHED_DP) - MARGIN)
        at = _put_ranks(out, at, found, held.first, EXTERNAL, True)
        at = put_byte(out, at, CLOSE)
    return at


@inline_helper
def _weighted(gpu: U32, cpu: U32, disk: U32, external: U32, block_size: int, weights: F64Vector) -> float:
    """Return tokens by weight, in the order of operations of `TierTokens.weighted`."""
    gpu, cpu = int64(gpu) * block_size, int64(cpu) * block_size
    disk, external = int64(disk) * block_size, int64(external) * block_size
    return gpu * weights[0] + (cpu - gpu) * weights[1] + (disk - cpu) * weights[2] + (external - disk) * weights[3]


@inline_helper
def _put_weighted(out: U8Vector, at: int, found: _Found, held: _Holdings, weights: F64Vector) -> int:
    """Write the tokens by weight: of the worker, and of each rank if there are several. Returns -1 as `put_float`."""
    block_size = found.block_size
    at = put_text(out, at, _WEIGHTED, 0, len(_WEIGHTED) - MARGIN)
    at = put_float(out, at, _weighted(held.gpu, held.cpu, held.disk, held.external, block_size, weights))
    if at < 0 or held.num_ranks == 1:
        return at
    at = put_text(out, at, _WEIGHTED_DP, 0, len(_WEIGHTED_DP) - MARGIN)
    written, stream = 0, held.first
    while stream >= 0:
        row = found.pages[stream]
        at = put_key(out, at, written, found.table.ranks[stream])
        at = put_float(out, at, _weighted(row[GPU], row[CPU], row[DISK], row[EXTERNAL], block_size, weights))
        if at < 0:
            return at
        written, stream = written + 1, _following(found, stream)
    return put_byte(out, at, CLOSE)


@inline_helper
def _put_scores(out: U8Vector, at: int, found: _Found, streams: I32Vector) -> int:
    """Write the tokens on the devices: worker -> rank -> tokens, without zeros."""
    table, written = found.table, 0
    for number in streams:
        stream = int64(number)
        if _is_new(found, stream, 0):
            name = at if written == 0 else put_byte(out, at, COMMA)
            name = put_piece(out, name, table.names, table.workers[stream])
            begin = put_byte(out, put_byte(out, name, COLON), OPEN)
            end = _put_ranks(out, begin, found, stream, GPU, False)
            if end > begin:  # otherwise the next worker is written over it
                at = put_byte(out, end, CLOSE)
                written += 1
    return at


@inline_helper
def put_answer(
    out: U8Vector,
    start: int,
    table: StreamTable,
    layout: Layout,
    times: tuple[float, float, float, float],
    streams: I32Vector,
    pages: U32Matrix,
    block_size: int,
    weights: F64Vector,
) -> int:
    """Write an answer, up to the end of its list of workers.

    out: uint8[n], which has room for twice the names of all workers, `BYTES_PER_WORKER` and `BYTES_PER_RANK` for each
    one. start: index in `out` after the beginning of the answer. times: seconds since 1970, and `expired_before`,
    `syncing_before` and `late_before` of `Freshness`. streams: int32[n], pages: uint32[streams, 4]: from `find`.
    Expired streams are left out. weights: float64[4], or [0] without weights. Returns the length of the answer, or -1
    if a weighted number needs another form.
    """
    now, bounds, group_states = times[0], (times[1], times[2], times[3]), table.groups.states
    table.query[0] += 1
    query, at, written = table.query[0], start, 0
    found = _Found(table, pages, query, block_size)
    for number in streams:
        stream = int64(number)
        table.shown[stream] = shown_state(table.states, table.faults, table.last_batch_tick, stream, bounds)
        if len(group_states) > 0:
            table.shown[stream] = max(table.shown[stream], group_states[stream])
        if table.shown[stream] != _EXPIRED:
            table.found_in[stream] = query
    if layout.has_scores[0]:
        at = _put_scores(out, at, found, streams)
        at = put_text(out, at, _BETWEEN_PARTS, 0, len(_BETWEEN_PARTS) - MARGIN)
    text_start, text_stop = at, at
    previous = _Holdings(0, 0, uint32(0), uint32(0), uint32(0), uint32(0), _LIVE, now, False)
    for number in streams:
        stream = int64(number)
        if not _is_new(found, stream, 1):
            continue
        if written > 0:
            at = put_byte(out, at, COMMA)
        written += 1
        held = _holdings(found, stream)
        at = put_piece(out, at, table.names, table.workers[stream])
        if _are_alike(table, held, previous):  # most workers hold the same part of a prompt
            at = put_text(out, at, out, text_start, text_stop)
        else:
            text_start, previous = at, held
            at = text_stop = _put_holdings(out, at, found, layout, held)
        at = put_number(out, at, max(int64(0), int64(np.rint((now - held.last_batch_at) * 1000.0))))
        at = _put_matched_ranks(out, at, found, held)
        if len(weights) > 0:
            at = _put_weighted(out, at, found, held, weights)
            if at < 0:
                return at
        at = put_byte(out, at, CLOSE)
    return put_byte(out, put_byte(out, at, CLOSE), CLOSE)
