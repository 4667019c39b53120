"""Moments of an event log as text. This module loads no kernels."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from typing import Final, NamedTuple

from indexer.replay.until import Until
from kv_events.errors import InvalidValueError

_POSITIONS = re.compile(r"\d{1,9}:\d{1,18}(,\d{1,9}:\d{1,18})*", re.ASCII)
MOMENT_FORMS: Final = "a time (ISO 8601, or @SECONDS since 1970), an index in the log, or PARTITION:OFFSET,..."


class Moment(NamedTuple):
    """The end of a replay."""

    text: str
    """As it was typed; empty: the end of the log."""
    until: Until
    is_naive: bool = False
    """Whether a time without a zone was given, which is taken as local time."""


def parse_moment(at: str | None, field: str = "at") -> Moment:
    """Read a moment. field: its name in errors. Raises InvalidValueError."""
    if at is None:
        return Moment("", Until())
    try:
        if at.isdecimal():
            return Moment(at, Until(offset=int(at)))
        if _POSITIONS.fullmatch(at):
            return Moment(at, Until(positions=_positions(at)))
        if at.startswith("@"):
            return Moment(at, Until(time_s=_seconds(at[1:])))
        time = datetime.fromisoformat(at)
        return Moment(at, Until(time_s=time.timestamp()), is_naive=time.tzinfo is None)
    except (ValueError, OverflowError):
        raise InvalidValueError(field, at, MOMENT_FORMS) from None


def utc_text(seconds: float) -> str:
    """Return a time in UTC, as a moment is written. seconds: since 1970.

    Times in a log come from other machines, and may be none that a calendar has.
    """
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return f"@{seconds:g}"


def _positions(text: str) -> dict[int, int]:
    pairs = [pair.split(":") for pair in text.split(",")]
    return {int(partition): int(offset) for partition, offset in pairs}


def _seconds(text: str) -> float:
    seconds = float(text)
    if not math.isfinite(seconds):
        raise ValueError("not a time")
    datetime.fromtimestamp(seconds)  # raises for times that no calendar has
    return seconds
