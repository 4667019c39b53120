"""Moments of an event log or a topic: `--at` of `kvsight replay`."""

from __future__ import annotations

from datetime import datetime

from kv_events.errors import InvalidValueError
from kv_events.log.moments import LogExtent, LogMoment
from kvsight.cli.console import UsageError
from kvsight.cli.tables import count


def parse_moment(at: str | None, flag: str = "--at") -> LogMoment:
    """Read the value of `--at`, or of another flag. Raises UsageError."""
    try:
        return LogMoment.parse(at, flag)
    except InvalidValueError as error:
        raise UsageError(str(error)) from None


def local_time(seconds: float) -> str:
    """A time in the local zone, with the zone's offset. seconds: since 1970.

    Times in a log come from other machines, and may be none that a calendar has.
    """
    try:
        return datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"@{seconds:g}"


def extent_text(extent: LogExtent) -> str:
    """The number and the times of the records of a log."""
    times = f"{local_time(extent.first_ms / 1000)} to {local_time(extent.last_ms / 1000)}"
    return f"{extent.name} has {count(extent.num_records, 'record')}, {times}"


def moment_fault(extent: LogExtent, moment: LogMoment, flag: str = "--at") -> str:
    """Why a moment is outside a log; empty if it is inside."""
    if not extent.num_records:
        return f"{extent.name}: the log is empty"
    outside = extent.fault(moment, local_time)
    return outside and f"{extent.name}: {flag} {moment.typed} is {outside}"
