"""A log of records of equal length, whose content follows from their index."""

from pathlib import Path

from kv_events.log.event_log import EventLogReader
from kv_events.records import LogRecord
from tests.support.log.late_log import write_log

RECORD_BYTES = 12 + 24 + 3 + 100
HEADER_BYTES = 24
SEGMENT = 1000
"""Bytes of a segment with room for seven records."""


def record(i: int) -> LogRecord:
    return LogRecord(i % 3, 1000 + i, 1_700_000_000_000 + 10 * i, b"w-%d" % (i % 3), b"%100d" % i)


def write(folder: Path, records: range, segment_bytes: int = 64 * 2**20) -> None:
    write_log(folder, map(record, records), segment_bytes)


def read(folder: Path, start: int = 0) -> list[tuple[int, LogRecord]]:
    return list(EventLogReader(folder).read(start))


def expected(records: range) -> list[tuple[int, LogRecord]]:
    return [(i, record(i)) for i in records]


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kvlog"))


def flip(path: Path, position: int, bits: int = 0x10) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= bits
    path.write_bytes(data)


def tear(folder: Path) -> Path:
    """Begin a record at the end of a log's last segment, and return the segment's path."""
    last = segments(folder)[-1]
    last.write_bytes(last.read_bytes() + bytes([200, 0, 0]))
    return last
