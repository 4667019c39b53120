"""Root of the error tree. Facts a caller may want to act on are attributes, not only words."""

from __future__ import annotations

from typing import ClassVar


class KvsightError(Exception):
    """Root of every error that kvsight raises on purpose.

    `retriable` says whether the same call may succeed later without a change by the caller.
    """

    retriable: ClassVar[bool] = False


class InvalidValueError(KvsightError, ValueError):
    """A value from outside is not acceptable. Names the field and the value."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(f"{field}: got {_shorten(value)}, expected {expected}")
        self.field = field
        self.value = value
        self.expected = expected


class RecordRejectedError(KvsightError):
    """A record cannot be decoded or breaks the contract. The record is dead-lettered, never applied in part.

    `reason` is one of a small fixed set of words, fit for a metric label.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def _shorten(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
