"""Every decoder of bytes from outside, as a function that may refuse them in the way it promises, and in no other."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import tempfile
import zlib
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from engine_events import cleared, payload, removed, stored
from hand_fed import HandFed
from wire import Stream
from wire import removed as packed_removed
from wire import stored as packed_stored

from api.decoding import CONTENT_TYPES, codec_of, decode_as
from api.hot import HotRoutes
from api.problems import ProblemError
from api.register import engine_of_peer, engine_of_rfc
from api.registration_schemas import PeerRegistration, PeerUnregistration, RfcRegistration, RfcUnregistration
from api.registrations import engines_of
from indexer.applier import Applier
from indexer.dead_letters import DeadLetters
from indexer.namespaces import Namespaces
from indexer.settings import IndexerSettings
from indexer.snapshots.base import SnapshotDamagedError
from indexer.snapshots.image import take, unpack
from kv_events.codec import decode_batch
from kv_events.errors import RecordRejectedError
from kv_events.event_log import EventLogError, EventLogReader, EventLogWriter
from kv_events.memory_log import MemoryLog
from kv_events.records import LogRecord
from kv_events.schema import AllBlocksCleared, SnapshotBegin, SnapshotEnd
from kv_events.streams import StreamId
from publisher import EventPublisher, PublisherSettings
from publisher.bridge import BridgeSettings
from publisher.bridge.counters import BridgeCounters
from publisher.bridge.decoding import Decoder, UndecodableError
from publisher.bridge.frames import FrameError, LiveMessage, ReplayMessage, parse_live, parse_replay, parse_topic
from publisher.bridge.shared_sink import SharedSink
from publisher.bridge.source import Source
from publisher.bridge.streams import StreamRegistry
from publisher.bridge.translate import Identity, Translator, Unsaid
from publisher.bridge.workers import Workers
from publisher.sinks import MemorySink


class Target(NamedTuple):
    """One decoder."""

    examples: Sequence[bytes]
    """What it takes."""
    run: Callable[[bytes], None]
    """Raises nothing, whatever the bytes are."""


_SMALL = IndexerSettings.ignoring_environment(max_pages=4096, max_streams=64, max_namespaces=8, max_set_bytes=2**20)
_TOKENS = list(range(1, 17))


def _publisher(block_size: int) -> EventPublisher:
    settings = PublisherSettings.ignoring_environment(
        model="m", worker="w", block_size=block_size, ledger_pages=4096, queue_pages=4096
    )
    return EventPublisher(settings, MemorySink(MemoryLog()))


# --- engines' events ------------------------------------------------------------------------------------------------

_EVENTS: list[Any] = [
    stored([1, 2, 3, 4], _TOKENS, medium="GPU"),
    stored([-5], [5, 6, 7, 8], parent=1, lora_name="ad", extra_keys=[["salt"]], group_idx=0),
    stored([b"\x01" * 32], [[1, 2], [2, 3], [3, 4], [4, 5]], medium="CPU", lora_id=3),
    stored([9], [], 0, medium="DISK"),
    removed([1, 2], "GPU"),
    cleared(),
]
_ENVELOPE = {
    "event_type": "stored", "event_id": 1, "seq_hashes": [1, 2], "base_block_idx": 0, "parent_hash": None,
    "token_ids": _TOKENS[:8], "block_size": 4, "medium": "cpu", "tenant_id": "default", "backend_id": "b",
}  # fmt: skip
PAYLOADS = [
    payload(*_EVENTS),
    payload(*_EVENTS, form="map", batch="map"),
    payload(*_EVENTS[:1] * 5, form="array with nils", batch="pair", rank=None),
    payload({"form": "other"}, msgspec.msgpack.encode(_ENVELOPE)),
    msgspec.msgpack.encode([1.0, [_ENVELOPE, {**_ENVELOPE, "event_type": "removed"}, {"event_type": "cleared"}], 0]),
    msgspec.msgpack.encode([1.0, [["BlockStored", [7], None, [1, 2, 3, 4], 4, None, "GPU", {"cache_salt": "x"}]], 0]),
]


class _BridgeTarget:
    """One worker's stream that hears all examples, one after the other."""

    def __init__(self) -> None:
        self._decoder = Decoder()
        self._translator = Translator(
            Identity("m", "default"), BridgeCounters(), _publisher, block_size=None, name_pages=4096
        )

    def __call__(self, data: bytes) -> None:
        try:
            batch = self._decoder.decode(data)
        except UndecodableError:
            return
        for run, _ in batch.runs:
            self._translator.apply(run)
        if self._translator.publisher is not None:
            for record in self._translator.publisher.take_records(1.0, force=True):
                decode_batch(record.payload)
            self._translator.publisher.check()


class _ScriptedReplay:
    """A stand-in for a replay socket, because a real one would take a millisecond an answer."""

    def __init__(self, messages: list[ReplayMessage]) -> None:
        self._messages = messages

    async def batches(self, start: int) -> AsyncGenerator[ReplayMessage, None]:
        for message in self._messages:
            if message.is_end:
                return
            yield message


def _frames(data: bytes) -> list[bytes]:
    """Frames that lie in bytes behind lengths of two bytes."""
    frames = []
    while len(data) >= 2 and len(frames) < 8:
        length = int.from_bytes(data[:2], "little")
        frames.append(data[2 : 2 + length])
        data = data[2 + length :]
    return frames


def _joined(*frames: bytes) -> bytes:
    return b"".join(len(frame).to_bytes(2, "little") + frame for frame in frames)


def _run_frames(data: bytes) -> None:
    frames = _frames(data)
    with contextlib.suppress(FrameError):
        parse_topic(parse_live(frames).topic)
    with contextlib.suppress(FrameError):
        parse_replay(frames)


class _ReplayTarget:
    """Live batches and replay answers of one engine, by their numbers."""

    def __init__(self) -> None:
        self._workers = Workers()
        self._settings = BridgeSettings.ignoring_environment(bridge_name_pages=4096)
        self._template = PublisherSettings.ignoring_environment(
            model="m", worker="w", block_size=4, ledger_pages=4096, queue_pages=4096
        )

    def __call__(self, data: bytes) -> None:
        asyncio.run(self._run(_frames(data)))

    async def _run(self, frames: list[bytes]) -> None:
        messages = [
            ReplayMessage(int.from_bytes(frame[:1], "big", signed=True), frame[1:]) for frame in frames if frame
        ]
        registry = StreamRegistry(self._settings, self._template, SharedSink(MemorySink(MemoryLog())))
        replay: Any = _ScriptedReplay(messages[len(messages) // 2 :])
        source = Source(
            StreamId("m", "default", "w", 0), Unsaid(4), registry, Decoder(), BridgeCounters(), replay, self._workers
        )
        await source.open()
        for message in messages[: len(messages) // 2]:
            await source.take_live([LiveMessage("", abs(message.seq), message.payload)])
        await source.close(0.0, clear=True)


_NUMBERED = [
    _joined(*(bytes([seq]) + part for seq, part in zip((0, 1, 1, 3, 0, 2, 4, 255), PAYLOADS * 2, strict=False)))
]

# --- the log --------------------------------------------------------------------------------------------------------


def _records() -> list[bytes]:
    stream = Stream("w0")
    return [
        stream.batch(packed_stored((0, [1, 2, 3]), (2, [9])), AllBlocksCleared()).payload,
        stream.batch(SnapshotBegin("x"), packed_stored((0, [5]), tier=2), SnapshotEnd()).payload,
        stream.batch(packed_removed([5], tier=2)).payload,
        stream.batch().payload,
    ]


class _RecordTarget:
    """An indexer that reads all examples, one after the other."""

    def __init__(self) -> None:
        self._applier = Applier(Namespaces(_SMALL), DeadLetters())

    def __call__(self, data: bytes) -> None:
        with contextlib.suppress(RecordRejectedError):
            decode_batch(data)
        for _ in self._applier.apply(LogRecord(0, 0, 0, b"", data), 1.0):
            pass


def _segment() -> bytes:
    with tempfile.TemporaryDirectory() as name:
        with EventLogWriter(Path(name)) as writer:
            for record in _records():
                writer.append(LogRecord(0, 1, 2, b"key", record))
        return next(Path(name).glob("*.kvlog")).read_bytes()


def _run_segment(data: bytes) -> None:
    for mended in (data, _with_checksums(data)):
        with tempfile.TemporaryDirectory() as name:
            (Path(name) / f"{0:020}.kvlog").write_bytes(mended)
            with contextlib.suppress(EventLogError):
                for _ in EventLogReader(Path(name)).read():
                    pass
            with contextlib.suppress(EventLogError), EventLogWriter(Path(name)) as writer:
                writer.append(LogRecord(0, 1, 2, b"key", b"payload"))


def _with_checksums(data: bytes) -> bytes:
    """A segment whose first record is as damaged as before, but sealed."""
    if len(data) < 40:
        return data
    length = min(struct.unpack_from("<I", data, 24)[0], len(data) - 36)
    body = data[36 : 36 + length]
    frame = struct.pack("<II", length, zlib.crc32(body))
    return data[:24] + frame + struct.pack("<I", zlib.crc32(frame)) + data[36:]


# --- snapshots ------------------------------------------------------------------------------------------------------


def _snapshot() -> bytes:
    applier = Applier(Namespaces(_SMALL), DeadLetters())
    for worker in ("a", "b"):
        for _ in applier.apply(Stream(worker).batch(packed_stored((0, [1, 2, 3]), tier=len(worker))), 1.0):
            pass
    copying = take(applier.namespaces, {0: 5}, 1.0)
    while True:
        try:
            next(copying)
        except StopIteration as end:
            data: bytes = end.value.pack()
            return data


_SNAPSHOT = _snapshot()
_SNAPSHOT_HEADER = len(_SNAPSHOT) - next(
    n for n in range(len(_SNAPSHOT)) if zlib.crc32(_SNAPSHOT[-n:]) == int.from_bytes(_SNAPSHOT[-n - 4 : -n], "little")
)


def _run_snapshot(data: bytes) -> None:
    """data: the body; sealed here."""
    magic = _SNAPSHOT[: _SNAPSHOT_HEADER - 4]
    for image in (data, magic + zlib.crc32(data).to_bytes(4, "little") + data):
        with contextlib.suppress(SnapshotDamagedError):
            for namespace in unpack(image, _SMALL).namespaces:
                namespace.index.check()


# --- HTTP -----------------------------------------------------------------------------------------------------------

_QUERIES: list[dict[str, Any]] = [
    {"model_name": "m", "token_ids": _TOKENS, "lora_name": "a", "tier_weights": [1, 0.5, 0, 0]},
    {"model": "m", "block_size": 4, "seq_hashes": [1, 2**64 - 1], "instance_id": 5, "tenant_id": "default"},
    {"modelname": "m", "block_size": 4, "block_hashes": [-1, 2**63 - 1], "tier_weights": {"gpu": 1}},
    {"queries": [{"model_name": "m", "token_ids": [1, 2, 3, 4]}, {"model": "m"}]},
]
_REGISTRATIONS: list[dict[str, Any]] = [
    {"instance_id": 1, "endpoint": "tcp://h:1", "model_name": "m", "block_size": 4, "replay_endpoint": "tcp://[::1]:2"},
    {"instance_id": "a", "type": "vLLM", "endpoint": "ipc:///x", "modelname": "m", "block_size": 4, "dp_rank": 3},
]


class _HttpTarget:
    """The hot routes as ASGI applications, without a server."""

    def __init__(self) -> None:
        consumer = HandFed(_SMALL).consumer
        for _ in consumer.applier.apply(Stream("w").batch(packed_stored((0, [1, 2, 3]))), 1.0):
            pass
        self._routes = HotRoutes(consumer, 2**20).endpoints()

    def __call__(self, data: bytes) -> None:
        for route in self._routes.values():
            for content_type in ("application/json", "application/msgpack"):
                asyncio.run(self._post(route, content_type, data))

    async def _post(self, route: Any, content_type: str, data: bytes) -> None:
        statuses = []

        async def receive() -> Any:
            return {"type": "http.request", "body": data, "more_body": False}

        async def send(message: Any) -> None:
            statuses.append(message.get("status", 0))

        scope = {"type": "http", "headers": [(b"content-type", content_type.encode())]}
        await route(scope, receive, send)
        assert max(statuses) < 500, statuses


def _run_registration(data: bytes) -> None:
    engines_of(data)
    for content_type in CONTENT_TYPES:
        codec = codec_of(content_type)
        for kind in (PeerRegistration, RfcRegistration, PeerUnregistration, RfcUnregistration):
            with contextlib.suppress(ProblemError):
                request = decode_as(kind, data, codec)
                if isinstance(request, PeerRegistration):
                    engine_of_peer(request)
                elif isinstance(request, RfcRegistration):
                    engine_of_rfc(request)


def _both(values: Sequence[Any]) -> list[bytes]:
    return [codec.encode(value) for value in values for codec in (msgspec.json, msgspec.msgpack)]


def targets() -> dict[str, Target]:
    """Fresh ones, by name."""
    return {
        "bridge payload": Target(PAYLOADS, _BridgeTarget()),
        "frames": Target([_joined(b"", bytes(8), PAYLOADS[0]), _joined(b"\0" * 5, b"", b"\xff" * 8, b"")], _run_frames),
        "replay": Target(_NUMBERED, _ReplayTarget()),
        "record": Target(_records(), _RecordTarget()),
        "segment": Target([_segment()], _run_segment),
        "snapshot": Target([_SNAPSHOT[_SNAPSHOT_HEADER:]], _run_snapshot),
        "query": Target(_both(_QUERIES), _HttpTarget()),
        "registration": Target(
            [
                *_both(_REGISTRATIONS),
                msgspec.json.encode({"engines": [{"endpoint": "tcp://h:1", "worker": "w", "model": "m"}]}),
            ],
            _run_registration,
        ),
    }
