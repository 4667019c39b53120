"""Kernels that navigate JSON text without creating Python objects."""

from __future__ import annotations

from numba import types

from kv_events.bundles import I64Vector, U8Input
from kv_events.kernels import array_kernel

_QUOTE, _BACKSLASH, _COMMA = ord('"'), ord("\\"), ord(",")
_OPENING = (ord("["), ord("{"))
_CLOSING = (ord("]"), ord("}"))


@array_kernel(types.int64, U8Input, I64Vector)
def top_commas(text, places):
    """Find the commas between the elements of an array.

    text: uint8[n], valid JSON from its "[" to its "]". places: int64[most], written: indices into `text`. Returns the
    number of commas, or most + 1 if there are more than `most`.
    """
    found = depth = 0
    in_string = False
    i = 1
    while i < len(text) - 1:
        char = text[i]
        if in_string:
            if char == _BACKSLASH:
                i += 1
            elif char == _QUOTE:
                in_string = False
        elif char == _QUOTE:
            in_string = True
        elif char in _OPENING:
            depth += 1
        elif char in _CLOSING:
            depth -= 1
        elif char == _COMMA and depth == 0:
            if found == len(places):
                return found + 1
            places[found] = i
            found += 1
        i += 1
    return found
