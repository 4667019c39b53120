"""Inputs from engines: batches of the ZMQ protocol, floods of their events, and TensorRT-LLM's polled events."""

import asyncio
import contextlib
import logging
import time
from typing import Any

import msgspec

from bridge import BridgeSettings
from bridge.context import BridgeCounters, EngineContext
from bridge.decoding.decoder import Decoder, Messages, UndecodableError
from bridge.hashes.event_translator import EventTranslator
from bridge.registry import StreamRegistry
from bridge.settings import EngineDefaults
from bridge.shared_sink import SharedSink
from bridge.stream.rank_streams import RankStreams
from bridge.tensorrt import PolledEvents
from kv_events.codec import decode_batch
from kv_events.log.memory import MemoryLog
from kv_events.runtime.outages import RateLimitedLogger
from kv_events.streams import StreamId
from publisher import EventPublisher, PublisherSettings
from publisher.kernels.blocks import BlockTable
from publisher.sinks.memory import MemorySink
from tests.support.engines.event_payloads import cleared, payload, removed, stored
from tests.support.engines.hostile_payloads import SHAPES, hostile

_TOKENS = list(range(1, 17))


def small_publisher(block_size: int = 4) -> PublisherSettings:
    """Settings of a publisher with small tables."""
    return PublisherSettings.ignoring_environment(
        model="m", worker="w", block_size=block_size, ledger_pages=4096, queue_pages=4096
    )


STREAM = StreamId("m", "default", "w", 0)


def small_registry() -> StreamRegistry:
    """The streams of a bridge with small tables."""
    settings = BridgeSettings.ignoring_environment(bridge_name_pages=4096)
    return StreamRegistry(settings, small_publisher(), SharedSink(MemorySink(MemoryLog())))


def _publisher(_: StreamId, block_size: int, blocks: BlockTable | None) -> EventPublisher:
    return EventPublisher(small_publisher(block_size), MemorySink(MemoryLog()), blocks)


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


class BridgeTarget:
    """One worker's stream that receives all examples in sequence."""

    def __init__(self) -> None:
        self._decoder = Decoder()
        limited_logger = RateLimitedLogger(logging.getLogger("tests"), "engine w")
        context = EngineContext(EngineDefaults(), BridgeCounters(), limited_logger, _publisher, 4096, 4096)
        self._translator = EventTranslator(STREAM, context)

    def __call__(self, data: bytes) -> None:
        try:
            batch = self._decoder.decode(data)
        except UndecodableError:
            return
        for run, _ in batch.runs:
            self._translator.apply(run)
        self._translator.end_batch()
        for publisher in self._translator.publishers:
            _check(publisher)


FLOODS = [*PAYLOADS, *(hostile(shape, 12) for shape in SHAPES)]

_TIMES = 150
_STEP_S = 2.0
"""CPU time. Steps usually take less than 10 ms, but 0.5 s if they name 128 new ranks; memory is traced here."""


class FloodTarget:
    """One engine's streams that receive a batch, and then the same events many times over."""

    def __call__(self, data: bytes) -> None:
        asyncio.run(self._run(data))

    async def _run(self, data: bytes) -> None:
        streams = RankStreams(STREAM, EngineDefaults(), small_registry(), BridgeCounters())
        for batch in (data, _many_times(data)):
            _apply(streams, batch)
            await streams.start_and_close_publishers()
        await streams.close(0.0, clear=True)


def _apply(streams: RankStreams, payload: bytes) -> None:
    """Raises AssertionError if one step takes long."""
    work, is_left = streams.apply(Messages.of([(0, payload)])), True
    while is_left:
        began = time.thread_time()
        is_left = next(work, "end") is None
        took = time.thread_time() - began
        assert took < _STEP_S, f"one step took {took:.2f} s"


def _many_times(data: bytes) -> bytes:
    """The batch with its events repeated; the same bytes if it is none."""
    try:
        timestamp, events, *more = msgspec.msgpack.decode(data, type=list[msgspec.Raw])
        repeated = msgspec.msgpack.decode(events, type=list[msgspec.Raw]) * _TIMES
        return msgspec.msgpack.encode([timestamp, repeated, *more])
    except (msgspec.DecodeError, ValueError, RecursionError):
        return data


_BLOCKS = [
    {"type": "stored_block", "block_hash": number, "cache_level": level, "priority": 35, "mm_keys": [{"hash": "ab"}],
     "tokens": [{"token_id": token, "token_extra_id": 0} for token in range(4)]}
    for number, level in ((11, 0), (12, 0), (13, 1))
]  # fmt: skip
_LEVELS = {"old_value": 0, "new_value": 1}
_POLLED: list[Any] = [
    {"event_id": 0, "data": {"type": "created", "num_blocks_per_cache_level": [8, 8]}, "window_size": 64},
    {"event_id": 1, "data": {"type": "stored", "parent_hash": None, "blocks": _BLOCKS}, "window_size": 64},
    {"event_id": 2, "data": {"type": "updated", "block_hash": 11, "cache_level": _LEVELS, "priority": None}},
    {"event_id": 3, "data": {"type": "removed", "block_hashes": [12, "ab" * 32]}, "layer_group_id": 0},
    {"event_id": 5, "data": {"type": "stored", "parent_hash": 13, "blocks": _BLOCKS[:1]}, "attention_dp_rank": 1},
]
POLLED = [msgspec.msgpack.encode(_POLLED), msgspec.json.encode(_POLLED)]


def run_polled(data: bytes) -> None:
    """data: one event of TensorRT-LLM or a list of them, as msgpack or JSON."""
    publishers: list[EventPublisher] = []

    def made(settings: PublisherSettings, blocks: BlockTable | None) -> EventPublisher:
        publishers.append(EventPublisher(settings, MemorySink(MemoryLog()), blocks))
        return publishers[-1]

    events = _plain(data)
    PolledEvents(small_publisher(), made, name_pages=4096).take(events if isinstance(events, list) else [events])
    for publisher in publishers:
        _check(publisher)


def _plain(data: bytes) -> Any:
    for codec in (msgspec.msgpack, msgspec.json):
        with contextlib.suppress(msgspec.DecodeError, ValueError, RecursionError):
            return codec.decode(data)
    return None


def _check(publisher: EventPublisher) -> None:
    for record in publisher.take_records(1.0, force=True):
        decode_batch(record.payload)
    publisher.check()
