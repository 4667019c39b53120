"""Replays of the ZMQ sink: readers that stall, ask twice or leave do not affect the worker and other readers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest
import zmq
import zmq.asyncio

from kv_events.log.memory import MemoryLog
from kv_events.schema import BlockStored
from publisher import EventPublisher, OutRecord, PublisherSettings
from publisher.sinks.memory import MemorySink
from publisher.sinks.zmq import ZmqSink
from publisher.sinks.zmq_socket import KeptBatches
from tests.support.servers.child_process import free_port
from tests.support.waiting import async_wait_until

END = b"\xff" * 8
BLOCK_SIZE, PAGES_A_BATCH = 1024, 50


def settings_of(port: int) -> PublisherSettings:
    return PublisherSettings(
        model="m",
        worker="w",
        block_size=BLOCK_SIZE,
        with_tokens=True,
        ledger_pages=10_000,
        zmq="inproc://live",
        zmq_replay=f"tcp://127.0.0.1:{port}",
    )


def large_record(settings: PublisherSettings) -> OutRecord:
    """Of about 200 KiB."""
    publisher = EventPublisher(settings, MemorySink(MemoryLog()))
    tokens = list(range(100_000, 100_000 + BLOCK_SIZE * PAGES_A_BATCH))
    publisher.publish([BlockStored(list(range(PAGES_A_BATCH)), None, tokens, BLOCK_SIZE)])
    return publisher.take_records(1e9, force=True)[-1]


class Readers:
    """Of one replay socket."""

    def __init__(self, port: int) -> None:
        self._context = zmq.asyncio.Context()
        self._endpoint = f"tcp://127.0.0.1:{port}"
        self._open: list[zmq.asyncio.Socket] = []

    def open(self) -> zmq.asyncio.Socket:
        """A reader with almost no receive buffer."""
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVHWM, 1)
        dealer.setsockopt(zmq.RCVBUF, 4096)
        dealer.connect(self._endpoint)
        self._open.append(dealer)
        return dealer

    def close(self) -> None:
        self._context.destroy(linger=0)


@asynccontextmanager
async def sink_with(num_batches: int) -> AsyncIterator[tuple[ZmqSink, Readers]]:
    """A sink that keeps this number of large batches."""
    port = free_port()
    settings = settings_of(port)
    record = large_record(settings)
    sink, readers = ZmqSink(settings), Readers(port)
    await sink.start()
    try:
        for _ in range(num_batches):
            await sink.send([record])
            await asyncio.sleep(0)
        yield sink, readers
    finally:
        readers.close()
        await sink.stop()


async def ask(reader: zmq.asyncio.Socket, start: int) -> None:
    await reader.send_multipart([b"", start.to_bytes(8, "big")])


async def answer(reader: zmq.asyncio.Socket) -> list[int]:
    """Return the numbers of the batches up to the end marker."""
    numbers: list[int] = []
    while True:
        seq = (await asyncio.wait_for(reader.recv_multipart(), 10))[-2]
        if seq == END:
            return numbers
        numbers.append(int.from_bytes(seq, "big"))


async def test_readers_that_ask_and_do_not_read_cost_a_bounded_amount_of_memory() -> None:
    async with sink_with(num_batches=120) as (_, readers):
        first = readers.open()
        await ask(first, 0)
        assert await answer(first) == list(range(120))
        before = psutil.Process().memory_info().rss
        for _ in range(3):
            idle = readers.open()
            for _ in range(3):
                await ask(idle, 0)
        await ask(first, 0)
        assert await answer(first) == list(range(120))  # beside them
        assert psutil.Process().memory_info().rss - before < 40 * 2**20


async def test_a_reader_that_asks_again_is_answered_again_whole() -> None:
    async with sink_with(num_batches=60) as (_, readers):
        reader = readers.open()
        await ask(reader, 0)
        first = await asyncio.wait_for(reader.recv_multipart(), 10)
        await ask(reader, 55)
        assert first[-2] == bytes(8)
        assert await answer(reader) == list(range(1, 60))
        assert await answer(reader) == list(range(55, 60))


async def test_a_reader_that_leaves_in_the_middle_keeps_no_other_waiting(caplog: pytest.LogCaptureFixture) -> None:
    async with sink_with(num_batches=60) as (_, readers):
        leaving, staying = readers.open(), readers.open()
        await ask(leaving, 0)
        await asyncio.wait_for(leaving.recv_multipart(), 10)
        leaving.close(linger=0)
        await ask(staying, 0)
        assert await answer(staying) == list(range(60))
    assert not caplog.records


async def test_a_sink_stops_when_a_reader_left_its_answer_unread() -> None:
    async with sink_with(num_batches=60) as (sink, readers):
        leaving, staying = readers.open(), readers.open()
        await ask(leaving, 0)
        await asyncio.wait_for(leaving.recv_multipart(), 10)
        leaving.close(linger=0)
        for _ in range(5):  # time for the notification to arrive
            await ask(staying, 0)
            assert await answer(staying) == list(range(60))
        await asyncio.wait_for(sink.stop(), 10)


async def test_a_reader_that_is_stuck_is_abandoned_and_may_ask_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("publisher.sinks.zmq_socket._STUCK_S", 2.0)
    async with sink_with(num_batches=60) as (_, readers):
        reader = readers.open()
        await ask(reader, 0)
        await async_wait_until(lambda: "its reader stalled" in caplog.text)
        await ask(reader, 58)
        numbers = await answer(reader)
        assert numbers[-2:] == [58, 59]
        assert numbers[:-2] == list(range(len(numbers) - 2))


async def test_the_end_of_the_task_that_answers_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("the store is broken")

    async with sink_with(num_batches=1) as (_, readers):
        monkeypatch.setattr(KeptBatches, "since", failing)
        await ask(readers.open(), 0)
        await async_wait_until(lambda: "zmq-replay:tcp://" in caplog.text)
        assert "the store is broken" in caplog.text
