"""The kernel of selections: from the text of a prompt to the text of the answer."""

from typing import NamedTuple

import numpy as np

from api.fast.kernels.answer import CPU, EXTERNAL, GPU, Layout, StreamTable
from api.fast.kernels.connections import ANSWERED, RETURNED, SocketBuffers, send_answer
from api.fast.kernels.query import TEXT, QueryBuffers, Seeds, Times, answer_query
from api.fast.kernels.recognise import END, NAME, NAME_END, NUMBERS, NUMBERS_END
from api.fast.kernels.text import COMMA, Texts, put_byte, put_float, put_hashes, put_key, put_number, put_piece
from api.selection.kernels.record import Name, RecordTexts, put_name, put_record
from indexer.kernels.find import PageLookup
from kv_events.kernels.bundles import F64Vector, U8Vector, U64Input
from kv_events.kernels.declare import helper, inline_helper, kernel
from kv_events.kernels.numbers import int64
from selection.kernels.booked import (
    HASHES_END,
    HELD,
    MOST_HELD,
    NUM_BOOKED,
    PLACE,
    PREFILL_TOKENS,
    RECORD_END,
    REQUEST,
    ROW,
    TOKENS,
    BookedPages,
    Bookings,
    LoadColumns,
    reserve,
)
from selection.kernels.choose import least_work, shown_rows
from selection.kernels.weigh import RosterColumns, weigh

_ID, _HASHES, _TOKENS = range(3)
_GPU, _RANKS, _CPU, _DISK, _PREDICTED, _COMPUTED, _BLOCKS, _END, _HELD, _PREFILL, _REQUESTS, _CLOSE, _LAST = range(13)

MOST_EXPLAINED = 3
"""Candidates that an answer shows."""
COST_SCALE = 1e3
"""Costs are shown with three decimals."""


class SelectionTable(NamedTuple):
    """The n ranks of a roster, what answers say about them, and room for an answer."""

    booked: BookedPages
    loads: LoadColumns
    roster: RosterColumns
    bookings: Bookings
    record: RecordTexts
    openings: Texts
    """[3] what comes before the name of a reservation, its hashes and its tokens. Without bookings, [0]."""
    beginnings: Texts
    """[n] an answer with this rank, from there up to the first number that depends on the prompt."""
    pieces: Texts
    """[8] what comes before each of the other numbers, see `_GPU`, and the end. [13] if answers show candidates."""
    explained: Texts
    """[n] a candidate with this rank, up to its cost. [0]: answers show none."""
    costs: F64Vector
    """[n] scratch."""
    out: U8Vector


@helper
def _book(
    table: SelectionTable,
    hashes: U64Input,
    prompt: tuple[int, int],
    chosen: int,
    request: int,
    name: Name,
    times: tuple[float, float],
    session: U8Vector,
) -> None:
    """Book a choice for a request. There is room for it. prompt: its tokens, and the number of candidates.

    times: now, and `until` of `reserve`, in seconds since 1970.
    """
    (tokens, count), (now, until) = prompt, times
    bookings, roster, costs, shown = table.bookings, table.roster, table.costs[:count], table.record.shown
    number, begin, start = bookings.made[0], bookings.made[1], bookings.made[2]
    for i in range(hashes.shape[0]):
        bookings.hashes[begin + i] = hashes[i]
    row, prefill = int64(roster.rows[chosen]), int64(np.rint(roster.computed[chosen]))
    index, num_shown = shown_rows(costs, chosen, shown), min(count, shown.shape[0])
    made, most_held = bookings.numbers[number], int64(0)
    for i in range(num_shown):
        most_held = max(most_held, roster.held[shown[i], EXTERNAL])
    made[REQUEST], made[ROW], made[TOKENS], made[PREFILL_TOKENS] = request, row, tokens, prefill
    made[PLACE] = roster.places[row]
    made[HELD], made[MOST_HELD] = roster.held[chosen, EXTERNAL], most_held
    made[NUM_BOOKED] = reserve(table.booked, table.loads, hashes, made[PLACE], prefill, until)
    made[HASHES_END] = begin + hashes.shape[0]
    of_prompt, choice = (tokens, prefill), (num_shown, index)
    made[RECORD_END] = put_record(
        bookings.records, start, table.record, name, now, of_prompt, hashes, choice, roster, costs, session
    )
    bookings.made[0], bookings.made[1], bookings.made[2] = number + 1, made[HASHES_END], made[RECORD_END]


@inline_helper
def _can_book(bookings: Bookings, request: int, num_hashes: int) -> bool:
    has_room = (
        bookings.made[0] < bookings.numbers.shape[0] and bookings.made[1] + num_hashes <= bookings.hashes.shape[0]
    )
    return has_room and not bookings.is_taken[request]


@helper
def _put_opening(table: SelectionTable, name: Name, hashes: U64Input, tokens: int) -> int:
    """Write the fields of a reservation to `table.out`. Returns their length."""
    out, openings = table.out, table.openings
    at = put_name(out, put_piece(out, int64(0), openings, _ID), table.record.pieces, name)
    at = put_hashes(out, put_piece(out, at, openings, _HASHES), hashes)
    return put_number(out, put_piece(out, at, openings, _TOKENS), tokens)


@helper
def _put_selection(table: SelectionTable, ranks: StreamTable, count: int, chosen: int, at: int) -> int:
    """Write an answer from its rank on. count: of candidates. chosen: one of them.

    Returns its end in `table.out`, -1 for a cost that is so large that it needs another form.
    """
    out, roster = table.out, table.roster
    held, worker = roster.held, ranks.workers[roster.streams[roster.rows[chosen]]]
    gpu = cpu = external = int64(0)
    for i in range(count):
        if ranks.workers[roster.streams[roster.rows[i]]] == worker:
            gpu, cpu, external = max(gpu, held[i, GPU]), max(cpu, held[i, CPU]), max(external, held[i, EXTERNAL])
    at = put_number(out, put_piece(out, at, table.beginnings, roster.rows[chosen]), external)
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
    at = put_piece(out, at, table.pieces, _END)
    return _put_explained(table, count, at) if table.explained.ends.shape[0] > 1 else at


@helper
def _put_explained(table: SelectionTable, count: int, at: int) -> int:
    """Write the candidates with the lowest costs, and the end. Returns it in `table.out`, see `_put_selection`."""
    out, roster, costs, pieces, last = table.out, table.roster, table.costs, table.pieces, int64(-1)
    for number in range(min(count, MOST_EXPLAINED)):
        row = int64(-1)
        for i in range(count):  # equal costs in the order of the ranks
            is_after = last < 0 or costs[i] > costs[last] or (costs[i] == costs[last] and i > last)
            if is_after and (row < 0 or costs[i] < costs[row]):
                row = i
        last = row
        if number > 0:
            at = put_byte(out, at, COMMA)
        at = put_piece(out, at, table.explained, roster.rows[row])
        at = put_float(out, at, np.rint(costs[row] * COST_SCALE) / COST_SCALE)
        if at < 0:
            return at
        at = put_number(out, put_piece(out, at, pieces, _HELD), roster.predicted[row])
        at = put_number(out, put_piece(out, at, pieces, _PREFILL), roster.prefill_tokens[row])
        at = put_number(out, put_piece(out, at, pieces, _REQUESTS), roster.requests[row])
        at = put_piece(out, at, pieces, _CLOSE)
    return put_piece(out, at, pieces, _LAST)


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
    choice: tuple[float, int, int, float, float],
    session: U8Vector,
) -> int:
    """Choose a worker for each of some requests with the same template, and answer them.

    The first parameters: see `answer_requests`. choice: scale and turn of `least_work`, each request has the next turn;
    if `table` has room for bookings, the number in the name of the first one, now, and `until` of `reserve`, in seconds
    since 1970. session: see `put_record`. Returns the number of requests that were answered completely. All have an
    outcome.
    """
    scale, turn, first_name, now_s, until = choice
    (count, head_size, answer_bytes), roster, bookings = sizes, table.roster, table.bookings
    is_booking = bookings.numbers.shape[0] > 0
    bookings.made[:] = 0
    block_size, is_bigram, _, _ = numbers
    question = (int64(TEXT), block_size, is_bigram, int64(0), int64(1), int64(0))
    others = (buffers.tokens[:0], buffers.hashes[:0], question, seeds, lookup, buffers, streams, layout, times)
    at, answered = int64(0), 0
    for i in range(count):
        number = int64(sockets.members[i])
        sockets.outcomes[number] = RETURNED
        if at + sockets.head.shape[0] + answer_bytes > sockets.rests.shape[0]:
            continue
        borders = sockets.borders[number]
        num_found, end, num_positions = answer_query(sockets.data[: borders[END]], borders[NUMBERS], *others)
        if end != borders[NUMBERS_END]:
            continue
        hashes, tokens = buffers.hashes[: num_positions // block_size], num_positions + is_bigram
        if is_booking and not _can_book(bookings, i, hashes.shape[0]):
            continue
        prompt = (block_size, (tokens + block_size - 1) // block_size, tokens)
        found, now = buffers.streams[:num_found], (times[0], times[1])
        num_candidates = weigh(table.booked, hashes, found, buffers.pages, roster, table.loads, prompt, now)
        if num_candidates == 0:
            continue
        prefill, computed = roster.prefill_tokens[:num_candidates], roster.computed[:num_candidates]
        blocks, costs = roster.decode_blocks[:num_candidates], table.costs[:num_candidates]
        chosen = least_work(prefill, computed, blocks, scale, turn + i, costs)
        name = Name(first_name + i, sockets.data, borders[NAME], borders[NAME_END])
        opening = _put_opening(table, name, hashes, tokens) if is_booking else int64(0)
        length = _put_selection(table, streams, num_candidates, chosen, opening)
        if length < 0:
            continue
        if is_booking:
            of_prompt = (tokens, num_candidates)
            _book(table, hashes, of_prompt, chosen, i, name, (now_s, until), session)
        at = send_answer(sockets, number, at, table.out, length, head_size)
        answered += sockets.outcomes[number] == ANSWERED
    return answered
