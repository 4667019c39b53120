"""Inputs from the log: records as an indexer and a sink read them, segments of files, and snapshots."""

import contextlib
import struct
import tempfile
import zlib
from pathlib import Path

from bridge.decoding.decoder import Decoder
from indexer.applier import Applier, DeadLetters
from indexer.namespaces import Namespaces
from indexer.settings import IndexerSettings
from indexer.slices import run_at_once
from indexer.snapshots.base import SnapshotDamagedError
from indexer.snapshots.image import take, unpack
from kv_events.codec import decode_batch
from kv_events.errors import RecordRejectedError
from kv_events.log.event_log import EventLogError, EventLogReader, EventLogWriter
from kv_events.log.memory import MemoryLog
from kv_events.records import LogRecord
from kv_events.schema import AllBlocksCleared, BlockRemoved, BlockStored, SnapshotBegin, SnapshotEnd
from publisher import EventPublisher, PublisherSettings
from publisher.sinks.engine_events import Encoding, EngineEvents
from publisher.sinks.memory import MemorySink
from tests.support.log.late_log import write_log
from tests.support.log.records import Stream
from tests.support.log.records import removed as packed_removed
from tests.support.log.records import stored as packed_stored

ENCODINGS: tuple[Encoding, ...] = ("array", "map")
SMALL = IndexerSettings.ignoring_environment(max_pages=4096, max_streams=64, max_namespaces=8, max_set_bytes=2**20)


def records() -> list[bytes]:
    """Records of one stream."""
    stream = Stream("w0")
    return [
        stream.batch(packed_stored((0, [1, 2, 3]), (2, [9])), AllBlocksCleared()).payload,
        stream.batch(SnapshotBegin("x"), packed_stored((0, [5]), tier=2), SnapshotEnd()).payload,
        stream.batch(packed_removed([5], tier=2)).payload,
        stream.batch().payload,
    ]


class RecordTarget:
    """An indexer that reads all examples in sequence."""

    def __init__(self) -> None:
        self._applier = Applier(Namespaces(SMALL), DeadLetters())

    def __call__(self, data: bytes) -> None:
        with contextlib.suppress(RecordRejectedError):
            decode_batch(data)
        run_at_once(self._applier.apply(LogRecord(0, 0, 0, b"", data), 1.0))


def published_records() -> list[bytes]:
    """Records of one stream with tokens, including a resync."""
    settings = PublisherSettings.ignoring_environment(
        model="m", worker="w", block_size=4, ledger_pages=4096, queue_pages=4096, with_tokens=True
    )
    publisher = EventPublisher(settings, MemorySink(MemoryLog()))
    taken = []
    for event in (BlockStored([1, 2], None, list(range(8)), 4), BlockRemoved([2]), AllBlocksCleared()):
        publisher.publish([event])
        taken += [record.payload for record in publisher.take_records(1.0, force=True)]
    return taken + records()


def run_published(data: bytes) -> None:
    """Decode as the ZMQ sink does. Its output must be readable."""
    for encoding in ENCODINGS:
        events = EngineEvents(encoding)
        with contextlib.suppress(RecordRejectedError):
            for _ in range(2):
                payload = events.encode(data)
                if payload is not None:
                    Decoder().decode(payload)


def segment() -> bytes:
    """Return a segment file."""
    with tempfile.TemporaryDirectory() as name:
        write_log(Path(name), (LogRecord(0, 1, 2, b"key", record) for record in records()))
        return next(Path(name).glob("*.kvlog")).read_bytes()


def run_segment(data: bytes) -> None:
    """Read the segment as it is, and with corrected checksums."""
    for mended in (data, _with_checksums(data)):
        with tempfile.TemporaryDirectory() as name:
            (Path(name) / f"{0:020}.kvlog").write_bytes(mended)
            with contextlib.suppress(EventLogError):
                for _ in EventLogReader(Path(name)).read():
                    pass
            with contextlib.suppress(EventLogError), EventLogWriter(Path(name)) as writer:
                writer.append(LogRecord(0, 1, 2, b"key", b"payload"))


def _with_checksums(data: bytes) -> bytes:
    """Return the segment with valid checksums for its first, still damaged record."""
    if len(data) < 40:
        return data
    length = min(struct.unpack_from("<I", data, 24)[0], len(data) - 36)
    body = data[36 : 36 + length]
    frame = struct.pack("<II", length, zlib.crc32(body))
    return data[:24] + frame + struct.pack("<I", zlib.crc32(frame)) + data[36:]


def _snapshot() -> bytes:
    applier = Applier(Namespaces(SMALL), DeadLetters())
    for worker in ("a", "b"):
        run_at_once(applier.apply(Stream(worker).batch(packed_stored((0, [1, 2, 3]), tier=len(worker))), 1.0))
    return b"".join(run_at_once(take(applier.namespaces, {0: 5}, 1.0)).pack())


_SNAPSHOT = _snapshot()
_HEADER = len(_SNAPSHOT) - next(
    n for n in range(len(_SNAPSHOT)) if zlib.crc32(_SNAPSHOT[-n:]) == int.from_bytes(_SNAPSHOT[-n - 4 : -n], "little")
)
SNAPSHOT_BODY = _SNAPSHOT[_HEADER:]


def run_snapshot(data: bytes) -> None:
    """data: the body, which gets a valid checksum here."""
    magic = _SNAPSHOT[: _HEADER - 4]
    for image in (data, magic + zlib.crc32(data).to_bytes(4, "little") + data):
        with contextlib.suppress(SnapshotDamagedError):
            for namespace in unpack(image, SMALL).namespaces:
                namespace.index.check()
