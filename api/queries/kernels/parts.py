"""Kernels that find the parts of JSON and msgpack without creating Python objects, and without the interpreter."""

from api.queries.kernels.numbers import WHITE, after_white
from kv_events.kernels.bundles import I64Matrix, U8Input
from kv_events.kernels.declare import helper, kernel
from kv_events.kernels.msgpack import ARRAY, BAD, BIN, EXT, MAP, STR, read_head, skip
from kv_events.kernels.numbers import int64, uint64

_QUOTE, _BACKSLASH, _COMMA, _COLON = ord('"'), ord("\\"), ord(","), ord(":")
_OPENING = (ord("["), ord("{"))
_CLOSING = (ord("]"), ord("}"))
_BROKEN = -1


@helper
def _after_string(text: U8Input, at: int) -> int:
    """Return the position after the string that begins here, -1 if it has no end."""
    at += 1
    while at < len(text):
        char = text[at]
        if char == _QUOTE:
            return at + 1
        at += 2 if char == _BACKSLASH else 1
    return _BROKEN


@helper
def _after_value(text: U8Input, at: int) -> int:
    """Return the position after the value that begins here, -1 if it has no end. What is inside is not checked."""
    depth = 0
    while at < len(text):
        char = text[at]
        if char == _QUOTE:
            at = _after_string(text, at)
            if at < 0 or depth == 0:
                return at
            continue
        if char in _OPENING:
            depth += 1
        elif char in _CLOSING:
            if depth < 2:
                return at + depth
            depth -= 1
        elif depth == 0 and (char == _COMMA or WHITE[char]):
            return at
        at += 1
    return _BROKEN


@kernel
def json_parts(text: U8Input, is_object: int, spans: I64Matrix) -> int:
    """Find the members of an object, or the elements of an array.

    text: uint8[n]. is_object: 1 or 0. spans: int64[most, 4], written: begin and end of the key, begin and end of the
    value. Elements have no key. Returns the number of parts, most + 1 if there are more than `most`, -1 if the text is
    not such a value. Values are not checked.
    """
    at = after_white(text, 0)
    if at == len(text) or text[at] != _OPENING[is_object]:
        return _BROKEN
    at, found = after_white(text, at + 1), 0
    if at < len(text) and text[at] == _CLOSING[is_object]:
        return found if after_white(text, at + 1) == len(text) else _BROKEN
    while found < spans.shape[0]:
        if is_object:
            end = _after_string(text, at) if at < len(text) and text[at] == _QUOTE else _BROKEN
            spans[found, 0], spans[found, 1] = at, end
            at = after_white(text, end) if end > 0 else len(text)
            if at == len(text) or text[at] != _COLON:
                return _BROKEN
            at = after_white(text, at + 1)
        end = _after_value(text, at)
        spans[found, 2], spans[found, 3] = at, end
        found += 1
        at = after_white(text, end) if end > 0 else len(text)
        if at == len(text):
            return _BROKEN
        if text[at] == _CLOSING[is_object]:
            return found if after_white(text, at + 1) == len(text) else _BROKEN
        if text[at] != _COMMA:
            return _BROKEN
        at = after_white(text, at + 1)
    return found + 1


@kernel
def json_objects(text: U8Input) -> int:
    """Return the number of lists, objects and strings, keys included. text: uint8[n], not checked."""
    at, found = 0, 0
    while 0 <= at < len(text):
        char = text[at]
        if char == _QUOTE or char in _OPENING:
            found += 1
        at = _after_string(text, at) if char == _QUOTE else at + 1
    return found


@kernel
def msgpack_objects(data: U8Input) -> int:
    """Return the number of arrays, maps, texts, bytes and extensions, up to what is broken. data: uint8[n].

    See `json_objects`.
    """
    at, found, kind = 0, 0, ARRAY
    while at < len(data) and kind != BAD:
        kind, value, at = read_head(data, at, len(data))
        if kind in (STR, BIN, EXT):
            at += int64(value)
        if kind in (STR, BIN, EXT, ARRAY, MAP):
            found += 1
    return found


@kernel
def msgpack_parts(data: U8Input, is_object: int, spans: I64Matrix) -> int:
    """Find the pairs of a map, or the elements of an array. See `json_parts`. data: uint8[n]."""
    kind, value, at = read_head(data, 0, len(data))
    if kind != (MAP if is_object else ARRAY):
        return _BROKEN
    if value > uint64(spans.shape[0]):
        return spans.shape[0] + 1
    for found in range(int64(value)):
        for column in range(0 if is_object else 2, 4, 2):
            spans[found, column] = at
            at = skip(data, at, len(data))
            if at < 0:
                return _BROKEN
            spans[found, column + 1] = at
    return int64(value) if at == len(data) else _BROKEN


@kernel
def msgpack_array(data: U8Input) -> tuple[int, int]:
    """Return the number of elements of an array, -1 if it is none, and the position of the first one."""
    kind, value, at = read_head(data, 0, len(data))
    return int64(value) if kind == ARRAY else int64(_BROKEN), at


@kernel
def msgpack_after(data: U8Input, at: int, count: int) -> int:
    """Return the position after some values, the first of which begins here."""
    for _ in range(count):
        at = skip(data, at, len(data))
    return at
