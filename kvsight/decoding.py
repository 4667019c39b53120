"""JSON from the other side, whoever it is -> typed structs. Clients decode nothing elsewhere."""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


def decode(kind: type[T], data: bytes | msgspec.Raw) -> T:
    """Raises msgspec.DecodeError, and nothing else, whatever the bytes are."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error
