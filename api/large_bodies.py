"""Decoding of large JSON arrays in pieces.

A decoder holds the interpreter until it has finished, in any thread: decoding 24 MiB of numbers at once would block all
other callers. Large arrays are therefore only validated at first, and split here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import numpy as np
from msgspec import Raw

from api.json_kernels import top_commas
from kv_events.errors import InvalidValueError

LARGE_BYTES = 2**18
"""Larger bodies are decoded in another thread."""

_SLICE_BYTES = 2**16
_POSITION = re.compile(r" - at `\$\[(\d+)\]")

_integers = msgspec.json.Decoder(list[int])
_anything = msgspec.json.Decoder(list[object])


def number_slices(field: str, array: Raw, expected: str) -> Iterator[list[int]]:
    """Yield the integers of a valid JSON value, a few thousand at a time.

    Raises InvalidValueError for anything but an array of integers. expected: description of an element for the error.
    """
    text = _array_text(field, array)
    start, end, count = 1, len(text) - 1, 0
    while start < end:
        comma = text.find(b",", start + _SLICE_BYTES, end)
        stop = end if comma < 0 else comma
        numbers = _integers_of(b"[" + text[start:stop] + b"]", field, count, expected)
        yield numbers
        start, count = stop + 1, count + len(numbers)


def elements(field: str, array: Raw, most: int) -> list[Raw]:
    """Split a valid JSON array into its elements. Raises InvalidValueError for no array or more than `most`."""
    text = _array_text(field, array)
    if not text[1:-1].strip():
        return []
    places = np.empty(most - 1, np.int64)
    found = top_commas(np.frombuffer(text, np.uint8), places)
    if found > len(places):
        raise InvalidValueError(f"len({field})", f"more than {most}", f"at most {most}")
    bounds = [0, *places[:found].tolist(), len(text) - 1]
    return [Raw(text[before + 1 : after]) for before, after in pairwise(bounds)]


def _array_text(field: str, value: Raw) -> bytes:
    text = bytes(value)
    if not text.startswith(b"["):
        raise InvalidValueError(field, text[:20].decode(errors="replace"), "array")
    return text


def _integers_of(text: bytes, field: str, count: int, expected: str) -> list[int]:
    """count: number of preceding elements, for the error message."""
    try:
        return _integers.decode(text)
    except msgspec.DecodeError as error:
        position = _POSITION.search(str(error))
        if position is None:  # a nested array, or a string with a comma, was split
            raise InvalidValueError(field, f"something else after element {count}", expected) from None
        index = int(position[1])
        raise InvalidValueError(f"{field}[{count + index}]", _element(text, index), expected) from None


def _element(text: bytes, index: int) -> object:
    try:
        return _anything.decode(text)[index]
    except (msgspec.DecodeError, RecursionError):
        return "something else"
