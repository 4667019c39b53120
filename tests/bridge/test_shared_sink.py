"""One sink for many publishers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

import pytest

from bridge.shared_sink import SharedSink
from kv_events.runtime.outages import Outage
from kv_events.schema import ResyncRequest
from kv_events.streams import StreamId
from publisher.sinks import OutRecord, SinkRejectedError, SinkUnavailableError
from tests.support.waiting import async_wait_until

ONE, TWO = StreamId("m", "t", "one", 0), StreamId("m", "t", "two", 0)


class GatedSink:
    """Accepts records while the gate is open, and refuses some."""

    def __init__(self) -> None:
        self.outage = Outage(logging.getLogger(__name__), "down", "up")
        self.calls: list[list[bytes]] = []
        self.refused: set[bytes] = set()
        self.broken: set[bytes] = set()
        self.stuck: set[bytes] = set()
        self.failures_of_requests = 0
        self.is_away = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.starts = self.stops = 0
        self.to_pass_on: asyncio.Queue[ResyncRequest] = asyncio.Queue()

    async def start(self) -> None:
        self.starts += 1
        if self.is_away:
            raise SinkUnavailableError("away")

    async def send(self, records: Sequence[OutRecord]) -> None:
        self.calls.append([record.payload for record in records])
        await self.gate.wait()
        if self.is_away:
            raise SinkUnavailableError("away")
        if self.stuck & set(self.calls[-1]):
            await asyncio.Event().wait()
        if self.broken & set(self.calls[-1]):
            raise RuntimeError("broken")
        if self.refused & set(self.calls[-1]):
            raise SinkRejectedError("refused")

    async def stop(self) -> None:
        self.stops += 1

    async def requests(self) -> AsyncIterator[ResyncRequest]:
        if self.failures_of_requests:
            self.failures_of_requests -= 1
            raise RuntimeError("broken")
        while True:
            yield await self.to_pass_on.get()


def record(payload: bytes) -> list[OutRecord]:
    return [OutRecord(b"key", payload, 0, 1)]


async def test_it_is_started_once_and_stopped_by_its_owner_alone() -> None:
    sink = GatedSink()
    shared = SharedSink(sink)
    sinks = [shared.sink_of(ONE), shared.sink_of(TWO)]
    sink.is_away = True
    with pytest.raises(SinkUnavailableError):
        await sinks[0].start()
    sink.is_away = False
    await asyncio.gather(*(own.start() for own in sinks))
    for own in sinks:
        await own.stop()
    assert (sink.starts, sink.stops) == (2, 0)
    await shared.stop()
    assert sink.stops == 1


async def test_waiting_changes_are_sent_together() -> None:
    sink = GatedSink()
    shared = SharedSink(sink)
    own = shared.sink_of(ONE)
    sink.gate.clear()
    sending = [asyncio.ensure_future(own.send(record(payload))) for payload in (b"a", b"b", b"c")]
    await async_wait_until(lambda: sink.calls)
    await asyncio.sleep(0)
    sink.gate.set()
    await asyncio.gather(*sending)
    assert sink.calls == [[b"a", b"b", b"c"]] or sink.calls == [[b"a"], [b"b", b"c"]]


async def test_a_record_that_is_refused_concerns_its_publisher_alone() -> None:
    sink = GatedSink()
    shared = SharedSink(sink)
    sink.refused = {b"b"}
    sending = [
        shared.sink_of(stream).send(record(payload)) for stream, payload in ((ONE, b"a"), (TWO, b"b"), (ONE, b"c"))
    ]
    results = await asyncio.gather(*sending, return_exceptions=True)
    assert [type(result) for result in results] == [type(None), SinkRejectedError, type(None)]


async def test_what_is_not_delivered_is_never_taken_for_it_whatever_the_sink_raises() -> None:
    sink = GatedSink()
    shared = SharedSink(sink)
    sink.gate.clear()
    first = asyncio.ensure_future(shared.sink_of(ONE).send(record(b"a")))
    await async_wait_until(lambda: sink.calls)
    sink.broken = {b"b"}
    sending = [asyncio.ensure_future(shared.sink_of(TWO).send(record(payload))) for payload in (b"b", b"c")]
    await asyncio.sleep(0)
    sink.gate.set()
    results = await asyncio.gather(first, *sending, return_exceptions=True)
    assert [type(result) for result in results] == [type(None), RuntimeError, type(None)]
    assert sink.calls == [[b"a"], [b"b", b"c"], [b"b"], [b"c"]]


async def test_a_cancelled_sender_fails_the_calls_that_it_sent_for() -> None:
    sink = GatedSink()
    shared = SharedSink(sink)
    sink.gate.clear()
    first = asyncio.ensure_future(shared.sink_of(ONE).send(record(b"a")))
    await async_wait_until(lambda: sink.calls)
    sink.stuck = {b"b"}
    sender, other = (asyncio.ensure_future(shared.sink_of(TWO).send(record(payload))) for payload in (b"b", b"c"))
    await asyncio.sleep(0)
    sink.gate.set()
    await first
    await async_wait_until(lambda: sink.calls[1:] == [[b"b", b"c"]])
    sender.cancel()
    with pytest.raises(SinkUnavailableError):
        await other


async def test_requests_are_read_again_after_a_failure() -> None:
    sink = GatedSink()
    sink.failures_of_requests = 1
    shared = SharedSink(sink)
    own = shared.sink_of(ONE)
    await own.start()
    sink.to_pass_on.put_nowait(ResyncRequest(ONE.key, 5))
    assert await asyncio.wait_for(anext(own.requests()), 10) == ResyncRequest(ONE.key, 5)
    await shared.stop()


async def test_when_the_sink_is_away_all_hear_of_it() -> None:
    sink = GatedSink()
    shared = SharedSink(sink)
    sink.is_away = True
    sending = [shared.sink_of(ONE).send(record(payload)) for payload in (b"a", b"b")]
    results = await asyncio.gather(*sending, return_exceptions=True)
    assert [type(result) for result in results] == [SinkUnavailableError] * 2


async def test_a_sender_that_is_cancelled_does_not_take_the_others_along() -> None:
    sink = GatedSink()
    shared = SharedSink(sink)
    sink.gate.clear()
    first = asyncio.ensure_future(shared.sink_of(ONE).send(record(b"a")))
    await async_wait_until(lambda: sink.calls)
    second = asyncio.ensure_future(shared.sink_of(TWO).send(record(b"b")))
    await asyncio.sleep(0)
    first.cancel()
    sink.gate.set()
    await second
    assert sink.calls == [[b"a"], [b"b"]]


async def test_a_request_reaches_the_newest_publisher_of_its_stream() -> None:
    sink = GatedSink()
    shared = SharedSink(sink)
    old, new, other = shared.sink_of(ONE), shared.sink_of(ONE), shared.sink_of(TWO)
    await new.start()
    await old.stop()
    request = ResyncRequest(ONE.key, 5)
    sink.to_pass_on.put_nowait(ResyncRequest("unknown", 1))
    sink.to_pass_on.put_nowait(request)
    assert await asyncio.wait_for(anext(new.requests()), 5) == request
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(other.requests()), 0.01)
    await shared.stop()
