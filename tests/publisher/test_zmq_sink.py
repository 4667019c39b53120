"""The ZMQ sink on real sockets, read as readers of engines do."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import msgspec
import pytest
import zmq
import zmq.asyncio

from bridge import EngineSettings
from kv_events.errors import InvalidValueError
from kv_events.schema import AllBlocksCleared, BlockRemoved, BlockStored, StorageMedium
from publisher import EventPublisher, PublisherSettings, SinkRejectedError, SinkUnavailableError
from publisher.sinks.zmq import ZmqSink
from tests.rigs.bridge import CPU, GPU, LiveBridge, on
from tests.support.engines.event_payloads import names_of
from tests.support.servers.child_process import free_port, has_ipv6
from tests.support.waiting import async_wait_until

END = b"\xff" * 8


def settings_of(**more: Any) -> PublisherSettings:
    values = {"model": "m", "worker": "w", "block_size": 4, "with_tokens": True, "linger_ms": 1, "ledger_pages": 50_000}
    return PublisherSettings(**{**values, "zmq": f"tcp://127.0.0.1:{free_port()}", **more})


def bound(port: int) -> str:
    """An address that the sink binds."""
    return f"tcp://*:{port}"


@asynccontextmanager
async def open_socket(kind: int, *, connect: str = "", bind: str = "") -> AsyncIterator[zmq.asyncio.Socket]:
    context = zmq.asyncio.Context()
    socket = context.socket(kind)
    if kind == zmq.SUB:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
    if connect:
        socket.connect(connect)
    else:
        socket.bind(bind)
    yield socket
    context.destroy(linger=0)


async def received(socket: zmq.asyncio.Socket) -> list[bytes]:
    return await asyncio.wait_for(socket.recv_multipart(), 10)


async def replayed(endpoint: str, start: int) -> list[list[bytes]]:
    """All messages of an answer, up to its end marker."""
    async with open_socket(zmq.DEALER, connect=endpoint) as dealer:
        await dealer.send_multipart([b"", start.to_bytes(8, "big")])
        answer = [await received(dealer)]
        while END not in answer[-1][-2:]:
            answer.append(await received(dealer))
        return answer


@asynccontextmanager
async def publishing(settings: PublisherSettings) -> AsyncIterator[tuple[EventPublisher, ZmqSink]]:
    sink = ZmqSink(settings)
    async with EventPublisher(settings, sink) as publisher:
        yield publisher, sink


def store(number: int, medium: StorageMedium = StorageMedium.GPU) -> BlockStored:
    return BlockStored([number], None, prompt(number), 4, medium=medium)


def prompt(number: int) -> list[int]:
    return [1000 + number] * 4


def name(number: int) -> int:
    return names_of(prompt(number))[0]


def delivered(publisher: EventPublisher) -> Callable[[], bool]:
    """Whether everything went out."""
    return lambda: publisher.stats().next_seq > 0 and not any(publisher.stats()[:2])


async def test_a_reader_that_binds_gets_topic_number_and_batch() -> None:
    settings = settings_of(zmq_topic="kv@w@m")
    assert settings.zmq is not None
    async with open_socket(zmq.SUB, bind=settings.zmq) as reader:
        sink = ZmqSink(settings)
        publisher = EventPublisher(settings, sink)
        await sink.start()
        await sink.send(publisher.take_records(1e9, force=True))
        number = 0
        while not await reader.poll(20):  # messages that are sent before the subscription arrives are lost
            number += 1
            publisher.publish([store(number)])
            await sink.send(publisher.take_records(1e9, force=True))
        topic, seq, payload = await received(reader)
        assert (topic, len(seq)) == (b"kv@w@m", 8)
        assert msgspec.msgpack.decode(payload)[1] == [
            ["BlockStored", [name(n)], None, prompt(n), 4, None, "GPU"] for n in [int.from_bytes(seq, "big")]
        ]
        await sink.stop()


@pytest.mark.parametrize("layout", ["old", "new"])
async def test_a_replay_answers_from_a_number_on_and_marks_its_end(layout: Literal["old", "new"]) -> None:
    port = free_port()
    settings = settings_of(zmq_replay=f"tcp://127.0.0.1:{port}", zmq_replay_layout=layout, zmq_topic="t")
    async with publishing(settings) as (publisher, _):
        for number in range(5):
            publisher.publish([store(number)])
            await async_wait_until(delivered(publisher))
        *batches, end = await replayed(f"tcp://127.0.0.1:{port}", 2)
        topic, nothing = ([b"t"], [b""]) if layout == "new" else ([], [])
        assert end == [b"", *nothing, END, b""]
        first, last = batches[0], batches[-1]
        assert first[:-1] == [b"", *topic, (2).to_bytes(8, "big")]
        assert msgspec.msgpack.decode(last[-1])[1][-1][1] == [name(4)]
        assert len(await replayed(f"tcp://127.0.0.1:{port}", 1_000)) == 1


async def test_only_the_newest_batches_are_kept_and_an_odd_request_is_left_unanswered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("publisher.sinks.zmq._MAX_KEPT", 3)
    port = free_port()
    settings = settings_of(zmq_replay=f"tcp://127.0.0.1:{port}")
    async with publishing(settings) as (publisher, _):
        for number in range(10):
            publisher.publish([store(number)])
            await async_wait_until(delivered(publisher))
        async with open_socket(zmq.DEALER, connect=f"tcp://127.0.0.1:{port}") as dealer:
            await dealer.send_multipart([b"", b"too short"[:3]])
            await dealer.send_multipart([b""])
        answer = await replayed(f"tcp://127.0.0.1:{port}", 0)
        numbers = [int.from_bytes(message[-2], "big") for message in answer[:-1]]
        assert len(numbers) == 3
        assert numbers == list(range(numbers[0], numbers[0] + 3))
        assert numbers[0] > 0


async def test_ranks_have_ports_of_their_own() -> None:
    port = free_port()
    settings = settings_of(dp_rank=2, zmq=bound(free_port()), zmq_replay=f"tcp://127.0.0.1:{port - 2}")
    async with publishing(settings) as (publisher, _):
        await async_wait_until(delivered(publisher))
        batches = await replayed(f"tcp://127.0.0.1:{port}", 0)
        assert msgspec.msgpack.decode(batches[0][-1])[1:] == [[["AllBlocksCleared"]], 2]


@pytest.mark.parametrize("encoding", ["array", "map"])
async def test_a_bridge_that_came_late_and_is_slow_knows_what_the_worker_holds(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    monkeypatch.setattr("publisher.sinks.zmq_socket._MAX_UNREAD", 2)
    port, replay = free_port(), free_port()
    settings = settings_of(
        zmq=bound(port), zmq_replay=bound(replay), zmq_encoding=encoding, batch_pages=20, batch_bytes=4096
    )
    async with publishing(settings) as (publisher, _), LiveBridge(bridge_idle_check_s=0.1) as bridge:
        publisher.publish([store(number) for number in range(500)])
        await async_wait_until(delivered(publisher))
        engine: dict[str, Any] = {"endpoint": f"tcp://127.0.0.1:{port}", "replay_endpoint": f"tcp://127.0.0.1:{replay}"}
        await bridge.fleet.add(EngineSettings(worker="w", model="m", **engine))
        await bridge.shows(on(GPU, [name(number) for number in range(500)]))
        for start in range(500, 5000, 500):
            publisher.publish([store(number) for number in range(start, start + 500)])
        publisher.publish([BlockRemoved([number]) for number in range(0, 5000, 2)])
        publisher.publish([store(1, StorageMedium.CPU)])
        await bridge.shows(on(GPU, [name(number) for number in range(1, 5000, 2)]) | on(CPU, [name(1)]))
        publisher.publish([AllBlocksCleared()])
        await bridge.shows(set())
        assert bridge.counters()["losses"] == 0


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
async def test_a_bridge_reads_it_over_ipv6() -> None:
    port, replay = free_port(), free_port()
    settings = settings_of(zmq=f"tcp://[::]:{port}", zmq_replay=f"tcp://[::1]:{replay}")
    async with publishing(settings) as (publisher, _), LiveBridge(bridge_idle_check_s=0.1) as bridge:
        publisher.publish([store(0)])
        await async_wait_until(delivered(publisher))
        engine: dict[str, Any] = {"endpoint": f"tcp://[::1]:{port}", "replay_endpoint": f"tcp://[::1]:{replay}"}
        await bridge.fleet.add(EngineSettings(worker="w", model="m", **engine))
        await bridge.shows(on(GPU, [name(0)]))
        publisher.publish([store(1)])
        await bridge.shows(on(GPU, [name(0), name(1)]))


async def test_an_address_in_use_is_unavailable_until_it_is_free() -> None:
    settings = settings_of(zmq=bound(free_port()))
    first, second = ZmqSink(settings), ZmqSink(settings)
    await first.start()
    with pytest.raises(SinkUnavailableError, match="Address already in use"):
        await second.start()
    await first.stop()
    await second.start()
    await second.stop()


async def test_stopping_twice_or_unstarted_is_harmless_and_a_closed_one_is_unavailable() -> None:
    sink = ZmqSink(settings_of(zmq_replay="inproc://replay"))
    await sink.stop()
    await sink.start()
    await sink.stop()
    await sink.stop()
    with pytest.raises(SinkUnavailableError, match="not open"):
        await sink.send([])


async def test_records_of_another_stream_and_no_records_are_rejected() -> None:
    settings = settings_of(zmq="inproc://live")
    sink = ZmqSink(settings)
    await sink.start()
    [record] = EventPublisher(settings, sink).take_records(1e9, force=True)
    for bad in (record._replace(key=b"another"), record._replace(payload=b"\xc1")):
        with pytest.raises(SinkRejectedError):
            await sink.send([bad])
    await sink.send([record])
    await sink.stop()


@pytest.mark.parametrize(
    ("more", "variable"),
    [
        ({"with_tokens": False}, "KVSIGHT_WITH_TOKENS"),
        ({"zmq": None}, "KVSIGHT_ZMQ"),
        ({"dp_rank": 1, "zmq": "tcp://*:65535"}, "KVSIGHT_ZMQ"),
        ({"dp_rank": 1, "zmq_replay": "ipc://x"}, "KVSIGHT_ZMQ_REPLAY"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(more: dict[str, Any], variable: str) -> None:
    with pytest.raises(InvalidValueError, match=variable):
        ZmqSink(settings_of(**more))
