"""A source without a socket: what it makes of a connection that its subscriber tells it of."""

from __future__ import annotations

from bridge import BridgeSettings
from bridge.counters import BridgeCounters
from bridge.decoding.decoder import Decoder
from bridge.naming.identity import Unsaid
from bridge.registry import StreamRegistry
from bridge.shared_sink import SharedSink
from bridge.stream.engine_stream import Source
from bridge.worker_threads import Workers
from kv_events.engine_wire import LiveMessage
from kv_events.memory_log import MemoryLog
from kv_events.schema import ENGINE_UNHEARD
from kv_events.streams import StreamId
from publisher import PublisherSettings
from publisher.sinks import MemorySink
from tests.support.bridge.rig import GPU, View, on
from tests.support.engines.event_payloads import names_of, payload, stored
from tests.support.waiting import async_wait_until

PAGE = on(GPU, names_of([1, 2, 3, 4]))


async def test_a_connection_that_was_back_before_anybody_saw_it_go_is_not_taken_for_unbroken() -> None:
    log, view = MemoryLog(), View()
    template = PublisherSettings(model="-", worker="-", block_size=1, ledger_pages=10_000)
    registry = StreamRegistry(BridgeSettings(), template, SharedSink(MemorySink(log)))
    stream = StreamId("m", "default", "w", 0)
    source = Source(stream, Unsaid(4), registry, Decoder(), BridgeCounters(), None, Workers())

    def shown() -> tuple[object, ...]:
        for record in log.read(0):
            view.read(record.payload)
        return view.pages, view.doubt

    source.hear(True)
    await source.take_live([LiveMessage("", 0, payload(stored([1], [1, 2, 3, 4])))])
    await async_wait_until(lambda: shown() == (PAGE, ""))
    await source.reconnected()
    await async_wait_until(lambda: shown() == (set(), ENGINE_UNHEARD))
    await source.close(1.0, clear=False)
