"""Kernels that read the tokens of an event. Most bytes of an event are tokens."""

import numpy as np

from bridge.decoding.kernels import columns
from kv_events.kernels.bundles import I64Vector, U8Input, U32Vector
from kv_events.kernels.declare import helper, inline_helper
from kv_events.kernels.instructions import eight_bytes
from kv_events.kernels.msgpack import ARRAY, NIL, POSITIVE, big_endian, read_head
from kv_events.kernels.numbers import U32, U64, int64, uint8, uint32, uint64

# by the first byte of a token: whether its form is usual, by how many bits the next four bytes are shifted, and the
# value to add to them
_IS_USUAL = np.zeros(256, np.bool_)
_IS_USUAL[:0x80] = _IS_USUAL[0xCC:0xCF] = True
_TOKEN_SHIFT = np.full(256, 32, np.uint64)
_TOKEN_SHIFT[0xCC:0xCF] = 24, 16, 0
_TOKEN_ITSELF = np.where(np.arange(256) < 0x80, np.arange(256), 0).astype(np.uint64)

_MAX_TOKEN = uint64(2**32 - 1)
_BYTE, _SHIFT24, _SHIFT56 = uint64(0xFF), uint64(24), uint64(56)


@inline_helper
def _read_token(data: U8Input, at: int, stop: int) -> tuple[U32, int]:
    """Read a token. Returns (token, position after it); the position is -1 if it is invalid."""
    byte = data[at] if at < stop else uint8(0xC1)
    if byte < 0x80:
        return uint32(byte), at + 1
    if byte == 0xCD and at + 3 <= stop:
        return uint32(big_endian(data, at + 1, 2)), at + 3
    if byte == 0xCE and at + 5 <= stop:
        return uint32(big_endian(data, at + 1, 4)), at + 5
    kind, value, at = read_head(data, at, stop)
    if kind != POSITIVE or value > _MAX_TOKEN:
        at = -1
    return uint32(value), at


@inline_helper
def _usual_size(first: U64) -> int:
    """Return the size in bytes of a token in a usual form: 2, 3, 5 if the first byte is 0xcc, 0xcd, 0xce, else 1."""
    return int64(1 + ((first >> uint64(7)) << (first & uint64(3))))


@inline_helper
def _usual_token(word: U64, first: U64) -> U32:
    """Return a token in a usual form from the eight bytes at its position."""
    return uint32((((word >> _SHIFT24) & _MAX_TOKEN) >> _TOKEN_SHIFT[first]) | _TOKEN_ITSELF[first])


@inline_helper
def _read_usual_tokens(
    data: U8Input, at: int, stop: int, row: I64Vector, tokens: U32Vector, count: int
) -> tuple[int, int]:
    """Read tokens in their shortest forms. Stops at a token in another form or at the last bytes of the payload.

    There is no branch on the size of a token, because processors cannot predict it. Tokens are read in pairs, because
    the bytes loaded for the first one show where the second one begins. Returns (tokens read, position after them).
    """
    done, position = 0, row[columns.TOKEN_FROM]
    while done + 2 <= count and at + 13 <= stop:
        word = eight_bytes(data, at)
        first = word >> _SHIFT56
        size = _usual_size(first)
        second = (word >> uint64(56 - 8 * size)) & _BYTE
        if not (_IS_USUAL[first] and _IS_USUAL[second]):
            break
        tokens[position + done] = _usual_token(word, first)
        tokens[position + done + 1] = _usual_token(eight_bytes(data, at + size), second)
        at += size + _usual_size(second)
        done += 2
    return done, at


@helper
def _read_pairs(data: U8Input, at: int, stop: int, row: I64Vector, tokens: U32Vector, count: int) -> int:
    """Read `count` pairs as count + 1 tokens. Each pair overlaps the next one by one token."""
    position = row[columns.TOKEN_FROM]
    for i in range(count):
        kind, value, at = read_head(data, at, stop)
        if kind != ARRAY or value != uint64(2):
            return columns.reject(row, columns.TOKENS)
        first, at = _read_token(data, at, stop)
        if at < 0 or (i > 0 and first != tokens[position]):
            return columns.reject(row, columns.TOKENS)
        second, at = _read_token(data, at, stop)
        if at < 0:
            return columns.reject(row, columns.TOKENS)
        tokens[position] = first
        tokens[position + 1] = second
        position += 1
    row[columns.TOKEN_TO] = position + 1
    row[columns.PAIRS] = 1
    return at


@inline_helper
def read_tokens(data: U8Input, at: int, stop: int, row: I64Vector, tokens: U32Vector) -> int:
    kind, value, at = read_head(data, at, stop)
    if kind == NIL:
        return at
    if kind != ARRAY:
        return columns.reject(row, columns.TYPE)
    count = int64(value)
    if count > 0 and read_head(data, at, stop)[0] == ARRAY:
        return _read_pairs(data, at, stop, row, tokens, count)
    done, at = _read_usual_tokens(data, at, stop, row, tokens, count)
    position = row[columns.TOKEN_FROM] + done
    for _ in range(count - done):
        token, at = _read_token(data, at, stop)
        if at < 0:
            return columns.reject(row, columns.TOKENS)
        tokens[position] = token
        position += 1
    row[columns.TOKEN_TO] = position
    return at
