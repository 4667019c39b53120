"""The kernel of selections: from the text of a prompt to the text of the answer."""

from typing import NamedTuple

import numpy as np

from api.fast.kernels.answer import CPU, EXTERNAL, GPU, Layout, StreamTable
from api.fast.kernels.connections import ANSWERED, RETURNED, SocketBuffers, send_answer
from api.fast.kernels.query import JSON_TOKENS, QueryBuffers, Seeds, Times, answer_query
from api.fast.kernels.recognise import END, NAME, NAME_END, NUMBERS, NUMBERS_END
from api.fast.kernels.text import (
    COMMA,
    Texts,
    put_byte,
    put_float,
    put_hashes,
    put_key,
    put_number,
    put_piece,
    put_text,
)
from api.selection.kernels.record import (
    HELD,
    LOST_TOKENS,
    MOST_HELD,
    NAMES,
    NUM_BYTES,
    NUM_HASHES,
    NUM_LOST,
    NUM_RECORDS,
    NUMBER,
    REQUESTS,
    ROW,
    TOKENS,
    BookedChoices,
    RecordTexts,
    put_record,
)
from indexer.kernels.find import PageLookup
from kv_events.kernels.bundles import F64Vector, U8Vector, U64Input
from kv_events.kernels.byte_strings import equal_bytes
from kv_events.kernels.declare import helper, inline_helper, kernel
from kv_events.kernels.numbers import int64, uint8
from kv_events.kernels.page_table import CAPACITY
from kv_events.kernels.page_table_ops import num_entries
from kv_events.reservations import AT_PREFILL
from selection.kernels.choose import least_work, shown_rows
from selection.kernels.reservations import BookColumns, expire, reserve
from selection.kernels.weigh import RosterColumns, weigh

_ID, _HASHES, _TOKENS = range(3)
_GPU, _RANKS, _CPU, _DISK, _PREDICTED, _COMPUTED, _BLOCKS, _END, _HELD, _PREFILL, _REQUESTS, _CLOSE, _LAST = range(13)

_AT_PREFILL = np.frombuffer(AT_PREFILL.encode(), np.uint8)
_DOT = uint8(ord("."))

MOST_HASHES = 2**13
"""Bound on the pages of the prompts that are booked in one call. A longer prompt is booked in Python."""
MOST_EXPLAINED = 3
"""Candidates that an answer shows."""
COST_SCALE = 1e3
"""Costs are shown with three decimals."""


class SelectionTable(NamedTuple):
    """The n ranks of a roster, what answers say about them, and room for an answer."""

    book: BookColumns
    roster: RosterColumns
    choices: BookedChoices
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
    name_bytes: int,
    times: tuple[float, float],
    session: U8Vector,
) -> bool:
    """Book a choice under the name in `table.choices`. Returns False if it is in use. There is room for it.

    prompt: its tokens, and the number of candidates. times: see `reserve`.
    """
    (tokens, count), choices, roster, shown = prompt, table.choices, table.roster, table.record.shown
    row, prefill = int64(roster.rows[chosen]), int64(np.rint(roster.computed[chosen]))
    place, name = int64(roster.places[row]), choices.name
    if not reserve(table.book, name[:name_bytes], hashes, place, prefill, times):
        return False
    index, num_shown = shown_rows(table.costs[:count], chosen, shown), min(count, shown.shape[0])
    of_name, of_prompt, choice = (name, name_bytes), (tokens, prefill), (num_shown, index)
    end = put_record(
        choices.records,
        choices.made[NUM_BYTES],
        table.record,
        of_name,
        times[0],
        of_prompt,
        hashes,
        choice,
        roster,
        table.costs,
        session,
    )
    most_held = int64(0)
    for i in range(num_shown):
        most_held = max(most_held, roster.held[shown[i], EXTERNAL])
    _count(choices, row, tokens, most_held, roster.held[chosen, EXTERNAL])
    choices.ends[choices.made[NUM_RECORDS]] = choices.made[NUM_BYTES] = end
    choices.made[NUM_RECORDS] += 1
    choices.made[NUM_HASHES] += hashes.shape[0]
    return True


@inline_helper
def _count(choices: BookedChoices, row: int, tokens: int, most_held: int, held: int) -> None:
    """Count a choice. row: of the roster. most_held: what the best candidate holds. held: what the chosen one does."""
    made, lost = choices.made, choices.lost
    made[TOKENS] += tokens
    made[MOST_HELD] += most_held
    made[HELD] += held
    if most_held > held:
        at = int64(0)
        while at < made[NUM_LOST] and lost[at, ROW] != row:
            at += 1
        if at == made[NUM_LOST]:
            lost[at, ROW], lost[at, REQUESTS], lost[at, LOST_TOKENS] = row, 0, 0
            made[NUM_LOST] += 1
        lost[at, REQUESTS] += 1
        lost[at, LOST_TOKENS] += most_held - held
        lost[at, NUMBER] = made[NUM_RECORDS]


@helper
def _name(table: SelectionTable, data: U8Vector, begin: int, end: int, number: int) -> int:
    """Write the name of a request, `data[begin:end]`, or one with a number if that is empty. Returns its size."""
    name = table.choices.name
    if begin == end:
        return put_number(name, put_piece(name, int64(0), table.record.pieces, NAMES), number)
    for i in range(begin, end):
        name[i - begin] = data[i]
    return end - begin


@inline_helper
def _is_id(name: U8Vector, size: int) -> bool:
    """Return whether paths can name a reservation, which is not the prefill of another one, as `check_id` does."""
    begin = size - _AT_PREFILL.shape[0]
    is_prefill = begin >= 0 and equal_bytes(name, begin, size, _AT_PREFILL, int64(0))
    return not is_prefill and not (size <= 2 and name[0] == _DOT and name[size - 1] == _DOT)


@inline_helper
def _has_room(table: SelectionTable, num_hashes: int) -> bool:
    made, pages, names = table.choices.made, table.book.pages.table, table.book.names
    return (
        made[NUM_RECORDS] < table.choices.ends.shape[0]
        and made[NUM_HASHES] + num_hashes <= MOST_HASHES
        and num_entries(names) < names.meta[CAPACITY]
        and num_entries(pages) + num_hashes <= pages.meta[CAPACITY]
    )


@helper
def _put_opening(table: SelectionTable, name_bytes: int, hashes: U64Input, tokens: int) -> int:
    """Write the fields of a reservation to `table.out`. Returns their length."""
    out, openings = table.out, table.openings
    at = put_text(out, put_piece(out, int64(0), openings, _ID), table.choices.name, int64(0), name_bytes)
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
    choice: tuple[float, int, int, float, float, float],
    session: U8Vector,
) -> int:
    """Choose a worker for each of some requests with the same template, and answer them.

    The first parameters: see `answer_requests`. choice: scale and turn of `least_work`, each request has the next turn;
    the number in the name of the first reservation; now, and until when its pages count as held, in seconds since 1970;
    the time-to-live of reservations. session: see `put_record`. Choices are booked if `table` has room for them.
    Returns the number of requests that were answered completely. All have an outcome.
    """
    scale, turn, first_name, now_s, until, ttl_s = choice
    (count, head_size, answer_bytes), roster, choices = sizes, table.roster, table.choices
    is_booking = choices.ends.shape[0] > 0
    choices.made[:] = 0
    expire(table.book, now_s, ttl_s)
    block_size, is_bigram, _, _ = numbers
    question = (JSON_TOKENS, block_size, is_bigram, int64(0), int64(1), int64(0))
    others = (buffers.tokens[:0], buffers.hashes[:0], question, seeds, lookup, buffers, streams, layout, times)
    at, answered = int64(0), 0
    for i in range(count):
        number = int64(sockets.members[i])
        sockets.outcomes[number] = RETURNED
        if at + sockets.head.shape[0] + answer_bytes > sockets.rests.shape[0]:
            continue
        borders = sockets.borders[number]
        data, start, stop = sockets.data[: borders[END]], borders[NUMBERS], borders[NUMBERS_END]
        num_found, num_positions = answer_query(data, start, stop, *others)
        if num_positions < 0:
            continue
        hashes, tokens = buffers.hashes[: num_positions // block_size], num_positions + is_bigram
        if is_booking and not _has_room(table, hashes.shape[0]):
            continue
        prompt = (block_size, (tokens + block_size - 1) // block_size, tokens)
        found = buffers.streams[:num_found]
        num_candidates = weigh(table.book, hashes, found, buffers.pages, roster, prompt, times[1])
        if num_candidates == 0:
            continue
        prefill, computed = roster.prefill_tokens[:num_candidates], roster.computed[:num_candidates]
        blocks, costs = roster.decode_blocks[:num_candidates], table.costs[:num_candidates]
        chosen = least_work(prefill, computed, blocks, scale, turn + i, costs)
        name_bytes = opening = int64(0)
        if is_booking:
            number_in_name = first_name + choices.made[NUM_RECORDS]
            name_bytes = _name(table, sockets.data, borders[NAME], borders[NAME_END], number_in_name)
            opening = _put_opening(table, name_bytes, hashes, tokens)
        length = _put_selection(table, streams, num_candidates, chosen, opening)
        if length < 0:
            continue
        if is_booking:
            of_prompt, when = (tokens, num_candidates), (now_s, until)
            if not _is_id(choices.name, name_bytes) or not _book(
                table, hashes, of_prompt, chosen, name_bytes, when, session
            ):
                continue
        at = send_answer(sockets, number, at, table.out, length, head_size)
        answered += sockets.outcomes[number] == ANSWERED
    return answered
