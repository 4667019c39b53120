"""Kernels that recognise requests by their templates.

A template has the values of the lines that matter, and the body around the numbers and the name of the request, if it
has one.

    POST /query HTTP/1.1\\r\\n...\\r\\n\\r\\n{..."token_ids":[ | 1,2,3 | ],"selection_id":" | a-17 | "}
    line                  lines            before           numbers  after               name   rest

The numbers of a msgpack body are bytes, the first ones that are a value of the map. Their head is no piece:

    POST /query HTTP/1.1\\r\\n...\\r\\n\\r\\n82 a9 token_ids | c4 08 | 01 00 00 00 02 00 00 00 | aa model_name a1 6d
    line                  lines            before                 numbers                   after

Requests that say how a reservation goes on have no body, and the name is in the line:

    POST /reservations/ | a-17 | /prefill_complete HTTP/1.1\\r\\n...\\r\\n\\r\\n
    line                  name   before                     lines
"""

import re
from typing import NamedTuple

import numpy as np

from api.fast.kernels.head import (
    AUTHORIZATION,
    CONTENT_LENGTH,
    CONTENT_TYPE,
    FETCH_SITE,
    HOST,
    ORIGIN,
    read_head,
)
from api.fast.kernels.text import Texts
from kv_events.kernels.bundles import BoolVector, BytesInput, I32Vector, I64Matrix, U8Input, U8Vector
from kv_events.kernels.byte_strings import equal_bytes, hash_bytes
from kv_events.kernels.declare import helper, inline_helper, kernel
from kv_events.kernels.instructions import eight_bytes
from kv_events.kernels.msgpack import BIN, MAP, skip
from kv_events.kernels.msgpack import read_head as read_msgpack
from kv_events.kernels.numbers import U8, U64, int64, uint8, uint64

UNRECOGNISED = -1
"""In place of the number of a template: the request is not complete, or has no known template."""

_LINE, _CONTENT_TYPE, _HOST, _AUTHORIZATION, _BEFORE, BEFORE_REST, _AFTER, AFTER_REST = range(8)
NUM_PIECES = 8
BEGIN, END, NUMBERS, NUMBERS_END, NAME, NAME_END = range(6)
"""Columns of `SocketBuffers.borders`."""
NUM_BORDERS = 6
MAX_TEMPLATE_BYTES, MOST_ARRAYS = 2**12, 2
"""Bounds on the text around the numbers, and on the arrays in it, on each side, for requests that are recognised."""
MAX_NAME_BYTES = 128
NAME_PATTERN = rb'"selection_id" ?: ?"([ !#-\[\]-~]{1,%d})"' % MAX_NAME_BYTES
"""How a body contains the name of a request. Kernels read no other names."""
LINES_BEFORE_NAMES = (b"DELETE /reservations/", b"POST /reservations/")
NAME_IN_LINE = rb"([\w.~-]+)"
"""How the first line of a request contains a name. Other characters are escaped there, and kernels do not read them."""
_RELEASE, _STEP = (np.frombuffer(line, np.uint8) for line in LINES_BEFORE_NAMES)
_MAY_BE_IN_NAME = np.array([re.fullmatch(NAME_IN_LINE, bytes((byte,))) is not None for byte in range(256)])
_SHORT_ARRAY_BYTES = 64
_MOST_DIGITS = 6
_ZERO, _NINE = uint8(ord("0")), uint8(ord("9"))
_LF, _OPEN, _CLOSE = (uint8(ord(char)) for char in "\n[]")
_SPACE, _COLON, _QUOTE, _BACKSLASH, _LAST_PLAIN = (uint8(ord(char)) for char in ' :"\\~')
_KEY_BEGIN, _KEY_END = (uint64(int.from_bytes(part, "big")) for part in (b'"selecti', b'tion_id"'))
_KEY_BYTES, _END_AT = 14, 6
_LEAST_PACKED = uint8(0x80)  # no JSON body begins with such a byte, all maps do
_FAILED = -1


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


@inline_helper
def _set(pieces: I64Matrix, piece: int, begin: int, end: int) -> None:
    pieces[piece, BEGIN], pieces[piece, END] = begin, end


@helper
def _hash(data: U8Vector, pieces: I64Matrix, has_token: bool) -> U64:
    """Return a hash of pieces of text."""
    state = uint64(0)
    for piece in range(NUM_PIECES):
        if piece != _AUTHORIZATION or has_token:
            state = hash_bytes(data, pieces[piece, BEGIN], pieces[piece, END], state)
    return state


@helper
def _is_piece(data: U8Vector, begin: int, end: int, texts: Texts, number: int) -> bool:
    """Return whether `data[begin:end]` is a piece of text."""
    start = texts.ends[number]
    return end - begin == texts.ends[number + 1] - start and equal_bytes(data, begin, end, texts.data, start)


@helper
def _template_of(data: U8Vector, templates: Templates) -> int:
    """Return the number of the template whose pieces are `templates.pieces` of `data`, or UNRECOGNISED."""
    has_token, pieces, slots = templates.has_token[0], templates.pieces, templates.slots
    slot = _hash(data, pieces, has_token) & uint64(len(slots) - 1)
    while slots[slot] != UNRECOGNISED:
        number, piece = int64(slots[slot]), int64(0)
        while piece < NUM_PIECES:
            matters = piece != _AUTHORIZATION or has_token
            begin, end = pieces[piece, BEGIN], pieces[piece, END]
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
    """Return the number in the line Content-Length, 0 without such a line, or -1 if it is no number."""
    begin, end = lines[CONTENT_LENGTH, BEGIN], lines[CONTENT_LENGTH, END]
    length = int64(0)
    for i in range(begin, end):
        if data[i] < _ZERO or data[i] > _NINE:
            return int64(_FAILED)
        length = 10 * length + int64(data[i] - _ZERO)
    return length if end - begin <= _MOST_DIGITS else int64(_FAILED)


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
    _set(pieces, _CONTENT_TYPE, lines[CONTENT_TYPE, BEGIN], lines[CONTENT_TYPE, END])
    _set(pieces, _HOST, lines[HOST, BEGIN], lines[HOST, END])
    _set(pieces, _AUTHORIZATION, lines[AUTHORIZATION, BEGIN], lines[AUTHORIZATION, END])
    is_of_page = lines[ORIGIN, END] > 0 or lines[FETCH_SITE, END] > 0
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
        begin, end = pieces[piece, BEGIN], pieces[piece, END]
        _set(pieces, piece + 1, end, end)
        if not is_found and _find_name(data, begin, end, borders, number):
            is_found = True
            _set(pieces, piece, begin, borders[number, NAME])
            _set(pieces, piece + 1, borders[number, NAME_END], end)


@inline_helper
def _after_text(data: U8Vector, begin: int, end: int, text: U8Input) -> int:
    """Return where `data[begin:end]` goes on after a text, or -1 if it does not begin with it."""
    if end - begin < text.shape[0]:
        return int64(_FAILED)
    for i in range(text.shape[0]):
        if data[begin + i] != text[i]:
            return int64(_FAILED)
    return begin + text.shape[0]


@helper
def _split_line(data: U8Vector, pieces: I64Matrix, borders: I64Matrix, number: int) -> bool:
    """Leave the name of a reservation out of the line of a request without a body. Returns whether there is one."""
    begin, end = pieces[_LINE, BEGIN], pieces[_LINE, END]
    at = max(_after_text(data, begin, end, _RELEASE), _after_text(data, begin, end, _STEP))
    rest = at
    while 0 <= rest < end and _MAY_BE_IN_NAME[data[rest]]:
        rest += 1
    if rest == at or rest - at > MAX_NAME_BYTES:
        return False
    borders[number, NAME], borders[number, NAME_END] = at, rest
    _set(pieces, _LINE, begin, at)
    _set(pieces, _CONTENT_TYPE, at, at)  # it does not matter
    _set(pieces, _BEFORE, rest, end)
    for piece in (BEFORE_REST, _AFTER, AFTER_REST):
        _set(pieces, piece, end, end)
    return True


@kernel
def packed_numbers(data: BytesInput, begin: int, stop: int) -> tuple[int, int, int]:
    """Find the first bytes that are a value of the msgpack map `data[begin:stop]`.

    Returns (index of their head, begin, end), or -1 three times if there are none, or if they come so late that there
    can be no template. Other values are not checked.
    """
    most = min(stop, begin + MAX_TEMPLATE_BYTES)
    kind, count, at = read_msgpack(data, begin, stop)
    for _ in range(int64(count) if kind == MAP else int64(0)):
        head = skip(data, at, most)
        if head < 0:
            break
        kind, size, at = read_msgpack(data, head, stop)
        if kind == BIN:
            return head, at, at + int64(size)
        at = skip(data, head, most)
        if at < 0:
            break
    return int64(_FAILED), int64(_FAILED), int64(_FAILED)


@helper
def _packed_template(data: U8Vector, body: int, borders: I64Matrix, number: int, templates: Templates) -> int:
    """Return the number of the template of a request with a msgpack body, see `recognise`."""
    stop, pieces = borders[number, END], templates.pieces
    head, start, end = packed_numbers(data, body, stop)
    if head < 0 or head - body + stop - end > MAX_TEMPLATE_BYTES:
        return int64(UNRECOGNISED)
    _set(pieces, _BEFORE, body, head)
    _set(pieces, _AFTER, end, stop)
    borders[number, NUMBERS], borders[number, NUMBERS_END] = start, end
    _split(data, pieces, borders, number)
    return _template_of(data, templates)


@helper
def recognise(data: U8Vector, borders: I64Matrix, number: int, lines: I64Matrix, templates: Templates) -> int:
    """Return the number of a request's template, or UNRECOGNISED. Writes where its numbers are to `borders`.

    The numbers may be in any of the first arrays, and any of the last ones may follow them.
    """
    stop, pieces = borders[number, END], templates.pieces
    start = body = _read_head(data, borders[number, BEGIN], stop, lines, pieces)
    if body == stop and _split_line(data, pieces, borders, number):
        return _template_of(data, templates)
    if 0 <= body < stop and data[body] >= _LEAST_PACKED:
        return _packed_template(data, body, borders, number, templates)
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
