"""ZMQ messages: frames, topics, replay answers, and replay requests to kvsight's sink."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import zmq
import zmq.asyncio

from bridge import BridgeSettings, EngineSettings, Fleet
from bridge.context import BridgeCounters
from bridge.decoding.decoder import Messages
from bridge.settings import EngineDefaults
from bridge.stream.engine_stream import EngineStream
from bridge.stream.messages import Inbox
from bridge.stream.rank_streams import RankStreams
from bridge.stream.subscriber import ConnectionState
from kv_events.engine_wire import FrameError, Payload, parse_replay
from kv_events.log.memory import MemoryLog
from publisher.sinks.memory import MemorySink
from publisher.sinks.zmq_socket import KeptBatches, ReplaySocket
from tests.fuzz.engine_inputs import PAYLOADS, STREAM, small_publisher, small_registry
from tests.support.engines.event_payloads import payload, stored
from tests.support.engines.inboxes import of_protocol, received
from tests.support.engines.zmq_engine import END, ZmqEngine
from tests.support.servers.child_process import free_port
from tests.support.waiting import async_wait_until


class _ScriptedReplay:
    """A stand-in for a replay socket, because a real one needs a millisecond for each answer."""

    def __init__(self, messages: list[tuple[int, bytes]]) -> None:
        self._messages = messages

    async def batches(
        self, start: int, deadline: float, live: object = None
    ) -> AsyncGenerator[tuple[int, Payload], None]:
        for message in self._messages:
            if message[0] < 0:  # stands for the end
                return
            yield message


def _frames(data: bytes) -> list[bytes]:
    """Split bytes into frames, each preceded by a length of three bytes."""
    frames: list[bytes] = []
    while len(data) >= 3 and len(frames) < 8:
        length = int.from_bytes(data[:3], "little")
        frames.append(data[3 : 3 + length])
        data = data[3 + length :]
    return frames


def _joined(*frames: bytes) -> bytes:
    return b"".join(len(frame).to_bytes(3, "little") + frame for frame in frames)


class FramesTarget:
    """Messages of a publisher, received together, and a replay answer."""

    def __init__(self) -> None:
        self._inbox = Inbox()

    def __call__(self, data: bytes) -> None:
        frames = _frames(data)
        with contextlib.suppress(FrameError):
            parse_replay(frames)
        messages = [frames[:3], frames[3:6], frames[6:], frames, [b"kv@w@m", bytes(8), b"last"]]
        sent = [message for message in messages if message]
        with zmq.Context() as context, context.socket(zmq.PAIR) as sender, context.socket(zmq.PAIR) as reader:
            sender.bind("inproc://frames")
            reader.connect("inproc://frames")
            for with_topics in (False, True):
                for message in sent:
                    sender.send_multipart(message)
                found = received(self._inbox, reader, with_topics=with_topics)
                assert found == of_protocol(sent, with_topics=with_topics)


class ReplayTarget:
    """Live batches and replay answers of one engine, by sequence number."""

    def __call__(self, data: bytes) -> None:
        asyncio.run(self._run(_frames(data)))

    async def _run(self, frames: list[bytes]) -> None:
        messages = [(int.from_bytes(frame[:1], "big", signed=True), frame[1:]) for frame in frames if frame]
        replay: Any = _ScriptedReplay(messages[len(messages) // 2 :])
        registry = small_registry()
        ranks = RankStreams(STREAM, EngineDefaults(block_size=4), registry, BridgeCounters())
        engine_stream = EngineStream(ranks, registry.threads, BridgeCounters(), replay)
        await engine_stream.open()
        for seq, content in messages[: len(messages) // 2]:
            await engine_stream.take_live(Messages.of([(abs(seq), content)]))
        await engine_stream.ranks.close(0.0, clear=True)
        registry.threads.close()


NUMBERED = [
    _joined(*(bytes([seq]) + part for seq, part in zip((0, 1, 1, 3, 0, 2, 4, 255), PAYLOADS * 2, strict=False)))
]
FRAMES = [_joined(b"", bytes(8), PAYLOADS[0]), _joined(b"\0" * 5, b"", b"\xff" * 8, b"")]


def run_messages(data: bytes) -> None:
    """Send the bytes to a bridge on an address where topics identify the workers."""
    frames = _frames(data)
    asyncio.run(_receive([part for part in (frames[:3], frames[3:6], frames[6:]) if part]))


async def _receive(messages: list[list[bytes]]) -> None:
    """Send a valid message after them, which shows whether the bridge still works."""
    settings = BridgeSettings.ignoring_environment(bridge_name_pages=4096, bridge_max_workers=2, bridge_away_s=1e-6)
    address = f"tcp://127.0.0.1:{free_port()}"
    async with Fleet(settings, small_publisher(1), MemorySink(MemoryLog())) as fleet:
        await fleet.add(EngineSettings(endpoint=address, bind=True))
        await asyncio.sleep(0)  # the bridge has bound its address, so the engine connects at once
        with ZmqEngine(replay=False, connect_to=address, topic="kv@known@m") as engine:
            await asyncio.to_thread(engine.wait_for_readers)
            for message in messages:
                engine.send_raw(*message)
            engine.send(payload(stored([1], [1, 2, 3, 4])))
            await async_wait_until(lambda: "known" in _workers_of(fleet), 30)
            assert fleet.status()[0].state is ConnectionState.CONNECTED


def _workers_of(fleet: Fleet) -> set[str]:
    return {stream.stream.worker for stream in fleet.status()[0].streams if stream.pages_held}


TOPICS = [
    _joined(topic, number.to_bytes(8, "big"), PAYLOADS[0])
    for topic in (b"kv@10.0.0.1:80@m", b"pod", b"kv@@m", b"kv@w@", b"kv@" + b"w" * 300 + b"@m", b"\xff@a@b@c")
    for number in (0, 2**64 - 1)
]


_NUM_KEPT = 5
REQUESTS = [_joined(b"", start.to_bytes(8, "big")) for start in (0, 7, 2**64 - 1)]


def run_request(data: bytes) -> None:
    """Send the bytes as a request to a sink's replay socket that keeps a few batches."""
    asyncio.run(_ask(_frames(data) or [b""]))


async def _ask(request: list[bytes]) -> None:
    """Check that a valid request is answered, even after an invalid one."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    kept = KeptBatches(_NUM_KEPT)
    for _ in range(2 * _NUM_KEPT):
        kept.keep(b"batch")
    replay = ReplaySocket(endpoint, kept, "", "new", 2**16)
    with (
        zmq.Context() as context,
        zmq.asyncio.Context() as readers_context,
        readers_context.socket(zmq.DEALER) as reader,
    ):
        replay.start(context)
        reader.connect(endpoint)
        await reader.send_multipart(request)
        if max(map(len, request)) > 1024:  # closes the connection
            reader.disconnect(endpoint)
            reader.connect(endpoint)
        elif len(request) == 2 and len(request[1]) == 8:
            assert await _answer(reader) == _kept_since(int.from_bytes(request[1], "big"))
        await reader.send_multipart([b"", bytes(8)])
        assert await _answer(reader) == _kept_since(0)
        reader.close(linger=0)
        await replay.stop()


def _kept_since(start: int) -> list[int]:
    return list(range(max(start, _NUM_KEPT), 2 * _NUM_KEPT))


async def _answer(dealer: zmq.asyncio.Socket) -> list[int]:
    numbers: list[int] = []
    while (seq := (await asyncio.wait_for(dealer.recv_multipart(), 5))[-2]) != END:
        numbers.append(int.from_bytes(seq, "big"))
    return numbers
