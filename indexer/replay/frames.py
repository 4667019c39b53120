"""Key frames: exact images of the views beside an event log, from which a replay continues.

`docs/event_log.md` documents the files `*.kvframe`. They can be deleted at any time.
"""

import zlib
from collections import Counter
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from indexer.replay.replay import Replay
from indexer.settings import IndexerSettings
from indexer.slices import run_at_once
from indexer.snapshots.base import SnapshotDamagedError
from indexer.snapshots.image import check, take, unpack
from kv_events.errors import KvsightError
from kv_events.log.format import list_segments, replace_file
from kv_events.records import LogRecord

FRAME_SUFFIX: Final = ".kvframe"

_MAGIC = b"KVSFRM02"
_LENGTHS_BYTES = 8
_SETTINGS = ("max_pages", "max_set_bytes", "max_streams", "max_namespaces", "worker_ttl_s", "forget_after_s")
"""Settings on which views depend."""


class KeyFrameError(KvsightError):
    """A key frame cannot be used. The views are replayed from an earlier one, or from the beginning of the log."""


class OtherSettingsError(KvsightError):
    """A key frame has views with other bounds, or another time-to-live. It is sound, but of no use."""


class FrameHead(msgspec.Struct, frozen=True, array_like=True):
    """What decides whether a key frame can be used for a moment."""

    next_index: int
    """Index of the first record that is not in the views."""
    last_record: int
    """Checksum of the record before that one."""
    newest_ms: int
    """The latest time of the applied records."""
    positions: dict[int, int]
    """Partition -> offset after the highest one applied."""
    settings: dict[str, float]
    log_read_at: float
    resumed_at: float
    unbroken_since: float
    num_records: int
    rejected: dict[str, int]
    """Reason -> records that could not be applied."""
    lacks_beginning: bool = False
    """See `Replay`."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FrameHead)


def checksum(record: LogRecord) -> int:
    """Return a number that identifies a record of a log."""
    facts = f"{record.channel} {record.partition} {record.offset} {record.timestamp_ms}".encode()
    return zlib.crc32(record.payload, zlib.crc32(record.key, zlib.crc32(facts)))


def settings_of_views(settings: IndexerSettings) -> dict[str, float]:
    return {name: getattr(settings, name) for name in _SETTINGS}


def save_frame(folder: Path, replay: Replay, next_index: int, last_record: int) -> Path:
    """Write a key frame of views to which the records before `next_index` are applied. Raises OSError."""
    head = FrameHead(
        next_index,
        last_record,
        round(replay.now * 1000),
        replay.positions,
        settings_of_views(replay.settings),
        replay.freshness.log_read_at,
        replay.freshness.resumed_at,
        replay.freshness.unbroken_since,
        replay.applier.records,
        dict(replay.applier.dead_letters.counts),
        replay.lacks_beginning,
    )
    image = run_at_once(take(replay.namespaces, replay.positions, replay.now, is_exact=True)).pack()
    packed = _encoder.encode(head)
    lengths = len(packed).to_bytes(4, "little") + zlib.crc32(packed).to_bytes(4, "little")
    path = folder / f"{next_index:020d}{FRAME_SUFFIX}"
    replace_file(path, (_MAGIC, lengths, packed, *image))
    return path


def read_head(path: Path, settings: IndexerSettings | None) -> FrameHead:
    """Read the head of a key frame. settings: with which it must be made; None: any. Raises KeyFrameError, or
    OtherSettingsError.
    """
    try:
        with path.open("rb") as file:
            begin = file.read(len(_MAGIC) + _LENGTHS_BYTES)
            num_bytes, stated = int.from_bytes(begin[8:12], "little"), begin[12:16]
            packed = file.read(min(num_bytes, path.stat().st_size))
        if begin[:8] != _MAGIC or zlib.crc32(packed).to_bytes(4, "little") != stated:
            raise KeyFrameError(f"{path}: the head of the key frame is damaged")
        head = _decoder.decode(packed)
    except (OSError, msgspec.DecodeError) as error:
        raise KeyFrameError(f"{path}: {error}") from error
    if settings is not None and head.settings != settings_of_views(settings):
        raise OtherSettingsError(f"{path}: the key frame was made with other settings: {head.settings}")
    return head


def load_frame(path: Path, head: FrameHead, settings: IndexerSettings) -> Replay:
    """Return the views of a key frame. Raises KeyFrameError."""
    try:
        snapshot = unpack(_image(path), settings)
    except (OSError, SnapshotDamagedError) as error:
        raise KeyFrameError(f"{path}: {error}") from error
    replay = Replay(settings)
    replay.applier.namespaces = snapshot.namespaces
    replay.applier.records, replay.applier.dead_letters.counts = head.num_records, Counter(head.rejected)
    replay.positions = dict(head.positions)
    replay.clock = snapshot.taken_at, head.log_read_at, head.resumed_at, head.unbroken_since
    replay.lacks_beginning = head.lacks_beginning
    return replay


def faults_of_frames(folder: Path) -> list[str]:
    """Return the key frames of a log that are damaged, each with the reason."""
    faults = []
    for path in sorted(folder.glob(f"*{FRAME_SUFFIX}")):
        try:
            read_head(path, None)
            check(_image(path))
        except (KeyFrameError, SnapshotDamagedError, OSError) as error:
            faults.append(f"{path}: {error}" if isinstance(error, SnapshotDamagedError) else str(error))
    return faults


def _image(path: Path) -> bytes:
    data = path.read_bytes()
    return data[len(_MAGIC) + _LENGTHS_BYTES + int.from_bytes(data[8:12], "little") :]


class Beginning(NamedTuple):
    """The views before the oldest record of a log."""

    views: Replay
    """Empty without a key frame."""
    fault: str = ""
    """Why the key frame could not be used; empty if there is none, or if it is used."""
    warning: str = ""
    """That the views are incomplete, because older records were deleted without a key frame that has all of them."""


def open_beginning(folder: Path, settings: IndexerSettings, *, is_bounded: bool = True) -> Beginning:
    """Return the views before the oldest record of a log: those of the key frame there, or empty ones.

    is_bounded: use only a key frame that was made with these settings. Raises OSError.
    """
    first, path = _first_frame(folder)
    fault = ""
    if path.exists():
        try:
            views = load_frame(path, read_head(path, settings if is_bounded else None), settings)
            return Beginning(views, warning=begins_late(folder, first) if views.lacks_beginning else "")
        except (KeyFrameError, OtherSettingsError) as error:
            fault = str(error)
    return Beginning(Replay(settings), fault, begins_late(folder, first) if first else "")


def num_records_before(folder: Path, settings: IndexerSettings) -> int:
    """Return how many records the key frame before the oldest record of a log counts; 0 without a usable one."""
    path = _first_frame(folder)[1]
    try:
        head = read_head(path, settings)
        check(_image(path))
    except (KeyFrameError, OtherSettingsError, SnapshotDamagedError, OSError):
        return 0
    return head.num_records


def _first_frame(folder: Path) -> tuple[int, Path]:
    """Return the index of the oldest record of a log, and where its key frame is, if there is one."""
    segments = list_segments(folder)
    first = segments[0].first_index if segments else 0
    return first, folder / f"{first:020d}{FRAME_SUFFIX}"


def begins_late(folder: Path, first_index: int) -> str:
    """Return the sentence about a log whose oldest records were deleted, without a key frame that has all of them."""
    cause = f"the records before {first_index} are deleted" if first_index else "it is a slice of a log that does"
    return (
        f"{folder} begins late: {cause}, and no key frame has everything that workers held then. "
        "What a worker held is unknown until it resends everything"
    )
