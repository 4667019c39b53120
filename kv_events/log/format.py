"""The bytes of one event-log segment, header and records, and the files of a log: which there are, and replacing one.

`docs/event_log.md` documents the layout with byte offsets. All integers are little-endian.
"""

import os
import struct
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from kv_events.errors import InvalidValueError, KvsightError
from kv_events.limits import MAX_RECORD_BYTES
from kv_events.records import MAX_CHANNEL, LogRecord

SUFFIX = ".kvlog"
LOCK_NAME: Final = "writer.lock"
"""File that the writer of a log holds with `flock`."""
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
FRAME_BYTES = _FRAME.size + _CRC.size
RECORD_BYTES = FRAME_BYTES + _BODY.size
"""Size of a record without its key and payload."""
MAX_BODY_BYTES = _BODY.size + MAX_KEY_BYTES + MAX_RECORD_BYTES


class EventLogError(KvsightError):
    """An event log cannot be used. Names the path and the cause."""


def check_folder(folder: Path) -> None:
    """Raise EventLogError unless there is such a folder."""
    if not folder.is_dir():
        raise EventLogError(f"{folder}: {'a file, not a folder' if folder.exists() else 'no such folder'}")


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
    raise corrupted(segment, 0, segment.first_index, detail)


def body_of(data: bytes | memoryview, start: int) -> slice | None:
    """Return where the body of the record is that begins at a position of some data. None if its head is not sound.

    The body may go on behind the data.
    """
    first = start + FRAME_BYTES
    if first > len(data):
        return None
    (checksum,) = _CRC.unpack_from(data, first - _CRC.size)
    if zlib.crc32(data[start : first - _CRC.size]) != checksum:
        return None
    num_bytes, _ = _FRAME.unpack_from(data, start)
    return slice(first, first + num_bytes) if _BODY.size <= num_bytes <= MAX_BODY_BYTES else None


def is_sound(data: bytes | memoryview, start: int) -> bool:
    """Return whether a whole record begins at a position of some data."""
    body = body_of(data, start)
    if body is None or body.stop > len(data):
        return False
    _, _, _, key_bytes, _ = _BODY.unpack_from(data, body.start)
    _, checksum = _FRAME.unpack_from(data, start)
    return bool(body.start + _BODY.size + key_bytes <= body.stop and zlib.crc32(data[body]) == checksum)


def corrupted(
    segment: Segment, position: int, index: int, detail: str, resume: Resume | None = None
) -> EventLogCorruptedError:
    """Return the error of a damaged record. resume: None: the next segment, if there is one."""
    if resume is None and segment.next_first_index is not None:
        resume = Resume(segment.next_first_index, None)
    return EventLogCorruptedError(segment.path, position, index, detail, resume)


def replace_file(path: Path, pieces: Iterable[bytes | bytearray | memoryview], *, sync: bool = False) -> None:
    """Replace a file at once, or leave it as it is. Raises OSError.

    sync: the content is on disk before the file has it.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            file.writelines(pieces)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError:
        with suppress(OSError):  # for example of a read-only disk
            unfinished.unlink(missing_ok=True)
        raise


def delete_unfinished(folder: Path, suffix: str) -> None:
    """Delete what processes that have ended left of `replace_file`. suffix: of the files."""
    # the number of this process may be that of one that ended, as in a container
    for path in folder.glob(f"*{suffix}.*"):
        owner = path.name.rpartition(".")[2]
        if owner.isdecimal() and (int(owner) == os.getpid() or not _is_running(int(owner))):
            with suppress(OSError):
                path.unlink()


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it belongs to another user
        return True
    return True
