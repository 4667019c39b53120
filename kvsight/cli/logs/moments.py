"""Moments of an event log or a topic: `--at` of `kvsight replay`."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from indexer.replay import moments
from indexer.replay.moments import Moment
from kv_events.errors import InvalidValueError
from kv_events.records import Channel
from kvsight.cli.shared.console import UsageError
from kvsight.cli.shared.tables import count

if TYPE_CHECKING:
    from kv_events.log.reader import RecordChunk
    from kv_events.records import LogRecord


def parse_moment(at: str | None, flag: str = "--at") -> Moment:
    """Read the value of `--at`, or of another flag. Raises UsageError."""
    try:
        return moments.parse_moment(at, flag)
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


@dataclass
class LogSpan:
    """The extent of a log, from its records."""

    name: str
    """Of the log, for messages."""
    records: int = 0
    first_index: int = 0
    next_index: int = 0
    first_ms: int = 0
    last_ms: int = 0
    first_offsets: dict[int, int] = field(default_factory=dict)
    """Partition of the events -> offset of its first record."""
    next_offsets: dict[int, int] = field(default_factory=dict)
    """Partition of the events -> offset after its last record."""

    @classmethod
    def of(cls, name: str, first_index: int, next_index: int, times_s: tuple[float, float]) -> LogSpan:
        """Return the extent of a log whose records are not read. It has no offsets."""
        first_ms, last_ms = (round(time_s * 1000) for time_s in times_s)
        return cls(name, next_index - first_index, first_index, next_index, first_ms, last_ms)

    def note(self, index: int, record: LogRecord) -> None:
        """Count a record. Records arrive in the order of the log; times may be out of order."""
        if not self.records:
            self.first_index, self.first_ms, self.last_ms = index, record.timestamp_ms, record.timestamp_ms
        self.records += 1
        self.next_index = index + 1
        self.first_ms = min(self.first_ms, record.timestamp_ms)
        self.last_ms = max(self.last_ms, record.timestamp_ms)
        if record.channel == Channel.EVENTS:
            self.first_offsets.setdefault(record.partition, record.offset)
            self.next_offsets[record.partition] = record.offset + 1

    def note_chunk(self, chunk: RecordChunk) -> None:
        """Count the records of a chunk, in the same way."""
        times = chunk.timestamps_ms
        first_ms, last_ms = int(times.min()), int(times.max())
        if not self.records:
            self.first_index, self.first_ms, self.last_ms = chunk.first_index, first_ms, last_ms
        self.records += len(chunk.rows)
        self.next_index = chunk.next_index
        self.first_ms, self.last_ms = min(self.first_ms, first_ms), max(self.last_ms, last_ms)
        for partition, first, last in chunk.offsets(Channel.EVENTS):
            self.first_offsets.setdefault(partition, first)
            self.next_offsets[partition] = last + 1

    def __str__(self) -> str:
        times = f"{local_time(self.first_ms / 1000)} to {local_time(self.last_ms / 1000)}"
        return f"{self.name} has {count(self.records, 'record')}, {times}"

    def fault(self, moment: Moment) -> str:
        """Why a moment is outside the log; empty if it is inside."""
        if not self.records:
            return f"{self.name}: the log is empty"
        until, outside = moment.until, ""
        if until.time_s is not None:
            outside = _side(until.time_s * 1000, self.first_ms, self.last_ms)
        elif until.offset is not None:
            outside = _side(until.offset, self.first_index + 1, self.next_index)
        elif until.positions is not None:
            outside = next(filter(None, (self._outside(*each) for each in until.positions.items())), "")
        return f"--at {moment.text} is {outside}: {self._extent(moment)}" if outside else ""

    def _outside(self, partition: int, offset: int) -> str:
        if partition not in self.next_offsets:
            return f"outside the log, which has no partition {partition}"
        return _side(offset, self.first_offsets[partition], self.next_offsets[partition])

    def _extent(self, moment: Moment) -> str:
        if moment.until.time_s is not None:
            return str(self)
        if moment.until.offset is not None:
            return f"{self.name} has records {self.first_index} to {self.next_index - 1}"
        ends = (f"{p}:{self.first_offsets[p]} to {p}:{end - 1}" for p, end in sorted(self.next_offsets.items()))
        return f"{self.name} has records {', '.join(ends)}"


def _side(value: float, first: float, last: float) -> str:
    return "before the start of the log" if value < first else "behind the end of the log" if value > last else ""
