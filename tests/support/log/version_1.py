"""Segments of format version 1, which kvsight wrote before records had channels."""

import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

from kv_events.records import LogRecord


def write_version_1(folder: Path, records: Iterable[LogRecord], first_index: int = 0) -> Path:
    """Write one segment, as docs/event_log.md describes it. Returns its path."""
    head = struct.pack("<8sIQ", b"KVSLOG\r\n", 1, first_index)
    path = folder / f"{first_index:020d}.kvlog"
    path.write_bytes(b"".join([head, _checksum(head), *map(_encode, records)]))
    return path


def _encode(record: LogRecord) -> bytes:
    fixed = struct.pack("<IqqI", record.partition, record.offset, record.timestamp_ms, len(record.key))
    body = fixed + record.key + record.payload
    frame = struct.pack("<I", len(body)) + _checksum(body)
    return frame + _checksum(frame) + body


def _checksum(data: bytes) -> bytes:
    return struct.pack("<I", zlib.crc32(data))
