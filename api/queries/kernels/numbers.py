"""Kernels that read the numbers of a JSON array straight from a request body, eight digits at a time.

They accept only what nearly all callers send: decimal integers without exponent, separated by commas and white space.
For anything else they return -1, and the ordinary decoder, which reports errors, reads the body.
"""

import numpy as np

from kv_events.kernels.bundles import BytesInput, U8Input, U32Vector, U64Vector
from kv_events.kernels.declare import helper, inline_helper, kernel
from kv_events.kernels.instructions import bytes_between, eight_bytes, leading_zeros, lowest_bit
from kv_events.kernels.numbers import U64, int64, uint8, uint64

_COMMA, _SPACE, _CLOSE, _MINUS, _ZERO, _NINE = (uint8(ord(char)) for char in ", ]-09")
_BLOCK = 64
_AT_ONCE = 8
WHITE = np.zeros(256, np.bool_)
WHITE[[ord(c) for c in " \t\n\r"]] = True
"""[256] whether a byte is white space."""

_ZEROS = uint64(0x3030303030303030)  # eight times "0"
_LOW7 = uint64(0x7F7F7F7F7F7F7F7F)
_ABOVE_9 = uint64(0x7676767676767676)  # moves a byte above 9 into its highest bit
_HIGH_BITS = uint64(0x8080808080808080)
_DIGITS, _ONE = uint64(0x0F0F0F0F0F0F0F0F), uint64(1)
_ALL_BITS = uint64(0xFFFFFFFFFFFFFFFF)
_PAIRS = uint64(0x000000FF000000FF)
_LOW_PAIRS, _HIGH_PAIRS = uint64((1 << 32) + 10_000), uint64((100 << 32) + 1_000_000)
_POWERS = 10 ** np.arange(9, dtype=np.uint64)

_MAX_U32 = uint64(2**32 - 1)
_MAX_U64 = uint64(2**64 - 1)
_MAX_I64 = uint64(2**63 - 1)
_BAD = int64(-1)


@inline_helper
def _eight_at(data: U8Input, at: int) -> U64:
    """Return eight bytes as a big-endian word. Bytes beyond the end are zero, which is no digit."""
    if at + 8 <= len(data):
        return eight_bytes(data, at)
    word = uint64(0)
    for i in range(8):
        byte = data[at + i] if at + i < len(data) else uint8(0)
        word = (word << uint64(8)) | uint64(byte)
    return word


@inline_helper
def _digits(data: U8Input, at: int) -> tuple[U64, int]:
    """Read up to eight digits. Returns (value, number of digits)."""
    word = _eight_at(data, at) ^ _ZEROS
    others = (((word & _LOW7) + _ABOVE_9) | word) & _HIGH_BITS  # the highest bit of each byte that is no digit
    if others == uint64(0):
        count = int64(8)
    else:
        count = leading_zeros(others) >> 3
        if count == 0:
            return uint64(0), count
    return _sum_of_digits(word >> uint64(64 - 8 * count)), count


@inline_helper
def _sum_of_digits(word: U64) -> U64:
    """Return the number with eight digits, one in each byte, the last one in the lowest.

    Adjacent digits are added up in pairs, then all pairs by two products, so there is no loop over digits.
    """
    word += (word >> uint64(8)) * uint64(10)
    return ((word & _PAIRS) * _LOW_PAIRS + ((word >> uint64(16)) & _PAIRS) * _HIGH_PAIRS) >> uint64(32)


@helper
def _long_number(data: U8Input, at: int, value: U64) -> tuple[U64, int]:
    """Continue a number after its first eight digits. Returns (value, end), or end -1 if it exceeds 64 bits."""
    following, count = _digits(data, at + 8)
    value, end = value * _POWERS[count] + following, at + 8 + count
    if count < 8:
        return value, end
    following, count = _digits(data, end)
    if count > 4:
        return value, _BAD
    if value > (_MAX_U64 - following) // _POWERS[count]:
        return value, _BAD
    return value * _POWERS[count] + following, end + count


@inline_helper
def _number(data: U8Input, at: int) -> tuple[U64, int]:
    """Read a number without a sign. Returns (value, end), or end -1 if there is none that JSON allows."""
    value, count = _digits(data, at)
    end = at + count
    if count == 8:
        value, end = _long_number(data, at, value)
    if count == 0 or (count > 1 and data[at] == _ZERO):  # JSON does not allow leading zeros
        end = _BAD
    return value, end


@inline_helper
def after_white(data: U8Input, at: int) -> int:
    """Return the position after the white space that begins here, if there is any."""
    while at < len(data) and WHITE[data[at]]:
        at += 1
    return at


@inline_helper
def _ends_of_numbers(data: U8Input, at: int, gap: int) -> tuple[U64, bool]:
    """Find the commas after the numbers in 64 bytes, up to anything that is no number of JSON.

    Returns them as a u64, see `bytes_between`, and whether there is anything else. gap: 1 if each number follows a
    space, the first one at index `at`; otherwise 0.
    """
    digits, commas = bytes_between(data, at, _ZERO, _NINE), bytes_between(data, at, _COMMA, _COMMA)
    begins = (commas << _ONE) | _ONE
    others = ~(digits | commas)
    if gap > 0:
        spaces = bytes_between(data, at, _SPACE, _SPACE)
        others = (others & ~(spaces & begins)) | (begins & ~spaces)
        begins <<= _ONE
    padded = begins & bytes_between(data, at, _ZERO, _ZERO) & (digits >> _ONE)  # JSON does not allow leading zeros
    others |= (begins & ~digits) | padded
    return commas & ((others & (~others + _ONE)) - _ONE), others != uint64(0)


@inline_helper
def _read_short_numbers(data: U8Input, at: int, out: U32Vector, count: int) -> tuple[int, int]:
    """Read numbers of up to eight digits that are followed by a comma. Returns (count, start of the next number).

    The commas of 64 bytes are found at once, so no number has to wait for the end of the one before it.
    """
    gap = int64(at < len(data) and data[at] == _SPACE)
    while at >= 8 and at + _BLOCK <= len(data) and count + _AT_ONCE <= out.shape[0]:
        commas, is_last = _ends_of_numbers(data, at, gap)
        start, first = at, count
        while commas != uint64(0) and count < first + _AT_ONCE:
            end = start + lowest_bit(commas)
            length = end - at - gap
            if length > 8:
                return count, at
            word = (eight_bytes(data, end - 8) & _DIGITS) & (_ALL_BITS >> uint64(64 - 8 * length))
            out[uint64(count)] = _sum_of_digits(word)
            commas &= commas - _ONE
            count += 1
            at = end + 1
        if count == first or (is_last and commas == uint64(0)):
            return count, at
    return count, at


@inline_helper
def _next(data: U8Input, start: int, low: U64, high: U64) -> tuple[U64, int]:
    """Read a number, the white space around it, and stop at the "," or "]" behind it.

    low: largest magnitude of a negative number, 0 if none is allowed. Returns (value, index of the end, or -1).
    """
    at = after_white(data, start)
    negative = low > uint64(0) and at < len(data) and data[at] == _MINUS
    value, at = _number(data, at + negative)
    if at < 0 or value > (low if negative else high):
        return value, _BAD
    at = after_white(data, at)
    if at >= len(data) or (data[at] != _COMMA and data[at] != _CLOSE):
        return value, _BAD
    return -value if negative else value, at


@kernel
def read_tokens(data: U8Input, start: int, out: U32Vector) -> tuple[int, int]:
    """Read an array of integers in 0 .. 2**32 - 1 from JSON text. See `read_hashes`. out: uint32[most]."""
    at, count = start, 0
    while True:
        count, at = _read_short_numbers(data, at, out, count)
        value, at = _next(data, at, uint64(0), _MAX_U32)
        if at < 0 or count == out.shape[0]:
            return count, _BAD
        out[count] = value
        count += 1
        if data[at] == _CLOSE:
            return count, at
        at += 1


@kernel
def read_hashes(data: BytesInput, start: int, out: U64Vector, are_signed: bool) -> tuple[int, int]:
    """Read an array of integers in 0 .. 2**64 - 1, or in -2**63 .. 2**63 - 1 if they are signed, from JSON text.

    start: index after the "[". out: uint64[most], written; negative numbers in two's complement.
    Returns (count, index of the "]"); the index is -1 for an empty array, more than `most` numbers, a number out of
    range, or anything that is not a number.
    """
    low, high = (uint64(2**63), _MAX_I64) if are_signed else (uint64(0), _MAX_U64)
    at, count = start, 0
    while True:
        value, at = _next(data, at, low, high)
        if at < 0 or count == out.shape[0]:
            return count, _BAD
        out[count] = value
        count += 1
        if data[at] == _CLOSE:
            return count, at
        at += 1
