"""The bytes of one event-log segment: header, records, and the rules for an incomplete end.

`docs/event_log.md` documents the layout with byte offsets. All integers are little-endian.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kv_events.errors import InvalidValueError, KvsightError
from kv_events.limits import MAX_RECORD_BYTES
from kv_events.records import MAX_CHANNEL, LogRecord

SUFFIX = ".kvlog"
MAX_KEY_BYTES = 65_535

_NAME_DIGITS = 20
_MAGIC = b"KVSLOG\r\n"
FORMAT_VERSION = 2
_SEGMENT = struct.Struct("<8sIQ")  # magic, format version, index of the first record; followed by its CRC-32
_FRAME = struct.Struct("<II")  # length of the body, CRC-32 of the body; followed by the CRC-32 of these eight bytes
# Partition, offset, timestamp_ms, length of the key, channel, zero; followed by key and payload. Version 1 has 32 bits
# for the length of the key, at most 65,535, so that its records have channel 0.
_BODY = struct.Struct("<IqqHBx")
_CRC = struct.Struct("<I")

HEADER_BYTES = _SEGMENT.size + _CRC.size
_FRAME_BYTES = _FRAME.size + _CRC.size
MAX_BODY_BYTES = _BODY.size + MAX_KEY_BYTES + MAX_RECORD_BYTES
_MOST_RECORD_BYTES = _FRAME_BYTES + MAX_BODY_BYTES
_CHUNK_BYTES = 2 << 20  # bytes per read; more than the largest record


class EventLogError(KvsightError):
    """An event log cannot be used. Names the path and the cause."""


class Resume(NamedTuple):
    """The first sound record after damage."""

    record_index: int
    position: int | None
    """Byte offset in the same segment. None: at the beginning of the next one."""


class EventLogCorruptedError(EventLogError):
    """Bytes that were written completely have changed, or are gone. Records before `index` are valid."""

    def __init__(self, segment: Path, position: int, index: int, detail: str, resume: Resume | None) -> None:
        onward = "no sound record follows" if resume is None else f"the next sound record is {resume.record_index}"
        super().__init__(f"{segment}: {detail} at byte {position}, record {index}; {onward}")
        self.detail = detail
        self.segment = segment
        self.position = position
        """Byte offset in the segment at which the damaged record begins."""
        self.index = index
        """Index of the damaged record."""
        self.resume = resume
        """Where reading can continue. None if no sound record follows."""


class Located(NamedTuple):
    """A record and the position of the next one."""

    record_index: int
    end: int
    """Byte offset after the record."""
    record: LogRecord


class Segment(NamedTuple):
    """One file of a log, named by the index of its first record."""

    path: Path
    first_index: int
    next_first_index: int | None
    """First index of the next segment, in which case this segment is complete. None if it may still grow."""


def list_segments(folder: Path) -> list[Segment]:
    """Return the segments of a log, oldest first. Files with other names are ignored."""
    stems = [path.stem for path in folder.glob(f"*{SUFFIX}")]
    firsts = sorted(int(stem) for stem in stems if len(stem) == _NAME_DIGITS and stem.isdecimal())
    after: list[int | None] = [*firsts[1:], None]
    return [Segment(segment_path(folder, first), first, next_) for first, next_ in zip(firsts, after, strict=False)]


def size_of(path: Path) -> int:
    """Return the bytes of a file that its writer may delete or rename at any moment; then 0."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def companions(folder: Path) -> list[tuple[int, Path]]:
    """Return (index, path) of the files beside the segments, such as key frames. Their names begin with an index."""
    found = [(path.name[:_NAME_DIGITS], path) for path in folder.glob(f"{'[0-9]' * _NAME_DIGITS}.*")]
    return [(int(stem), path) for stem, path in found if path.suffix != SUFFIX]


def segment_path(folder: Path, first_index: int) -> Path:
    """Return the name of the segment that begins with this record. Names sort as records do."""
    return folder / f"{first_index:0{_NAME_DIGITS}d}{SUFFIX}"


def segment_header(first_index: int, version: int = FORMAT_VERSION) -> bytes:
    """Encode the header of a segment, `HEADER_BYTES` long."""
    fields = _SEGMENT.pack(_MAGIC, version, first_index)
    return fields + _CRC.pack(zlib.crc32(fields))


def encode_record(record: LogRecord) -> bytes:
    """Encode one record of a segment. Raises InvalidValueError."""
    if not 0 <= record.partition < 2**32:
        raise InvalidValueError("partition", record.partition, "0 .. 2**32 - 1")
    if not 0 <= record.offset < 2**63:
        raise InvalidValueError("offset", record.offset, "0 .. 2**63 - 1")
    if not -(2**63) <= record.timestamp_ms < 2**63:
        raise InvalidValueError("timestamp_ms", record.timestamp_ms, "a signed 64-bit integer")
    if len(record.key) > MAX_KEY_BYTES:
        raise InvalidValueError("key", record.key, f"at most {MAX_KEY_BYTES} bytes")
    if not 0 <= record.channel <= MAX_CHANNEL:
        raise InvalidValueError("channel", record.channel, f"0 .. {MAX_CHANNEL}")
    if len(record.payload) > MAX_RECORD_BYTES:
        raise InvalidValueError("payload", record.payload, f"at most {MAX_RECORD_BYTES} bytes")
    fixed = _BODY.pack(record.partition, record.offset, record.timestamp_ms, len(record.key), record.channel)
    body = b"".join((fixed, record.key, record.payload))
    frame = _FRAME.pack(len(body), zlib.crc32(body))
    return b"".join((frame, _CRC.pack(zlib.crc32(frame)), body))


def read_version(segment: Segment) -> int | None:
    """Return the format version of a segment, from its header.

    None if there is no header yet: the writer of the segment is, or died, between creating it and writing it.

    Raises EventLogCorruptedError for any other bytes.
    """
    with segment.path.open("rb") as file:
        head = file.read(HEADER_BYTES)
        for version in range(1, FORMAT_VERSION + 1):
            if head == segment_header(segment.first_index, version):
                return version
        torn = len(head) < HEADER_BYTES or not (any(head) or file.read(1))
    if torn and segment.next_first_index is None:
        return None
    detail = f"not a segment header of this name and a format version of 1 to {FORMAT_VERSION}"
    raise _corrupted(segment, 0, segment.first_index, detail)


def scan(segment: Segment, position: int, index: int) -> Iterator[Located]:
    """Yield the records of a segment from a byte position, which is that of record `index`.

    Ends at the last complete record. A torn tail may follow, which is an append that is in progress or was cut off:
    fewer bytes than a record announces, a last record with a wrong checksum, or only zeros (the file was extended, but
    its data did not reach the disk). Anything else raises EventLogCorruptedError, and so does a torn tail in a segment
    that has a successor.
    """
    with segment.path.open("rb", buffering=0) as file:
        while True:
            data = os.pread(file.fileno(), _CHUNK_BYTES, position)
            begin = position
            for located in _whole_records(data, position, index):
                yield located
                position, index = located.end, located.record_index + 1
            if position == begin:
                break
        check_end(file.fileno(), segment, position, index)


def check_end(fd: int, segment: Segment, position: int, index: int) -> None:
    """Raise EventLogCorruptedError unless the segment ends at a byte position, before record `index`.

    A torn tail counts as an end, except in a segment that has a successor.
    """
    fault = _fault(fd, position)
    if fault is not None and (fault.corrupted or segment.next_first_index is not None):
        raise _corrupted(segment, position, index, fault.detail, _resume(fd, segment, position, index, fault))
    if segment.next_first_index not in (None, index):
        raise _corrupted(segment, position, index, f"records up to {segment.next_first_index} are missing")


class _Fault(NamedTuple):
    detail: str
    corrupted: bool
    """Whether the damage cannot be a torn tail."""
    num_bytes: int | None = None
    """Length of the damaged record, if its head is sound."""


def _whole_records(data: bytes, position: int, index: int) -> Iterator[Located]:
    """Yield the valid records at the beginning of data that was read at a byte position of the segment."""
    view = memoryview(data)
    start = 0
    while (body := _frame(view, start)) is not None:
        first = start + _FRAME_BYTES
        start = first + body.num_bytes
        if start > len(data) or zlib.crc32(view[first:start]) != body.checksum:
            return
        partition, offset, timestamp_ms, key_bytes, channel = _BODY.unpack_from(view, first)
        key_end = first + _BODY.size + key_bytes
        if key_end > start:
            return
        key, payload = data[first + _BODY.size : key_end], data[key_end:start]
        record = LogRecord(partition, offset, timestamp_ms, key, payload, channel)
        yield Located(index, position + start, record)
        index += 1


class _Body(NamedTuple):
    num_bytes: int
    checksum: int


def _frame(view: memoryview, start: int) -> _Body | None:
    """Decode the first twelve bytes of a record. None if they are incomplete or invalid."""
    if start + _FRAME_BYTES > len(view):
        return None
    num_bytes, checksum = _FRAME.unpack_from(view, start)
    (frame_checksum,) = _CRC.unpack_from(view, start + _FRAME.size)
    sound = zlib.crc32(view[start : start + _FRAME.size]) == frame_checksum
    return _Body(num_bytes, checksum) if sound and _BODY.size <= num_bytes <= MAX_BODY_BYTES else None


def _fault(fd: int, position: int) -> _Fault | None:
    """Return why no record follows at a byte position, or None if the file ends there."""
    num_left = os.fstat(fd).st_size - position
    if num_left <= 0:
        return None
    rest = os.pread(fd, num_left, position)
    if any(_whole_records(rest, position, 0)):
        return None  # an append has finished since the read
    if rest.count(0) == len(rest) or len(rest) < _FRAME_BYTES:
        return _Fault(f"a torn tail of {len(rest)} bytes", corrupted=False)
    body = _frame(memoryview(rest), 0)
    if body is None:
        return _Fault("the checksum of a record's head is wrong", corrupted=True)
    length = _FRAME_BYTES + body.num_bytes
    if length > len(rest):
        return _Fault(f"{len(rest)} bytes of a record of {length}", corrupted=False)
    return _Fault("a record's checksum is wrong", corrupted=length < len(rest), num_bytes=length)


def _resume(fd: int, segment: Segment, position: int, index: int, fault: _Fault) -> Resume | None:
    """Find the first sound record behind a fault in the same segment."""
    begin = position + (fault.num_bytes or 1)
    data = os.pread(fd, 2 * _MOST_RECORD_BYTES, begin)
    if fault.num_bytes is not None and _is_sound(data, 0):
        return Resume(index + 1, begin)
    found = next((begin + at for at in range(min(len(data), _MOST_RECORD_BYTES)) if _is_sound(data, at)), None)
    if found is None:
        return None
    if segment.next_first_index is None:  # at least one record is lost
        return Resume(index + 1, found)
    try:
        num_left = sum(1 for _ in scan(segment._replace(next_first_index=None), found, 0))
    except EventLogCorruptedError:
        return Resume(index + 1, found)
    return Resume(max(index + 1, segment.next_first_index - num_left), found)


def _is_sound(data: bytes, start: int) -> bool:
    """Return whether a whole record begins at a position of some data."""
    if _frame(memoryview(data), start) is None:
        return False
    return any(_whole_records(data[start : start + _MOST_RECORD_BYTES], 0, 0))


def _corrupted(
    segment: Segment, position: int, index: int, detail: str, resume: Resume | None = None
) -> EventLogCorruptedError:
    if resume is None and segment.next_first_index is not None:
        resume = Resume(segment.next_first_index, None)
    return EventLogCorruptedError(segment.path, position, index, detail, resume)
