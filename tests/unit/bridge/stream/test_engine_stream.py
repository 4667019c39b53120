"""An engine stream without a socket: the handling of connections that its subscriber reports."""

from __future__ import annotations

from bridge import BridgeSettings
from bridge.counters import BridgeCounters
from bridge.decoding.decoder import Decoder, Messages
from bridge.registry import StreamRegistry
from bridge.settings import EngineDefaults
from bridge.shared_sink import SharedSink
from bridge.stream.engine_stream import EngineStream
from bridge.threads import DecodeThreads
from kv_events.log.memory import MemoryLog
from kv_events.schema import ENGINE_UNHEARD
from kv_events.streams import StreamId
from publisher import PublisherSettings
from publisher.sinks import MemorySink
from tests.support.bridge.rig import GPU, View, on
from tests.support.engines.event_payloads import names_of, payload, stored
from tests.support.waiting import async_wait_until

PAGE = on(GPU, names_of([1, 2, 3, 4]))


async def test_a_connection_that_was_back_before_the_loss_was_seen_is_not_taken_for_unbroken() -> None:
    log, view = MemoryLog(), View()
    template = PublisherSettings(model="-", worker="-", block_size=1, ledger_pages=10_000)
    registry = StreamRegistry(BridgeSettings(), template, SharedSink(MemorySink(log)))
    stream = StreamId("m", "default", "w", 0)
    engine_stream = EngineStream(
        stream, EngineDefaults(block_size=4), registry, Decoder(), BridgeCounters(), None, DecodeThreads()
    )

    def shown() -> tuple[object, ...]:
        for record in log.read(0):
            view.read(record.payload)
        return view.pages, view.degraded_reason

    engine_stream.set_receiving(True)
    await engine_stream.take_live(Messages.of([(0, payload(stored([1], [1, 2, 3, 4])))]))
    await async_wait_until(lambda: shown() == (PAGE, ""))
    await engine_stream.reconnected()
    await async_wait_until(lambda: shown() == (set(), ENGINE_UNHEARD))
    await engine_stream.ranks.close(1.0, clear=False)
