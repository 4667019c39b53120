"""Messages of an engine whose events come many times over. Each step of work on them must be short."""

from __future__ import annotations

import asyncio
import time

import msgspec

from bridge import BridgeSettings
from bridge.counters import BridgeCounters
from bridge.decoding.decoder import Messages
from bridge.registry import StreamRegistry
from bridge.settings import EngineDefaults
from bridge.shared_sink import SharedSink
from bridge.stream.rank_streams import RankStreams
from kv_events.log.memory import MemoryLog
from kv_events.streams import StreamId
from publisher import PublisherSettings
from publisher.sinks import MemorySink
from tests.fuzz.engine_inputs import PAYLOADS
from tests.support.engines.hostile_payloads import SHAPES, hostile

FLOODS = [*PAYLOADS, *(hostile(shape, 12) for shape in SHAPES)]

_TIMES = 150
_STEP_S = 2.0
"""CPU time. Steps usually take less than 10 ms, but 0.5 s if they name 128 new ranks; memory is traced here."""


class FloodTarget:
    """One engine's streams that receive a batch, and then the same events many times over."""

    def __init__(self) -> None:
        self._settings = BridgeSettings.ignoring_environment(bridge_name_pages=4096)
        self._template = PublisherSettings.ignoring_environment(
            model="m", worker="w", block_size=4, ledger_pages=4096, queue_pages=4096
        )

    def __call__(self, data: bytes) -> None:
        asyncio.run(self._run(data))

    async def _run(self, data: bytes) -> None:
        registry = StreamRegistry(self._settings, self._template, SharedSink(MemorySink(MemoryLog())))
        stream, defaults = StreamId("m", "default", "w", 0), EngineDefaults()
        streams = RankStreams(stream, defaults, registry, BridgeCounters())
        for payload in (data, _many_times(data)):
            _apply(streams, payload)
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
