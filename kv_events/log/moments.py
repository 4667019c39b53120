"""Moments of an event log: their text, and whether a log has them. This module loads no kernels."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, time, timedelta
from typing import Final, Self

from kv_events.errors import InvalidValueError
from kv_events.records import Channel, LogRecord
from kv_events.runtime.variables import SECONDS, parse_quantity

MOMENT_FORMS: Final = (
    "a time (ISO 8601, 15:27, -5m or @SECONDS since 1970), an index in the log, or PARTITION:OFFSET,..."
)

_OFFSETS = re.compile(r"\d{1,9}:\d{1,18}(,\d{1,9}:\d{1,18})*", re.ASCII)
_CLOCK = re.compile(r"([01]\d|2[0-3]):[0-5]\d(:[0-5]\d(\.\d{1,6})?)?", re.ASCII)
"""Taken as a time, although it may be an offset of a partition: that is written as 015:27."""


@dataclass(frozen=True, slots=True)
class LogMoment:
    """The end of a replay: records before all of the given limits are applied. Without limits: the end of the log."""

    index: int | None = None
    """Index in an event log, or offset in every partition of a topic."""
    offsets: Mapping[int, int] | None = None
    """Partition -> offset, as in a consumer's `positions`. Other partitions are left out."""
    time_s: float | None = None
    """Seconds since 1970. Records with exactly this time are still applied."""
    typed: str = field(default="", compare=False)
    """What a user has typed."""
    is_naive: bool = field(default=False, compare=False)
    """Whether a time without a zone was typed, which is taken as local time."""

    @classmethod
    def parse(cls, text: str | None, name: str = "at", *, may_come: bool = False) -> Self:
        """Read a moment. name: of the field, for errors. Raises InvalidValueError.

        `15:27` is the last such time of the day here, today's or yesterday's, and `-5m` is five minutes ago. may_come:
        a time that is still to come is today's.
        """
        if text is None:
            return cls()
        try:
            if _CLOCK.fullmatch(text):
                now = datetime.now()
                of_today = datetime.combine(now, time.fromisoformat(text))
                last = of_today if may_come or of_today <= now else of_today - timedelta(days=1)
                return cls(time_s=last.timestamp(), typed=text, is_naive=True)
            if text.startswith("-"):
                ago_s = parse_quantity(name, text[1:], {unit: s for unit, s in SECONDS.items() if unit})
                return cls(time_s=datetime.now().timestamp() - ago_s, typed=text)
            if text.isdecimal():
                return cls(index=int(text), typed=text)
            if _OFFSETS.fullmatch(text):
                pairs = [pair.split(":") for pair in text.split(",")]
                return cls(offsets={int(partition): int(offset) for partition, offset in pairs}, typed=text)
            if text.startswith("@"):
                return cls(time_s=_seconds(text[1:]), typed=text)
            then = datetime.fromisoformat(text)
            return cls(time_s=then.timestamp(), typed=text, is_naive=then.tzinfo is None)
        except (ValueError, OverflowError):
            raise InvalidValueError(name, text, MOMENT_FORMS) from None

    @property
    def text(self) -> str:
        """The moment in the form that `parse` reads; "" for the end of the log."""
        if self.index is not None:
            return str(self.index)
        if self.offsets is not None:
            text = ",".join(f"{partition}:{offset}" for partition, offset in self.offsets.items())
            return f"0{text}" if _CLOCK.fullmatch(text) else text
        return "" if self.time_s is None else f"@{self.time_s}"

    def takes(self, record: LogRecord) -> bool:
        """Return whether a record is to be applied. Of an index, its offset is compared."""
        if self.index is not None and record.offset >= self.index:
            return False
        if self.offsets is not None and record.offset >= self.offsets.get(record.partition, 0):
            return False
        return self.time_s is None or record.timestamp_ms <= self.time_s * 1000


def utc_text(seconds: float) -> str:
    """Return a time in UTC, as a moment is written. seconds: since 1970.

    Times in a log come from other machines, and may be none that a calendar has.
    """
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return f"@{seconds:g}"


@dataclass(slots=True)
class LogExtent:
    """Which records a log has."""

    name: str = "the log"
    """For messages."""
    num_records: int = 0
    first_index: int = 0
    next_index: int = 0
    first_ms: int = 0
    """The earliest time. Times of a log may be out of order."""
    last_ms: int = 0
    offsets: dict[int, tuple[int, int]] = field(default_factory=dict, compare=False)
    """Partition of the events -> offset of its first record, and the one after its last record."""

    @property
    def span_s(self) -> tuple[float, float] | None:
        """Earliest and latest time of a record, in seconds since 1970. None if the log is empty."""
        return (self.first_ms / 1000, self.last_ms / 1000) if self.num_records else None

    def note(self, index: int, record: LogRecord) -> None:
        """Count a record. Records arrive in the order of the log."""
        offsets = [(record.partition, record.offset, record.offset)] if record.channel == Channel.EVENTS else ()
        self.extend(index, 1, record.timestamp_ms, record.timestamp_ms, offsets)

    def extend(
        self, index: int, number: int, first_ms: int, last_ms: int, offsets: Iterable[tuple[int, int, int]]
    ) -> None:
        """Count consecutive records. offsets: (partition, first, last) of the events."""
        if not self.num_records:
            self.first_index, self.first_ms, self.last_ms = index, first_ms, last_ms
        self.num_records += number
        self.next_index = index + number
        self.first_ms, self.last_ms = min(self.first_ms, first_ms), max(self.last_ms, last_ms)
        for partition, first, last in offsets:
            self.offsets[partition] = self.offsets.get(partition, (first, 0))[0], last + 1

    def fault(self, moment: LogMoment, time_text: Callable[[float], str] = utc_text) -> str:
        """Return why a moment is outside the log, as the end of a sentence, or "" if it is inside."""
        if not self.num_records:
            return "outside the log, which is empty"
        if moment.time_s is not None:
            has = f"which has records from {time_text(self.first_ms / 1000)} to {time_text(self.last_ms / 1000)}"
            return _side(moment.time_s * 1000, self.first_ms, self.last_ms, has)
        if moment.index is not None:
            has = f"whose moments are {self.first_index + 1} to {self.next_index}"
            return _side(moment.index, self.first_index + 1, self.next_index, has)
        for partition, offset in (moment.offsets or {}).items():
            if partition not in self.offsets:
                return f"outside the log, which has no partition {partition}"
            first, end = self.offsets[partition]
            has = f"which has records {partition}:{first} to {partition}:{end - 1}"
            if fault := _side(offset, first, end, has):
                return fault
        return ""


def _side(value: float, first: float, last: float, has: str) -> str:
    if first <= value <= last:
        return ""
    return f"{'before the start' if value < first else 'behind the end'} of the log, {has}"


def _seconds(text: str) -> float:
    seconds = float(text)
    if not math.isfinite(seconds):
        raise ValueError("not a time")
    datetime.fromtimestamp(seconds)  # raises for times that no calendar has
    return seconds
