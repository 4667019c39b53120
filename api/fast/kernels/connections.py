"""The kernels of direct connections: one reads requests and recognises them, one answers those that are alike."""

from typing import NamedTuple

from api.fast.kernels.answer import Layout, StreamTable
from api.fast.kernels.query import TOKENS, Given, QueryBuffers, Seeds, Times, answer_query
from api.fast.kernels.recognise import BEGIN, END, NUMBERS, NUMBERS_END, Templates, recognise
from api.fast.kernels.text import Texts, put_number, put_piece
from indexer.kernels.find import PageLookup
from kv_events.kernels.bundles import I32Vector, I64Matrix, U8Vector, U64Vector
from kv_events.kernels.declare import helper, inline_helper, kernel
from kv_events.kernels.instructions import address_of, call_native
from kv_events.kernels.numbers import I32, int64, uint64

MAX_REQUEST_BYTES = 2**18
"""Longer requests are returned."""
ROOM_BYTES = 2**19
"""Size of the memory for requests of one pass."""

# elements of functions: addresses of C functions
READ, WRITEV = range(2)
NUM_FUNCTIONS = 2

RETURNED, ANSWERED, CUT = range(3)
"""What happened to a request: it is returned to the caller; it was answered; it was answered, and the caller must send
the rest of the answer.
"""
UNREAD = -2
"""In place of the number of a template: the memory is full, and the connection has to be read in the next pass."""


class SocketBuffers(NamedTuple):
    """Requests and answers of one pass over n connections."""

    functions: U64Vector
    """[2] see READ and WRITEV."""
    connections: I32Vector
    """[n] file descriptors."""
    templates: I32Vector
    """[n] number of the template of each request, UNRECOGNISED or UNREAD."""
    members: I32Vector
    """[up to n] the requests that `answer_requests` answers."""
    outcomes: I32Vector
    """[n] see RETURNED."""
    data: U8Vector
    """Requests are read into it."""
    borders: I64Matrix
    """[n, 6] begin and end of each request in `data`, of its numbers, and of its name, which may be empty."""
    head: U8Vector
    """Head of an answer: the fixed part, and room for its length."""
    head_end: Texts
    """[1] the part of a head after the length."""
    rests: U8Vector
    """Rests of answers that were cut."""
    rest_borders: I64Matrix
    """[n, 2] begin and end of each rest."""
    parts: U64Vector
    """[4] addresses and sizes of head and body: two `struct iovec`."""
    lines: I64Matrix
    """[NUM_FOUND, 2] scratch, see `read_head`."""


@kernel
def read_requests(sockets: SocketBuffers, templates: Templates, count: int) -> None:
    """Read a request from each connection, all of which have something to read, and recognise it.

    Writes `sockets.templates`, and `sockets.borders` of what was read.
    """
    data, at = sockets.data, int64(0)
    for number in range(count):
        sockets.templates[number] = UNREAD
        if at + MAX_REQUEST_BYTES > data.shape[0]:
            continue
        connection = uint64(sockets.connections[number])
        size = int64(call_native(sockets.functions[READ], connection, address_of(data, at), uint64(MAX_REQUEST_BYTES)))
        stop = at + max(int64(0), size)
        sockets.borders[number, BEGIN], sockets.borders[number, END] = at, stop
        sockets.templates[number] = recognise(data, sockets.borders, number, sockets.lines, templates)
        at = stop


@inline_helper
def _write(sockets: SocketBuffers, connection: I32, body: U8Vector, num_bytes: int, head_size: int) -> tuple[int, int]:
    """Send head and `body[:num_bytes]`. Returns the number of bytes sent, 0 after an error, and that of the head."""
    at = put_number(sockets.head, head_size, num_bytes)
    at = put_piece(sockets.head, at, sockets.head_end, 0)
    parts = sockets.parts
    parts[0], parts[1] = address_of(sockets.head, 0), uint64(at)
    parts[2], parts[3] = address_of(body, 0), uint64(num_bytes)
    sent = call_native(sockets.functions[WRITEV], uint64(connection), address_of(parts, 0), uint64(2))
    return max(int64(0), int64(sent)), at


@helper
def _keep_rest(
    sockets: SocketBuffers, number: int, at: int, body: U8Vector, num_bytes: int, head_bytes: int, sent: int
) -> int:
    """Copy the part of an answer that was not sent to `rests`, from index `at` on. Returns its end."""
    stop = at
    for i in range(sent, head_bytes):
        sockets.rests[stop] = sockets.head[i]
        stop += 1
    for i in range(max(int64(0), sent - head_bytes), num_bytes):
        sockets.rests[stop] = body[i]
        stop += 1
    sockets.rest_borders[number, BEGIN], sockets.rest_borders[number, END] = at, stop
    sockets.outcomes[number] = CUT
    return stop


@helper
def send_answer(sockets: SocketBuffers, number: int, at: int, body: U8Vector, num_bytes: int, head_size: int) -> int:
    """Send the answer to a request, and write its outcome.

    at: end of the rests of other answers. Returns it, with that of this one.
    """
    sent, head_bytes = _write(sockets, sockets.connections[number], body, num_bytes, head_size)
    if sent < head_bytes + num_bytes:
        return _keep_rest(sockets, number, at, body, num_bytes, head_bytes, sent)
    sockets.outcomes[number] = ANSWERED
    return at


@kernel
def answer_requests(
    sockets: SocketBuffers,
    sizes: tuple[int, int, int],
    given: Given,
    numbers: tuple[int, int, int, int],
    seeds: Seeds,
    lookup: PageLookup,
    buffers: QueryBuffers,
    table: StreamTable,
    layout: Layout,
    times: Times,
) -> int:
    """Answer requests with the same template.

    sizes: number of `sockets.members`, bytes of the fixed part of `sockets.head`, bound on the bytes of an answer.
    given: how the prompts are given. numbers: block size, 1 for pages of token pairs or 0, 1 if `buffers.weights`
    counts or 0, bytes at the beginning of `buffers.out` that the caller has written. The others: as for `answer_query`.
    Returns the number of requests that were answered completely. All have an outcome.
    """
    count, head_size, answer_bytes = sizes
    block_size, is_bigram, has_weights, begin = numbers
    question = (given, block_size, is_bigram, has_weights, int64(0), begin)
    others = (buffers.tokens[:0], buffers.hashes[:0], question, seeds, lookup, buffers, table, layout, times)
    at, answered = int64(0), 0
    for i in range(count):
        number = int64(sockets.members[i])
        sockets.outcomes[number] = RETURNED
        if at + sockets.head.shape[0] + answer_bytes > sockets.rests.shape[0]:
            continue
        borders = sockets.borders[number]
        data, start, stop = sockets.data[: borders[END]], borders[NUMBERS], borders[NUMBERS_END]
        length, num_positions = answer_query(data, start, stop, *others)
        if length < 0:
            continue
        if given[0] == TOKENS and num_positions < block_size and layout.has_scores[0]:  # the answer needs a hint
            continue
        at = send_answer(sockets, number, at, buffers.out, length, head_size)
        answered += sockets.outcomes[number] == ANSWERED
    return answered
