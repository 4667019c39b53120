"""Decoding of received JSON into typed structs. Clients decode nothing elsewhere."""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


def decode(kind: type[T], data: bytes | msgspec.Raw) -> T:
    """Decode a value. Raises msgspec.DecodeError and no other error, whatever the bytes are."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error
