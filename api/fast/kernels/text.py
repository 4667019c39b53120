"""Kernels that write JSON text into an array: pieces of text, numbers and hashes."""

from typing import NamedTuple

import numpy as np

from kv_events.kernels.bundles import I64Vector, U8Input, U8Vector, U64Input
from kv_events.kernels.declare import helper, inline_helper
from kv_events.kernels.instructions import copy_sixteen, lowest_bit, put_eight
from kv_events.kernels.numbers import I32, U8, U64, int64, uint8, uint64

MARGIN = 16
"""Bytes that an array of text must have beyond its end."""

COMMA, COLON, QUOTE, OPEN, CLOSE = (uint8(ord(char)) for char in ',:"{}')
_ZERO, _POINT, _MINUS = uint8(ord("0")), uint8(ord(".")), uint8(ord("-"))
_FOUR_DIGITS, _EIGHT_DIGITS = uint64(10**4), uint64(10**8)
_ZEROS = uint64(0x3030303030303030)  # eight times "0"
_LAST_DIGIT = uint64(1 << 56)
_SIGN = uint64(63)

_MOST_DECIMALS = 6
_LARGEST_EXACT = 2.0**53
_SMALLEST_PLAIN = 1e-3  # smaller numbers may be written with an exponent
_NOT_PLAIN = int64(-1)


class Texts(NamedTuple):
    """Pieces of text, one after the other in one array."""

    data: U8Vector
    """The text, and `MARGIN` bytes."""
    ends: I64Vector
    """[pieces + 1] piece i is `data[ends[i]:ends[i + 1]]`."""


@inline_helper
def put_text(out: U8Vector, at: int, data: U8Input, start: int, stop: int) -> int:
    """Write a piece of text. The arrays have `MARGIN` bytes more than the text that is read or written."""
    for i in range(0, stop - start, MARGIN):
        copy_sixteen(out, at + i, data, start + i)
    return at + stop - start


@inline_helper
def put_piece(out: U8Vector, at: int, texts: Texts, number: int) -> int:
    return put_text(out, at, texts.data, texts.ends[number], texts.ends[number + 1])


@inline_helper
def put_byte(out: U8Vector, at: int, byte: U8) -> int:
    out[at] = byte
    return at + 1


@inline_helper
def put_number(out: U8Vector, at: int, value: int) -> int:
    """Write a non-negative integer."""
    return _put_unsigned(out, at, uint64(value))


@inline_helper
def _put_unsigned(out: U8Vector, at: int, value: U64) -> int:
    return _put_short(out, at, value) if value < _EIGHT_DIGITS else _put_long(out, at, value)


@inline_helper
def _put_short(out: U8Vector, at: int, value: U64) -> int:
    """Write a number of at most eight digits."""
    digits = _digits(value)
    skipped = lowest_bit(digits | _LAST_DIGIT) >> 3
    put_eight(out, at, (digits | _ZEROS) >> uint64(8 * skipped))
    return at + 8 - skipped


@inline_helper
def _put_eight_digits(out: U8Vector, at: int, value: U64) -> int:
    put_eight(out, at, _digits(value) | _ZEROS)
    return at + 8


@helper
def _put_long(out: U8Vector, at: int, value: U64) -> int:
    """Write a number of more than eight digits."""
    first, last = value // _EIGHT_DIGITS, value % _EIGHT_DIGITS
    if first < _EIGHT_DIGITS:
        at = _put_short(out, at, first)
    else:
        at = _put_short(out, at, first // _EIGHT_DIGITS)
        at = _put_eight_digits(out, at, first % _EIGHT_DIGITS)
    return _put_eight_digits(out, at, last)


@inline_helper
def _digits(value: U64) -> U64:
    """Return the eight digits of a number, one in each byte, the first one in the lowest.

    Halves, then pairs, then digits are separated by multiplication with a rounded reciprocal, so there is no loop.
    """
    high = value // _FOUR_DIGITS
    halves = high | ((value - high * _FOUR_DIGITS) << uint64(32))
    high = ((halves * uint64(10_486)) >> uint64(20)) & uint64(0x0000007F0000007F)  # divided by 100
    pairs = high | ((halves - high * uint64(100)) << uint64(16))
    high = ((pairs * uint64(103)) >> uint64(10)) & uint64(0x000F000F000F000F)  # divided by 10
    return high | ((pairs - high * uint64(10)) << uint64(8))


@inline_helper
def put_hashes(out: U8Vector, at: int, hashes: U64Input) -> int:
    """Write hashes as integers with sign, separated by commas."""
    for i in range(hashes.shape[0]):
        value = hashes[i]
        if i > 0:
            at = put_byte(out, at, COMMA)
        if value >> _SIGN:
            at, value = put_byte(out, at, _MINUS), uint64(0) - value
        at = _put_unsigned(out, at, value)
    return at


@helper
def put_float(out: U8Vector, at: int, value: float) -> int:
    """Write a float with as few decimals as identify it. Returns -1 if it needs more than six or an exponent."""
    if value >= _LARGEST_EXACT or (value != 0.0 and value < _SMALLEST_PLAIN):
        return _NOT_PLAIN
    scale = 1.0
    for decimals in range(_MOST_DECIMALS + 1):
        scaled = np.rint(value * scale)
        if scaled >= _LARGEST_EXACT:
            return _NOT_PLAIN
        if scaled / scale == value:
            whole = int64(scaled) // int64(scale)
            at = put_byte(out, put_number(out, at, whole), _POINT)
            rest = int64(scaled) - whole * int64(scale)
            for i in range(at + max(decimals, 1) - 1, at - 1, -1):
                out[i] = _ZERO + uint8(rest % 10)
                rest //= 10
            return at + max(decimals, 1)
        scale *= 10.0
    return _NOT_PLAIN


@inline_helper
def put_key(out: U8Vector, at: int, number: int, rank: I32) -> int:
    """Write the key of a rank. number: how many keys precede it."""
    if number > 0:
        at = put_byte(out, at, COMMA)
    at = put_number(out, put_byte(out, at, QUOTE), int64(rank))
    return put_byte(out, put_byte(out, at, QUOTE), COLON)
