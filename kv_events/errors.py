"""Root of the error tree. Facts that a caller may act on are attributes, not only part of the message."""

import re
from collections.abc import Collection, Iterable
from pathlib import PurePath
from types import UnionType
from typing import ClassVar

_MAX_ELEMENTS = 16
"""Largest container, in elements, and longest element, in characters, that a message shows."""

_MAX_PATH_CHARACTERS = 4096
_CREDENTIALS = re.compile(r"(?<=://)\S*@")
_LONGEST_CREDENTIALS = 1024


class KvsightError(Exception):
    """Root of every error that kvsight raises on purpose.

    `retriable` says whether the same call may succeed later without a change by the caller.
    """

    retriable: ClassVar[bool] = False


class InvalidValueError(KvsightError, ValueError):
    """A value from outside is invalid. Names the field and the value."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(f"{field}: got {shorten(value)}, expected {expected}")
        self.field = field
        self.value = value
        self.expected = expected


class UnknownVariableError(KvsightError, ValueError):
    """The environment has a `KVSIGHT_*` variable that does not exist."""

    def __init__(self, name: str, nearest: str) -> None:
        super().__init__(f"{name} is not a setting; the nearest name is {nearest}")


class RecordRejectedError(KvsightError):
    """A record cannot be decoded or breaks the contract. The record is dead-lettered, never applied in part.

    `reason` is one of a small fixed set of words, suitable as a metric label.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def os_error_text(error: OSError) -> str:
    """The file, if there is one, and the cause, without the number of the error."""
    where = f"{error.filename}: " if error.filename is not None else ""
    return f"{where}{error.strerror or error}"


def check_type(field: str, value: object, kind: type | UnionType) -> None:
    """Raise InvalidValueError unless an argument of a public constructor or function is an instance of `kind`."""
    if not isinstance(value, kind):
        raise InvalidValueError(field, value, getattr(kind, "__name__", str(kind)))


def without_user(address: str) -> str:
    """Return an address without the user and the password in it."""
    return re.sub(".*@", "...@", address, flags=re.DOTALL)


def check_utf8(field: str, text: str, shown: str | None = None) -> None:
    """Raise InvalidValueError if UTF-8 cannot hold a text, such as an argument of other bytes.

    shown: in place of the text, for secrets. The user in an address is never shown.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidValueError(
            field, without_user(text) if shown is None else shown, "text that UTF-8 can hold"
        ) from None


def check_positive(**numbers: int) -> None:
    """Raise InvalidValueError unless all numbers, by the names of their arguments, are positive."""
    for field, number in numbers.items():
        if number < 1:
            raise InvalidValueError(field, number, "a positive integer")


def shorten(value: object, limit: int = 80) -> str:
    """Return a short text for a value in a message, at a bounded cost.

    Text is cut at `limit` characters, and lacks the user and password of an address; a path is shown whole. A large or
    nested container is shown as type and length.
    """
    if isinstance(value, str) and "://" in value[:_LONGEST_CREDENTIALS]:
        value = _CREDENTIALS.sub("...@", value[:_LONGEST_CREDENTIALS]) + value[_LONGEST_CREDENTIALS:]
    if isinstance(value, PurePath):
        return shorten(str(value), _MAX_PATH_CHARACTERS)
    if isinstance(value, str | bytes | bytearray) and len(value) > limit:
        return f"{value[:limit]!r}... (length {len(value)})"
    if isinstance(value, list | tuple | dict | set | frozenset) and not _is_small(value):
        return f"{type(value).__name__} of length {len(value)}"
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested objects; integers of thousands of digits
        return type(value).__name__
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def _is_small(values: Collection[object]) -> bool:
    if len(values) > _MAX_ELEMENTS:
        return False
    elements = [*values, *values.values()] if isinstance(values, dict) else values
    return all(
        len(element) <= _MAX_ELEMENTS if isinstance(element, str | bytes) else not isinstance(element, Iterable)
        for element in elements
    )
