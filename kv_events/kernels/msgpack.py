"""Kernels that read and write msgpack in place, without Python objects or allocations.

Bytes to read are untrusted. Every read is bounded by the payload, every length by the remaining bytes, and no kernel is
recursive. Whoever writes makes room before, and has `MAX_HEAD_BYTES` more.
"""

import numpy as np

from kv_events.kernels.bundles import I64Input, I64Vector, U8Input, U8Vector
from kv_events.kernels.declare import helper, inline_helper
from kv_events.kernels.instructions import float_bits, put_eight, swapped
from kv_events.kernels.numbers import U64, int64, uint8, uint64

# kinds of values
BAD, NIL, BOOL, FLOAT, POSITIVE, NEGATIVE, STR, BIN, EXT, ARRAY, MAP = range(11)

# formats 0xc0 to 0xdf: kind of the value, and size in bytes of the number that follows
_FORMAT_KIND = np.array(
    [NIL, BAD, BOOL, BOOL, BIN, BIN, BIN, EXT, EXT, EXT, FLOAT, FLOAT, POSITIVE, POSITIVE, POSITIVE, POSITIVE, NEGATIVE,
     NEGATIVE, NEGATIVE, NEGATIVE, EXT, EXT, EXT, EXT, EXT, STR, STR, STR, ARRAY, ARRAY, MAP, MAP],
    np.int64,
)  # fmt: skip
_FORMAT_BYTES = np.array(
    [0, 0, 0, 0, 1, 2, 4, 1, 2, 4, 4, 8, 1, 2, 4, 8, 1, 2, 4, 8, 0, 0, 0, 0, 0, 1, 2, 4, 2, 4, 2, 4], np.int64
)
_FIXEXT = 0xD4


def _scalar_sizes() -> I64Vector:
    """Return [256] total size in bytes of a value, by its first byte; 0 if the first byte does not determine it."""
    sizes = np.zeros(256, np.int64)
    sizes[:0x80] = sizes[0xE0:] = 1
    sizes[0xA0:0xC0] = np.arange(1, 33)
    scalars = np.isin(_FORMAT_KIND, (NIL, BOOL, FLOAT, POSITIVE, NEGATIVE))
    sizes[0xC0:0xE0][scalars] = 1 + _FORMAT_BYTES[scalars]
    return sizes


_SCALAR_SIZE = _scalar_sizes()
_ZERO = uint64(0)
_BYTE = uint64(8)
MAX_HEAD_BYTES = 9
"""Bound on the size of a number, and on that of the bytes before a text."""


def dictionary(words: dict[str, int]) -> tuple[U8Input, I64Input, I64Input]:
    """Return the tables for `look_up`: (bytes of all words, [n + 1] their borders, [n] their meanings)."""
    borders = np.cumsum([0, *map(len, words)])
    text = np.frombuffer("".join(words).encode(), np.uint8)
    return text, borders.astype(np.int64), np.array(list(words.values()), np.int64)


@inline_helper
def big_endian(data: U8Input, at: int, num_bytes: int) -> U64:
    """Read a big-endian number. If it has more than eight bytes, only the last eight are used."""
    value = _ZERO
    for i in range(num_bytes):
        value = (value << _BYTE) | uint64(data[at + i])
    return value


@helper
def _long_head(data: U8Input, at: int, stop: int) -> tuple[int, U64, int]:
    """`read_head` for formats 0xc0 to 0xdf."""
    byte = int64(data[at]) - 0xC0
    kind, size = _FORMAT_KIND[byte], _FORMAT_BYTES[byte]
    at += 1
    if at + size > stop:
        return BAD, _ZERO, at
    value = big_endian(data, at, size)
    at += size
    left = stop - at
    if kind == NEGATIVE:
        sign = uint64(1) << uint64(8 * size - 1)
        if value & sign:
            if size < 8:
                value |= ~((sign << uint64(1)) - uint64(1))
        else:
            kind = POSITIVE
    elif kind == EXT:
        if size == 0:
            value = uint64(1) << uint64(byte + 0xC0 - _FIXEXT)
        value += uint64(1)  # the extension's type byte
    if (kind in (STR, BIN, EXT, ARRAY)) and value > uint64(left):
        return BAD, _ZERO, at
    if kind == MAP and value > uint64(left // 2):
        return BAD, _ZERO, at
    return kind, value, at


@helper
def read_head(data: U8Input, at: int, stop: int) -> tuple[int, U64, int]:
    """Read the head of a value. Returns (kind, number, position after the head).

    The number is the integer itself (two's complement if NEGATIVE), the bits of a FLOAT, the size of the content in
    bytes (STR, BIN, EXT), or the count of elements (ARRAY) or pairs (MAP). A count never exceeds the number of elements
    for which the remaining bytes have room.
    """
    if at >= stop:
        return BAD, _ZERO, at
    byte = int64(data[at])
    if byte < 0x80:
        return POSITIVE, uint64(byte), at + 1
    if byte >= 0xE0:
        return NEGATIVE, uint64(byte - 0x100), at + 1
    if byte >= 0xC0:
        return _long_head(data, at, stop)
    kind, value = (MAP, byte & 15) if byte < 0x90 else (ARRAY, byte & 15) if byte < 0xA0 else (STR, byte & 31)
    size = 2 * value if kind == MAP else value
    if size > stop - at - 1:
        return BAD, _ZERO, at
    return kind, uint64(value), at + 1


@helper
def skip(data: U8Input, at: int, stop: int) -> int:
    """Return the position after the value that begins here, including nested values. -1 if the encoding is broken."""
    left = 1
    while left > 0:
        left -= 1
        size = _SCALAR_SIZE[data[at]] if at < stop else 0
        if size > 0:
            at += size
            continue
        kind, value, at = read_head(data, at, stop)
        if kind == BAD:
            return -1
        if kind in (STR, BIN, EXT):
            at += int64(value)
        elif kind == ARRAY:
            left += int64(value)
        elif kind == MAP:
            left += 2 * int64(value)
    return at if at <= stop else -1


@helper
def look_up(
    data: U8Input, at: int, length: int, text: U8Input, borders: I64Input, meanings: I64Input, otherwise: int
) -> int:
    """Return the meaning of a word of the payload, or `otherwise` if the word is not in the dictionary."""
    for word in range(meanings.shape[0]):
        if borders[word + 1] - borders[word] == length:
            same = True
            for i in range(length):
                if data[at + i] != text[borders[word] + i]:
                    same = False
                    break
            if same:
                return meanings[word]
    return otherwise


@helper
def read_key(
    data: U8Input, at: int, stop: int, text: U8Input, borders: I64Input, meanings: I64Input, unknown: int
) -> tuple[int, int]:
    """Read the key of a map. Returns (its meaning, position of the value or -1). Keys must be strings to be known."""
    kind, value, end = read_head(data, at, stop)
    if kind != STR:
        return unknown, skip(data, at, stop)
    length = int64(value)
    return look_up(data, end, length, text, borders, meanings, unknown), end + length


@inline_helper
def _put_format(out: U8Vector, at: int, form: int, number: int, num_bytes: int) -> int:
    """Write the first byte of a value, and a number of 1 to 8 bytes."""
    out[at] = uint8(form)
    put_eight(out, at + 1, swapped(uint64(number) << uint64(64 - 8 * num_bytes)))
    return at + 1 + num_bytes


@inline_helper
def put_integer(out: U8Vector, at: int, value: int) -> int:
    """Write a non-negative integer."""
    if value >= 2**16:
        return _put_format(out, at, 0xCF, value, 8)
    if value >= 2**7:
        return _put_format(out, at, 0xCD, value, 2)
    out[at] = uint8(value)
    return at + 1


@inline_helper
def put_float(out: U8Vector, at: int, value: float) -> int:
    return _put_format(out, at, 0xCB, int64(float_bits(value)), 8)


@inline_helper
def put_short_text(out: U8Vector, at: int, num_bytes: int) -> int:
    """Write what comes before a text of less than 256 bytes: two bytes."""
    return _put_format(out, at, 0xD9, num_bytes, 1)


@inline_helper
def put_bin(out: U8Vector, at: int, num_bytes: int) -> int:
    """Write what comes before bytes."""
    return _put_format(out, at, 0xC6, num_bytes, 4)


@inline_helper
def put_array(out: U8Vector, at: int, size: int) -> int:
    """Write what comes before the elements of an array."""
    return _put_format(out, at, 0xDC, size, 2)
