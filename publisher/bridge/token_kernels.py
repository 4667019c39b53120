"""Kernels that read the tokens of an event, which are most of its bytes."""

from __future__ import annotations

import numpy as np

from kv_events.kernels import array_function, array_helper
from publisher.bridge.event_rows import PAIRS, TOKEN_FROM, TOKEN_TO, TOKENS, TYPE, fail
from publisher.bridge.msgpack_kernels import ARRAY, NIL, POSITIVE, big_endian, read_head

# tokens by their first byte: bytes in all (0: not a usual form), bits by which the four bytes behind it are shifted,
# and what is then added
_TOKEN_SIZE = np.zeros(256, np.int64)
_TOKEN_SIZE[:0x80] = 1
_TOKEN_SIZE[0xCC:0xCF] = 2, 3, 5
_TOKEN_SHIFT = np.full(256, 32, np.uint64)
_TOKEN_SHIFT[0xCC:0xCF] = 24, 16, 0
_TOKEN_ITSELF = np.where(np.arange(256) < 0x80, np.arange(256), 0).astype(np.uint64)

_MAX_TOKEN = np.uint64(2**32 - 1)


@array_helper
def _read_token(data, at, stop):
    """(token, place behind it), place -1: no token."""
    byte = data[at] if at < stop else np.uint8(0xC1)
    if byte < 0x80:
        return np.uint32(byte), at + 1
    if byte == 0xCD and at + 3 <= stop:
        return np.uint32(big_endian(data, at + 1, 2)), at + 3
    if byte == 0xCE and at + 5 <= stop:
        return np.uint32(big_endian(data, at + 1, 4)), at + 5
    kind, value, at = read_head(data, at, stop)
    if kind != POSITIVE or value > _MAX_TOKEN:
        at = -1
    return np.uint32(value), at


@array_helper
def _read_usual_tokens(data, at, stop, row, tokens, count):
    """Tokens in their shortest forms, without a branch that depends on their sizes, which nobody could foresee.

    Returns how many were read, up to one in another form or the payload's last bytes, and the place behind them.
    """
    done, place = 0, row[TOKEN_FROM]
    while done < count and at + 5 <= stop:
        byte = data[at]
        size = _TOKEN_SIZE[byte]
        if size == 0:
            break
        following = big_endian(data, at + 1, 4)
        tokens[place + done] = np.uint32((following >> _TOKEN_SHIFT[byte]) | _TOKEN_ITSELF[byte])
        at += size
        done += 1
    return done, at


@array_function
def _read_pairs(data, at, stop, row, tokens, count):
    """count pairs, each of which overlaps its neighbour by one token -> count + 1 tokens."""
    place = row[TOKEN_FROM]
    for i in range(count):
        kind, value, at = read_head(data, at, stop)
        if kind != ARRAY or value != np.uint64(2):
            return fail(row, TOKENS)
        first, at = _read_token(data, at, stop)
        if at < 0 or (i > 0 and first != tokens[place]):
            return fail(row, TOKENS)
        second, at = _read_token(data, at, stop)
        if at < 0:
            return fail(row, TOKENS)
        tokens[place] = first
        tokens[place + 1] = second
        place += 1
    row[TOKEN_TO] = place + 1
    row[PAIRS] = 1
    return at


@array_function
def read_tokens(data, at, stop, row, tokens):
    kind, value, at = read_head(data, at, stop)
    if kind == NIL:
        return at
    if kind != ARRAY:
        return fail(row, TYPE)
    count = np.int64(value)
    if count > 0 and read_head(data, at, stop)[0] == ARRAY:
        return _read_pairs(data, at, stop, row, tokens, count)
    done, at = _read_usual_tokens(data, at, stop, row, tokens, count)
    place = row[TOKEN_FROM] + done
    for _ in range(count - done):
        token, at = _read_token(data, at, stop)
        if at < 0:
            return fail(row, TOKENS)
        tokens[place] = token
        place += 1
    row[TOKEN_TO] = place
    return at
