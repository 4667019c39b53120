"""The kernel that serves connections whose requests are alike: it reads, answers and writes by itself.

Such requests have the same values in the lines of the head that matter, and the same body around the numbers:

    POST /query HTTP/1.1\\r\\n...\\r\\n\\r\\n{..."token_ids":[ | 1,2,3 | ]}
    line                  lines            before           numbers  after
"""

from typing import NamedTuple

import numpy as np
from numba import types

from api.fast.answer_kernels import Layout, StreamTable, Texts, put_number, put_piece
from api.fast.head_kernel import AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HOST, read_lines
from api.fast.query_kernel import TEXT, UNKNOWN, QueryBuffers, answer
from indexer.kernels.find import PageLookup
from kv_events.kernels.bundles import I32Vector, I64Matrix, U8Vector, U64Vector
from kv_events.kernels.declare import array_function, array_helper, array_kernel
from kv_events.kernels.instructions import address_of, call_native, eight_bytes

MAX_REQUEST_BYTES = 2**18
"""Longer requests are returned."""
ROOM_BYTES = 2**19
"""Size of the memory for requests of one pass."""

# elements of functions: addresses of C functions
READ, WRITEV = range(2)
NUM_FUNCTIONS = 2

WAITING, ANSWERED, RETURNED, CUT = range(4)
"""What happened to a connection: nothing yet; its request was answered; its request is returned to the caller; its
request was answered, and the rest of the answer is left to the caller.
"""

_LINE, _CONTENT_TYPE, _HOST, _AUTHORIZATION, _BEFORE, _AFTER = range(6)
_BEGIN, _END = range(2)
_MOST_DIGITS = 6
_ZERO, _NINE = np.uint8(ord("0")), np.uint8(ord("9"))
_FAILED = -1


class SocketBuffers(NamedTuple):
    """Requests and answers of one pass over some connections."""

    functions: U64Vector
    """[2] see READ and WRITEV."""
    connections: I32Vector
    """[n] file descriptors."""
    outcomes: I32Vector
    """[n] see WAITING and following."""
    data: U8Vector
    """Requests are read into it. Those that are returned stay there, and so do rests of answers."""
    borders: I64Matrix
    """[n, 2] begin and end in `data`."""
    head: U8Vector
    """Head of an answer: the fixed part, and room for its length."""
    head_end: Texts
    """[1] the part of a head after the length."""
    parts: U64Vector
    """[4] addresses and sizes of head and body: two `struct iovec`."""
    lines: I64Matrix
    """[NUM_FOUND, 2] scratch, see `read_lines`."""


@array_function
def _is_at(data, at, stop, texts, number):
    """Return whether a piece of text is in `data` at this position, which is not negative, and ends before `stop`."""
    start, end = texts.ends[number], texts.ends[number + 1]
    length = end - start
    if at + length > stop:
        return False
    i = 0
    while i + 8 <= length:
        if eight_bytes(data, at + i) != eight_bytes(texts.data, start + i):
            return False
        i += 8
    while i < length:
        if data[at + i] != texts.data[start + i]:
            return False
        i += 1
    return True


@array_helper
def _size(texts, number):
    return texts.ends[number + 1] - texts.ends[number]


@array_helper
def _has_value(data, lines, line, template, number):
    """Return whether a line has the value of the template. An empty one stands for any."""
    size = _size(template, number)
    begin, end = lines[line, _BEGIN], lines[line, _END]
    return size == 0 or (end - begin == size and _is_at(data, begin, end, template, number))


@array_helper
def _length_of_body(data, lines):
    """Return the number in the line Content-Length, or -1."""
    begin, end = lines[CONTENT_LENGTH, _BEGIN], lines[CONTENT_LENGTH, _END]
    length = np.int64(0)
    for i in range(begin, end):
        if data[i] < _ZERO or data[i] > _NINE:
            return np.int64(_FAILED)
        length = 10 * length + np.int64(data[i] - _ZERO)
    return length if 0 < end - begin <= _MOST_DIGITS else np.int64(_FAILED)


@array_function
def _start_of_numbers(template, data, start, stop, lines):
    """Return where the numbers of a request begin, or -1 if it is not one of the template, or not complete."""
    if not _is_at(data, start, stop, template, _LINE):
        return np.int64(_FAILED)
    body = read_lines(data, start + _size(template, _LINE), stop, lines)
    if body < 0 or not _has_value(data, lines, CONTENT_TYPE, template, _CONTENT_TYPE):
        return np.int64(_FAILED)
    if not _has_value(data, lines, HOST, template, _HOST):
        return np.int64(_FAILED)
    if not _has_value(data, lines, AUTHORIZATION, template, _AUTHORIZATION):
        return np.int64(_FAILED)
    length = _length_of_body(data, lines)
    if length < 0 or body + length != stop or not _is_at(data, body, stop, template, _BEFORE):
        return np.int64(_FAILED)
    return body + _size(template, _BEFORE)


@array_helper
def _write(sockets, connection, body, num_bytes, head_size):
    """Send head and `body[:num_bytes]`. Returns the number of bytes sent, 0 after an error, and that of the head."""
    at = put_number(sockets.head, head_size, num_bytes)
    at = put_piece(sockets.head, at, sockets.head_end, 0)
    parts = sockets.parts
    parts[0], parts[1] = address_of(sockets.head, 0), np.uint64(at)
    parts[2], parts[3] = address_of(body, 0), np.uint64(num_bytes)
    sent = call_native(sockets.functions[WRITEV], np.uint64(connection), address_of(parts, 0), np.uint64(2))
    return max(np.int64(0), np.int64(sent)), at


@array_function
def _keep_rest(sockets, number, at, body, num_bytes, head_bytes, sent):
    """Copy the part of an answer that was not sent to `data`, from index `at` on. Returns its end."""
    stop = at
    for i in range(sent, head_bytes):
        sockets.data[stop] = sockets.head[i]
        stop += 1
    for i in range(max(np.int64(0), sent - head_bytes), num_bytes):
        sockets.data[stop] = body[i]
        stop += 1
    sockets.borders[number, _BEGIN], sockets.borders[number, _END] = at, stop
    sockets.outcomes[number] = CUT
    return stop


@array_kernel(
    types.int64,
    SocketBuffers,
    Texts,
    types.UniTuple(types.int64, 3),
    types.UniTuple(types.int64, 4),
    types.UniTuple(types.uint64, 2),
    PageLookup,
    QueryBuffers,
    StreamTable,
    Layout,
    types.UniTuple(types.float64, 4),
)
def serve_ready(sockets, template, sizes, numbers, seeds, lookup, buffers, table, layout, times):
    """Serve one request of each connection, all of which have something to read.

    template: six pieces, see `RequestTemplate.pieces`. sizes: number of connections, bytes of the fixed part of
    `sockets.head`, bound on the bytes of an answer. numbers: block size, 1 for pages of token pairs or 0, 1 if
    `buffers.weights` counts or 0, bytes at the beginning of `buffers.out` that the caller has written. The others: as
    for `answer`. Returns the number of connections that were answered completely. The others have an outcome of their
    own. WAITING: the memory is full, and the connection has to be served in the next pass.
    """
    count, head_size, answer_bytes = sizes
    block_size, is_bigram, has_weights, begin = numbers
    question = (np.int64(TEXT), block_size, is_bigram, np.int64(UNKNOWN), has_weights, np.int64(0), begin)
    others = (buffers.tokens[:0], buffers.hashes[:0], question, seeds, lookup, buffers, table, layout, times)
    data, at, answered = sockets.data, np.int64(0), 0
    after = _size(template, _AFTER)
    most = MAX_REQUEST_BYTES + sockets.head.shape[0] + answer_bytes
    for number in range(count):
        connection = sockets.connections[number]
        sockets.outcomes[number] = WAITING
        if at + most > data.shape[0]:
            continue
        size = np.int64(
            call_native(
                sockets.functions[READ], np.uint64(connection), address_of(data, at), np.uint64(MAX_REQUEST_BYTES)
            )
        )
        stop = at + max(np.int64(0), size)
        sockets.outcomes[number] = RETURNED
        sockets.borders[number, _BEGIN], sockets.borders[number, _END] = at, stop
        start = _start_of_numbers(template, data, at, stop, sockets.lines)
        length = np.int64(_FAILED)
        if start >= 0 and start + after <= stop and _is_at(data, stop - after, stop, template, _AFTER):
            length, end, _ = answer(data[:stop], start, *others)
            if end + after != stop:
                length = np.int64(_FAILED)
        if length < 0:
            at = stop
            continue
        sent, head_bytes = _write(sockets, connection, buffers.out, length, head_size)
        if sent < head_bytes + length:
            at = _keep_rest(sockets, number, at, buffers.out, length, head_bytes, sent)
        else:
            sockets.outcomes[number] = ANSWERED
            answered += 1
    return answered
