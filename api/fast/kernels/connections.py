"""The kernels of direct connections: one reads requests and recognises them, one answers those that are alike.

A request is recognised by its template: the values of the lines that matter, and the body around the numbers and the
name of the request, if it has one.

    POST /query HTTP/1.1\\r\\n...\\r\\n\\r\\n{..."token_ids":[ | 1,2,3 | ],"selection_id":" | a-17 | "}
    line                  lines            before           numbers  after               name   rest
"""

from typing import NamedTuple

from api.fast.kernels.answer import Layout, StreamTable
from api.fast.kernels.head import (
    AUTHORIZATION,
    CONTENT_LENGTH,
    CONTENT_TYPE,
    FETCH_SITE,
    HOST,
    ORIGIN,
    read_head,
)
from api.fast.kernels.query import TEXT, QueryBuffers, Seeds, Times, answer_query
from api.fast.kernels.text import Texts, put_number, put_piece
from indexer.kernels.find import PageLookup
from kv_events.kernels.bundles import BoolVector, I32Vector, I64Matrix, U8Vector, U64Vector
from kv_events.kernels.declare import helper, inline_helper, kernel
from kv_events.kernels.instructions import address_of, call_native, eight_bytes, folded_product
from kv_events.kernels.numbers import I32, U8, U64, int64, uint8, uint64

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
UNREAD, UNRECOGNISED = -2, -1
"""In place of the number of a template: the memory is full, and the connection has to be read in the next pass; the
request is not complete, or has no known template.
"""

_LINE, _CONTENT_TYPE, _HOST, _AUTHORIZATION, _BEFORE, BEFORE_REST, _AFTER, AFTER_REST = range(8)
NUM_PIECES = 8
_BEGIN, _END, NUMBERS, NUMBERS_END, NAME, NAME_END = range(6)
"""Columns of `SocketBuffers.borders`."""
NUM_BORDERS = 6
MAX_TEMPLATE_BYTES, MOST_ARRAYS = 2**12, 2
"""Bounds on the text around the numbers, and on the arrays in it, on each side, for requests that are recognised."""
MAX_NAME_BYTES = 128
NAME_PATTERN = rb'"selection_id" ?: ?"([ !#-\[\]-~]{1,%d})"' % MAX_NAME_BYTES
"""How a body contains the name of a request. Kernels read no other names."""
_SHORT_ARRAY_BYTES = 64
_MOST_DIGITS = 6
_ZERO, _NINE = uint8(ord("0")), uint8(ord("9"))
_LF, _OPEN, _CLOSE = (uint8(ord(char)) for char in "\n[]")
_SPACE, _COLON, _QUOTE, _BACKSLASH, _LAST_PLAIN = (uint8(ord(char)) for char in ' :"\\~')
_KEY_BEGIN, _KEY_END = (uint64(int.from_bytes(part, "big")) for part in (b'"selecti', b'tion_id"'))
_KEY_BYTES, _END_AT = 14, 6
_FAILED = -1
_FACTOR = uint64(0x9E3779B97F4A7C15)  # 2**64 divided by the golden ratio


class Templates(NamedTuple):
    """Known templates."""

    texts: Texts
    """Piece i of template t is text 8 * t + i. The pieces are ordered as `_LINE` to `AFTER_REST`."""
    slots: I32Vector
    """[power of two] hash table with linear probing: numbers of templates, UNRECOGNISED in free slots."""
    has_token: BoolVector
    """[1] whether the value of Authorization matters."""
    pieces: I64Matrix
    """[8, 2] scratch: begin and end of the pieces of one request or template."""


class SocketBuffers(NamedTuple):
    """Requests and answers of one pass over n connections."""

    functions: U64Vector
    """[2] see READ and WRITEV."""
    connections: I32Vector
    """[n] file descriptors."""
    templates: I32Vector
    """[n] number of the template of each request, or see UNREAD."""
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


@inline_helper
def _set(pieces: I64Matrix, piece: int, begin: int, end: int) -> None:
    pieces[piece, _BEGIN], pieces[piece, _END] = begin, end


@helper
def _hash(data: U8Vector, pieces: I64Matrix, has_token: bool) -> U64:
    """Return a hash of pieces of text."""
    state = _FACTOR
    for piece in range(NUM_PIECES):
        at, end = pieces[piece, _BEGIN], pieces[piece, _END]
        if piece == _AUTHORIZATION and not has_token:
            continue
        state = folded_product(state ^ uint64(end - at), _FACTOR)
        while at + 8 <= end:
            state = folded_product(state ^ eight_bytes(data, at), _FACTOR)
            at += 8
        while at < end:
            state = folded_product(state ^ uint64(data[at]), _FACTOR)
            at += 1
    return state


@helper
def _is_piece(data: U8Vector, begin: int, end: int, texts: Texts, number: int) -> bool:
    """Return whether `data[begin:end]` is a piece of text."""
    start = texts.ends[number]
    size = texts.ends[number + 1] - start
    if end - begin != size:
        return False
    i = int64(0)
    while i + 8 <= size:
        if eight_bytes(data, begin + i) != eight_bytes(texts.data, start + i):
            return False
        i += 8
    while i < size:
        if data[begin + i] != texts.data[start + i]:
            return False
        i += 1
    return True


@helper
def _template_of(data: U8Vector, templates: Templates) -> int:
    """Return the number of the template whose pieces are `templates.pieces` of `data`, or UNRECOGNISED."""
    has_token, pieces, slots = templates.has_token[0], templates.pieces, templates.slots
    slot = _hash(data, pieces, has_token) & uint64(len(slots) - 1)
    while slots[slot] != UNRECOGNISED:
        number, piece = int64(slots[slot]), int64(0)
        while piece < NUM_PIECES:
            matters = piece != _AUTHORIZATION or has_token
            begin, end = pieces[piece, _BEGIN], pieces[piece, _END]
            if matters and not _is_piece(data, begin, end, templates.texts, NUM_PIECES * number + piece):
                break
            piece += 1
        if piece == NUM_PIECES:
            return number
        slot = (slot + uint64(1)) & uint64(len(slots) - 1)
    return int64(UNRECOGNISED)


@kernel
def add_template(templates: Templates, number: int) -> None:
    """Add a template, whose text has been written, to the hash table. The table must have free slots."""
    for piece in range(NUM_PIECES):
        text = NUM_PIECES * number + piece
        _set(templates.pieces, piece, templates.texts.ends[text], templates.texts.ends[text + 1])
    slots = templates.slots
    slot = _hash(templates.texts.data, templates.pieces, templates.has_token[0]) & uint64(len(slots) - 1)
    while slots[slot] != UNRECOGNISED:
        slot = (slot + uint64(1)) & uint64(len(slots) - 1)
    slots[slot] = number


@inline_helper
def _length_of_body(data: U8Vector, lines: I64Matrix) -> int:
    """Return the number in the line Content-Length, or -1."""
    begin, end = lines[CONTENT_LENGTH, _BEGIN], lines[CONTENT_LENGTH, _END]
    length = int64(0)
    for i in range(begin, end):
        if data[i] < _ZERO or data[i] > _NINE:
            return int64(_FAILED)
        length = 10 * length + int64(data[i] - _ZERO)
    return length if 0 < end - begin <= _MOST_DIGITS else int64(_FAILED)


@inline_helper
def _after_next(data: U8Vector, at: int, stop: int, byte: U8) -> int:
    """Return the index after the next byte of this value, or a larger one than `stop` if there is none."""
    while at < stop and data[at] != byte:
        at += 1
    return at + 1


@inline_helper
def _previous(data: U8Vector, least: int, at: int, byte: U8) -> int:
    """Return the index of the last byte of this value in `data[least:at]`, or `least - 1`."""
    at -= 1
    while at >= least and data[at] != byte:
        at -= 1
    return at


@helper
def _read_head(data: U8Vector, begin: int, stop: int, lines: I64Matrix, pieces: I64Matrix) -> int:
    """Write the pieces of a head. Returns where the body begins.

    Returns -1 if the body does not end at `stop`, or if a page of a browser sent the request.
    """
    at = _after_next(data, begin, stop, _LF)
    body = read_head(data, at, stop, lines) if at <= stop else int64(_FAILED)
    length = _length_of_body(data, lines) if body >= 0 else int64(_FAILED)
    _set(pieces, _LINE, begin, at)
    _set(pieces, _CONTENT_TYPE, lines[CONTENT_TYPE, _BEGIN], lines[CONTENT_TYPE, _END])
    _set(pieces, _HOST, lines[HOST, _BEGIN], lines[HOST, _END])
    _set(pieces, _AUTHORIZATION, lines[AUTHORIZATION, _BEGIN], lines[AUTHORIZATION, _END])
    is_of_page = lines[ORIGIN, _END] > 0 or lines[FETCH_SITE, _END] > 0
    return body if length >= 0 and body + length == stop and not is_of_page else int64(_FAILED)


@inline_helper
def _after_key(data: U8Vector, at: int, stop: int) -> int:
    """Return where the name begins whose key begins at an index, or -1 if there is another key or none."""
    if eight_bytes(data, at) != _KEY_BEGIN or eight_bytes(data, at + _END_AT) != _KEY_END:
        return int64(_FAILED)
    at += _KEY_BYTES
    for byte in (_COLON, _QUOTE):
        at += at < stop and data[at] == _SPACE
        if at >= stop or data[at] != byte:
            return int64(_FAILED)
        at += 1
    return at


@helper
def _find_name(data: U8Vector, begin: int, stop: int, borders: I64Matrix, number: int) -> bool:
    """Write where the first name in `data[begin:stop]` is, see `NAME_PATTERN`. Returns whether there is one."""
    for key in range(begin, stop - _KEY_BYTES):
        at = _after_key(data, key, stop)
        if at >= 0:
            end = at
            while end < stop and _SPACE <= data[end] <= _LAST_PLAIN and data[end] != _QUOTE and data[end] != _BACKSLASH:
                end += 1
            if end < stop and data[end] == _QUOTE and 0 < end - at <= MAX_NAME_BYTES:
                borders[number, NAME], borders[number, NAME_END] = at, end
                return True
    return False


@helper
def _split(data: U8Vector, pieces: I64Matrix, borders: I64Matrix, number: int) -> None:
    """Leave the name of a request out of the pieces before and after its numbers."""
    borders[number, NAME] = borders[number, NAME_END] = int64(0)
    is_found = False
    for piece in (_BEFORE, _AFTER):
        begin, end = pieces[piece, _BEGIN], pieces[piece, _END]
        _set(pieces, piece + 1, end, end)
        if not is_found and _find_name(data, begin, end, borders, number):
            is_found = True
            _set(pieces, piece, begin, borders[number, NAME])
            _set(pieces, piece + 1, borders[number, NAME_END], end)


@helper
def _recognise(data: U8Vector, borders: I64Matrix, number: int, lines: I64Matrix, templates: Templates) -> int:
    """Return the number of a request's template, or UNRECOGNISED. Writes where its numbers are to `borders`.

    The numbers may be in any of the first arrays, and any of the last ones may follow them.
    """
    stop, pieces = borders[number, _END], templates.pieces
    start = body = _read_head(data, borders[number, _BEGIN], stop, lines, pieces)
    for _ in range(MOST_ARRAYS if body >= 0 else 0):
        start = _after_next(data, start, min(stop, body + MAX_TEMPLATE_BYTES), _OPEN)
        end, least = stop, max(start, stop - MAX_TEMPLATE_BYTES)
        for _ in range(MOST_ARRAYS):
            end = _previous(data, least, end, _CLOSE)
            if end < least:
                break
            near = max(start, end - _SHORT_ARRAY_BYTES)
            if _previous(data, near, end, _OPEN) >= near:
                continue  # not the numbers, but a short array after them
            _set(pieces, _BEFORE, body, start)
            _set(pieces, _AFTER, end, stop)
            borders[number, NUMBERS], borders[number, NUMBERS_END] = start, end
            _split(data, pieces, borders, number)
            template = _template_of(data, templates)
            if template >= 0:
                return template
    return int64(UNRECOGNISED)


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
        sockets.borders[number, _BEGIN], sockets.borders[number, _END] = at, stop
        sockets.templates[number] = _recognise(data, sockets.borders, number, sockets.lines, templates)
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
    sockets.rest_borders[number, _BEGIN], sockets.rest_borders[number, _END] = at, stop
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
    numbers: block size, 1 for pages of token pairs or 0, 1 if `buffers.weights` counts or 0, bytes at the beginning of
    `buffers.out` that the caller has written. The others: as for `answer`. Returns the number of requests that were
    answered completely. All have an outcome.
    """
    count, head_size, answer_bytes = sizes
    block_size, is_bigram, has_weights, begin = numbers
    question = (int64(TEXT), block_size, is_bigram, has_weights, int64(0), begin)
    others = (buffers.tokens[:0], buffers.hashes[:0], question, seeds, lookup, buffers, table, layout, times)
    at, answered = int64(0), 0
    for i in range(count):
        number = int64(sockets.members[i])
        sockets.outcomes[number] = RETURNED
        if at + sockets.head.shape[0] + answer_bytes > sockets.rests.shape[0]:
            continue
        borders = sockets.borders[number]
        length, end, num_positions = answer_query(sockets.data[: borders[_END]], borders[NUMBERS], *others)
        if length < 0 or end != borders[NUMBERS_END]:
            continue
        if num_positions < block_size and layout.has_scores[0]:  # the answer needs a hint
            continue
        at = send_answer(sockets, number, at, buffers.out, length, head_size)
        answered += sockets.outcomes[number] == ANSWERED
    return answered
