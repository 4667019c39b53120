"""One sink for many publishers."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

import pytest

from bridge.shared_sink import SharedSink
from kv_events.runtime.outages import Outage
from kv_events.schema import ResyncRequest
from kv_events.streams import StreamId
from publisher.sinks.base import OutRecord, SinkRejectedError, SinkUnavailableError
from tests.support.waiting import async_wait_until

ONE, TWO = StreamId("m", "t", "one", 0), StreamId("m", "t", "two", 0)


class GatedSink:
    """Accepts records while the gate is open. A payload that is a key of `faults` raises, or waits forever for None."""

    def __init__(self) -> None:
        self.outage = Outage(logging.getLogger(__name__), "down", "up")
        self.calls: list[list[bytes]] = []
        self.faults: dict[bytes, Exception | None] = {}
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
        for payload in self.calls[-1]:
            if payload in self.faults:
                fault = self.faults[payload]
                if fault is not None:
                    raise fault
                await asyncio.Event().wait()

    async def stop(self) -> None:
        self.stops += 1

    async def requests(self) -> AsyncIterator[ResyncRequest]:
        if self.failures_of_requests:
            self.failures_of_requests -= 1
            raise RuntimeError("broken")
        while True:
            yield await self.to_pass_on.get()


@pytest.fixture
def sink() -> GatedSink:
    return GatedSink()


@pytest.fixture
def shared(sink: GatedSink) -> SharedSink:
    return SharedSink(sink)


def send(shared: SharedSink, stream: StreamId, payload: bytes) -> asyncio.Future[None]:
    return asyncio.ensure_future(shared.sink_of(stream).send([OutRecord(b"key", payload, 0, 1)]))


async def send_behind_the_gate(shared: SharedSink, sink: GatedSink, *payloads: bytes) -> list[asyncio.Future[None]]:
    """Send one record, which waits at the gate, and others of another stream, which wait for it."""
    sink.gate.clear()
    sending = [send(shared, ONE, payloads[0])]
    await async_wait_until(lambda: sink.calls)
    sending += [send(shared, TWO, payload) for payload in payloads[1:]]
    await asyncio.sleep(0)
    return sending


async def outcomes(sending: list[asyncio.Future[None]]) -> list[type]:
    return [type(result) for result in await asyncio.gather(*sending, return_exceptions=True)]


async def test_it_is_started_once_and_stopped_by_its_owner_alone(shared: SharedSink, sink: GatedSink) -> None:
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


async def test_records_that_wait_are_sent_together(shared: SharedSink, sink: GatedSink) -> None:
    sending = await send_behind_the_gate(shared, sink, b"a", b"b", b"c")
    sink.gate.set()
    await asyncio.gather(*sending)
    assert sink.calls == [[b"a"], [b"b", b"c"]]


@pytest.mark.parametrize("fault", [SinkRejectedError("refused"), RuntimeError("broken")])
async def test_a_record_that_is_refused_concerns_its_publisher_alone(
    shared: SharedSink, sink: GatedSink, fault: Exception
) -> None:
    sink.faults = {b"b": fault}
    sending = await send_behind_the_gate(shared, sink, b"a", b"b", b"c")
    sink.gate.set()
    assert await outcomes(sending) == [type(None), type(fault), type(None)]
    assert sink.calls == [[b"a"], [b"b", b"c"], [b"b"], [b"c"]]


async def test_when_the_sink_is_away_all_hear_of_it(shared: SharedSink, sink: GatedSink) -> None:
    sink.faults = {b"b": SinkUnavailableError("away")}
    sending = await send_behind_the_gate(shared, sink, b"a", b"b", b"c")
    sink.gate.set()
    assert await outcomes(sending) == [type(None), SinkUnavailableError, SinkUnavailableError]


async def test_a_cancelled_sender_fails_the_calls_that_it_sent_for(shared: SharedSink, sink: GatedSink) -> None:
    sink.faults = {b"b": None}
    first, sender, other = await send_behind_the_gate(shared, sink, b"a", b"b", b"c")
    sink.gate.set()
    await first
    await async_wait_until(lambda: sink.calls[1:] == [[b"b", b"c"]])
    sender.cancel()
    with pytest.raises(SinkUnavailableError):
        await other


async def test_a_sender_that_is_cancelled_does_not_keep_the_others_waiting(shared: SharedSink, sink: GatedSink) -> None:
    first, second = await send_behind_the_gate(shared, sink, b"a", b"b")
    first.cancel()
    sink.gate.set()
    await second
    assert sink.calls == [[b"a"], [b"b"]]


async def test_requests_are_read_again_after_a_failure_and_reach_the_newest_publisher_of_their_stream(
    shared: SharedSink, sink: GatedSink
) -> None:
    sink.failures_of_requests = 1
    old, new, other = shared.sink_of(ONE), shared.sink_of(ONE), shared.sink_of(TWO)
    await new.start()
    await old.stop()
    request = ResyncRequest(ONE.key, 5)
    sink.to_pass_on.put_nowait(ResyncRequest("unknown", 1))
    sink.to_pass_on.put_nowait(request)
    assert await asyncio.wait_for(anext(new.requests()), 10) == request
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(other.requests()), 0.01)
    await shared.stop()
