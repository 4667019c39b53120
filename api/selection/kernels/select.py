"""The kernel of selections that book nothing: from the text of a prompt to the text of the answer."""

from typing import NamedTuple

import numpy as np

from api.fast.kernels.answer import CPU, EXTERNAL, GPU, Layout, StreamTable, Texts, put_key, put_number, put_piece
from api.fast.kernels.connections import ANSWERED, NUMBERS, NUMBERS_END, RETURNED, SocketBuffers, send_answer
from api.fast.kernels.query import TEXT, UNKNOWN, QueryBuffers, Seeds, Times, answer_query
from indexer.kernels.find import PageLookup
from kv_events.kernels.bundles import F64Vector, U8Vector
from kv_events.kernels.declare import helper, kernel
from kv_events.kernels.numbers import int64
from selection.kernels.booked import BookedPages
from selection.kernels.choose import least_work
from selection.kernels.weigh import LoadColumns, RosterColumns, weigh

_GPU, _RANKS, _CPU, _DISK, _PREDICTED, _COMPUTED, _BLOCKS, _END = range(8)


class SelectionTable(NamedTuple):
    """The n ranks of a roster, what answers say about them, and room for an answer."""

    booked: BookedPages
    loads: LoadColumns
    roster: RosterColumns
    beginnings: Texts
    """[n] an answer with this rank, up to the first number that depends on the prompt."""
    pieces: Texts
    """[8] what comes before each of the other numbers, see `_GPU`, and the end."""
    costs: F64Vector
    """[n] scratch."""
    out: U8Vector


@helper
def _put_selection(table: SelectionTable, ranks: StreamTable, count: int, chosen: int) -> int:
    """Write an answer to `table.out`. count: of candidates. chosen: one of them. Returns its length."""
    out, roster = table.out, table.roster
    held, worker = roster.held, ranks.workers[roster.streams[roster.rows[chosen]]]
    gpu = cpu = external = int64(0)
    for i in range(count):
        if ranks.workers[roster.streams[roster.rows[i]]] == worker:
            gpu, cpu, external = max(gpu, held[i, GPU]), max(cpu, held[i, CPU]), max(external, held[i, EXTERNAL])
    at = put_number(out, put_piece(out, int64(0), table.beginnings, roster.rows[chosen]), external)
    at = put_number(out, put_piece(out, at, table.pieces, _GPU), gpu)
    at, written = put_piece(out, at, table.pieces, _RANKS), 0
    for i in range(count):
        stream = roster.streams[roster.rows[i]]
        if ranks.workers[stream] == worker:
            at = put_number(out, put_key(out, at, written, ranks.ranks[stream]), held[i, GPU])
            written += 1
    at = put_number(out, put_piece(out, at, table.pieces, _CPU), cpu)
    at = put_number(out, put_piece(out, at, table.pieces, _DISK), external)
    if roster.predicted[chosen] > held[chosen, GPU]:
        at = put_number(out, put_piece(out, at, table.pieces, _PREDICTED), roster.predicted[chosen])
    at = put_number(out, put_piece(out, at, table.pieces, _COMPUTED), int64(np.rint(roster.computed[chosen])))
    at = put_number(out, put_piece(out, at, table.pieces, _BLOCKS), roster.decode_blocks[chosen])
    return put_piece(out, at, table.pieces, _END)


@kernel
def select_requests(
    sockets: SocketBuffers,
    sizes: tuple[int, int, int],
    numbers: tuple[int, int, int, int],
    seeds: Seeds,
    lookup: PageLookup,
    buffers: QueryBuffers,
    streams: StreamTable,
    layout: Layout,
    times: Times,
    table: SelectionTable,
    scale: float,
    turn: int,
) -> int:
    """Choose a worker for each of some requests with the same template, and answer them. Books nothing.

    The first parameters: see `answer_requests`. scale, turn: see `least_work`; each request has the next turn.
    Returns the number of requests that were answered completely. All have an outcome.
    """
    (count, head_size, answer_bytes), roster = sizes, table.roster
    block_size, is_bigram, _, _ = numbers
    question = (int64(TEXT), block_size, is_bigram, int64(UNKNOWN), int64(0), int64(1), int64(0))
    others = (buffers.tokens[:0], buffers.hashes[:0], question, seeds, lookup, buffers, streams, layout, times)
    at, answered = int64(0), 0
    for i in range(count):
        number = int64(sockets.members[i])
        sockets.outcomes[number] = RETURNED
        if at + sockets.head.shape[0] + answer_bytes > sockets.rests.shape[0]:
            continue
        borders = sockets.borders[number]
        num_found, end, num_positions = answer_query(sockets.data[: borders[1]], borders[NUMBERS], *others)
        if end != borders[NUMBERS_END]:
            continue
        hashes, tokens = buffers.hashes[: num_positions // block_size], num_positions + is_bigram
        prompt = (block_size, (tokens + block_size - 1) // block_size, tokens)
        found, now = buffers.streams[:num_found], (times[0], times[1])
        num_candidates = weigh(table.booked, hashes, found, buffers.pages, roster, table.loads, prompt, now)
        if num_candidates == 0:
            continue
        prefill, computed = roster.prefill_tokens[:num_candidates], roster.computed[:num_candidates]
        blocks, costs = roster.decode_blocks[:num_candidates], table.costs[:num_candidates]
        chosen = least_work(prefill, computed, blocks, scale, turn + i, costs)
        length = _put_selection(table, streams, num_candidates, chosen)
        at = send_answer(sockets, number, at, table.out, length, head_size)
        answered += sockets.outcomes[number] == ANSWERED
    return answered
