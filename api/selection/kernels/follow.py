"""The kernel of reservations that go on: it notes a step, writes its record and answers."""

from typing import NamedTuple

from api.fast.kernels.connections import ANSWERED, RETURNED, SocketBuffers, send_answer
from api.fast.kernels.recognise import NAME, NAME_END
from api.fast.kernels.text import Texts, put_piece
from api.selection.kernels.record import put_name
from kv_events.kernels.bundles import I64Vector, U8Vector
from kv_events.kernels.declare import helper, kernel
from kv_events.kernels.msgpack import put_float, put_integer
from kv_events.kernels.numbers import int64
from kv_events.limits import MAX_OUTPUT_BLOCKS
from selection.kernels.reservations import (
    AT_END,
    AT_OUTPUT,
    NONE,
    OUTPUT_BLOCKS,
    UNCHANGED,
    BookColumns,
    expire,
    find_reservation,
    note_step,
)

NUM_STEPS, NUM_PREFILLS, NUM_BYTES = range(3)
_OPENING, _FIRST_STEP, _SUFFIX = 0, 1, 4


class StepTable(NamedTuple):
    """What records of steps have in common, and room for those of one call."""

    texts: Texts
    """[5] what comes in a record before the name; each step with the field after it; the end of the name of the
    reservation that computes the prompt of another one, as plain text."""
    made: I64Vector
    """[3] records of the step, those of prefills that ended, and bytes of all."""
    records: U8Vector
    name: U8Vector
    """Scratch."""
    answer: U8Vector


@helper
def _follow(book: BookColumns, table: StepTable, name_bytes: int, step: int, now: float) -> bool:
    """Note a step of the reservation with the name in `table`. Returns False if it is unknown."""
    entry = find_reservation(book, table.name[:name_bytes])
    if entry == NONE:
        return False
    blocks = min(book.numbers[entry, OUTPUT_BLOCKS] + 1, MAX_OUTPUT_BLOCKS) if step == AT_OUTPUT else int64(0)
    note_step(book, entry, step, blocks, UNCHANGED, now)
    out, at = table.records, put_piece(table.records, table.made[NUM_BYTES], table.texts, _OPENING)
    at = put_float(out, put_name(out, at, table.name, name_bytes), now)
    table.made[NUM_BYTES] = put_integer(out, put_piece(out, at, table.texts, _FIRST_STEP + step), blocks)
    return True


@kernel
def follow_requests(
    sockets: SocketBuffers,
    count: int,
    head_size: int,
    book: BookColumns,
    table: StepTable,
    step: int,
    times: tuple[float, float],
) -> int:
    """Note the same step of the reservations that the first `count` of `sockets.members` name, and answer them.

    head_size: bytes of the fixed part of `sockets.head`. `sockets.rests` has room for all answers. times: now, in
    seconds since 1970, and the time-to-live of reservations. Requests that name no reservation are returned. Returns
    the number of requests that were answered completely.
    """
    now, table.made[:] = times[0], 0
    expire(book, now, times[1])
    at, answered, size = int64(0), 0, int64(table.answer.shape[0])
    for i in range(count):
        number = int64(sockets.members[i])
        sockets.outcomes[number] = RETURNED
        begin, end = sockets.borders[number, NAME], sockets.borders[number, NAME_END]
        for k in range(begin, end):
            table.name[k - begin] = sockets.data[k]
        if not _follow(book, table, end - begin, step, now):
            continue
        table.made[NUM_STEPS] += 1
        if step != AT_OUTPUT:
            with_suffix = put_piece(table.name, end - begin, table.texts, _SUFFIX)
            table.made[NUM_PREFILLS] += _follow(book, table, with_suffix, AT_END, now)
        at = send_answer(sockets, number, at, table.answer, size, head_size)
        answered += sockets.outcomes[number] == ANSWERED
    return answered
