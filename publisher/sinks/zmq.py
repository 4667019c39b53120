"""Sink of the other direction: readers of the engines' own ZMQ protocol, as NVIDIA Dynamo's indexer or llm-d's.

The protocol knows no acknowledgement and no way back: who is not there, or too slow, misses batches, and may have them
replayed for as long as they are kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence

import msgspec
import zmq
import zmq.asyncio

from kv_events.errors import InvalidValueError
from kv_events.schema import ResyncRequest
from publisher.bridge.frames import endpoint_of_rank, is_ours_to_bind
from publisher.settings import PublisherSettings
from publisher.sinks.base import OutRecord, SinkRejectedError, SinkUnavailableError
from publisher.sinks.engine_events import EngineEvents

log = logging.getLogger(__name__)

_SEQ_BYTES = 8
_END = b"\xff" * _SEQ_BYTES
_MAX_BUFFER_BYTES = 256 * 2**20
"""Bound on what is kept for replay, besides the number of batches."""
_MAX_REQUEST_BYTES = 1024
_ANSWERS_AT_A_TIME = 64
_LINGER_MS = 500
_IN_ONE_PLACE = ("ipc://", "inproc://")


class ZmqSink:
    """Publishes one stream: topic, number, batch. The number begins with 0 and belongs to this object.

    Needs `with_tokens`, because readers name pages by their tokens. As engines do, it binds an address that has a
    wildcard for its host, or is of `ipc` or `inproc`, and connects to any other, which the reader has bound then.
    """

    def __init__(self, settings: PublisherSettings) -> None:
        """Raises InvalidValueError."""
        if settings.zmq is None:
            raise InvalidValueError("KVSIGHT_ZMQ", None, "an address to publish on, as tcp://*:5557")
        if not settings.with_tokens:
            raise InvalidValueError("KVSIGHT_WITH_TOKENS", False, "true: readers of KVSIGHT_ZMQ name pages by tokens")
        self._settings = settings
        self._key = settings.stream.key.encode()
        self._endpoint = endpoint_of_rank(settings.zmq, settings.dp_rank, "KVSIGHT_ZMQ")
        self._replay_endpoint = None
        if settings.zmq_replay is not None:
            self._replay_endpoint = endpoint_of_rank(settings.zmq_replay, settings.dp_rank, "KVSIGHT_ZMQ_REPLAY")
        self._topic = settings.zmq_topic.encode()
        self._events = EngineEvents(settings.zmq_encoding)
        self._seq = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._untold_logged = 0
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._live: zmq.Socket[bytes] | None = None
        self._router: zmq.asyncio.Socket | None = None
        self._answering: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open both sockets; an address in use counts as unavailable."""
        self._context = zmq.Context()
        try:
            self._live = self._context.socket(zmq.PUB)
            self._live.setsockopt(zmq.SNDHWM, self._settings.zmq_hwm)
            if is_ours_to_bind(self._endpoint) or self._endpoint.startswith(_IN_ONE_PLACE):
                self._live.bind(self._endpoint)
            else:
                self._live.connect(self._endpoint)
            if self._replay_endpoint is not None:
                self._router = zmq.asyncio.Socket(self._context, zmq.ROUTER)
                self._start_answering(self._router, self._replay_endpoint)
        except zmq.ZMQError as error:
            await self.stop()
            raise SinkUnavailableError(f"{self._endpoint}, replay {self._replay_endpoint}: {error}") from error

    async def send(self, records: Sequence[OutRecord]) -> None:
        """Never waits: a batch is out once it is kept for replay and handed to ZMQ. Heartbeats have no counterpart."""
        if self._live is None:
            raise SinkUnavailableError(f"{self._endpoint} is not open")
        for record in records:
            if record.key != self._key:
                raise SinkRejectedError(f"record of {record.key!r}, this socket speaks for {self._key!r}")
            try:
                payload = self._events.encode(record.payload)
            except msgspec.DecodeError as error:
                raise SinkRejectedError(f"no record of ours: {error}") from error
            if payload is not None:
                self._live.send_multipart([self._topic, self._next(payload), payload])
        self._log_untold()

    async def stop(self) -> None:
        """Give what was sent half a second to leave, then close."""
        answering, self._answering = self._answering, None
        if answering is not None:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
        for socket in (self._live, self._router):
            if socket is not None:
                socket.close(linger=_LINGER_MS)
        context, self._context, self._live, self._router = self._context, None, None, None
        if context is not None:
            await asyncio.to_thread(context.term)

    async def requests(self) -> AsyncIterator[ResyncRequest]:
        """Waits for ever."""
        await asyncio.Event().wait()
        yield ResyncRequest("", 0)  # never reached; makes this a generator

    def _start_answering(self, router: zmq.asyncio.Socket, endpoint: str) -> None:
        # readers confirm what they read by halves of the mark: so a whole answer and its end always fit
        router.setsockopt(zmq.SNDHWM, 2 * (self._settings.zmq_buffer_steps + 1))
        router.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
        router.bind(endpoint)
        self._answering = asyncio.create_task(self._answer(router), name=f"zmq-replay:{self._settings.worker}")

    def _next(self, payload: bytes) -> bytes:
        """Number of a batch, which is kept from now on."""
        seq, self._seq = self._seq, self._seq + 1
        self._kept.append((seq, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > self._settings.zmq_buffer_steps or self._kept_bytes > _MAX_BUFFER_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])
        return seq.to_bytes(_SEQ_BYTES, "big")

    async def _answer(self, router: zmq.asyncio.Socket) -> None:
        """Serve replays, one reader after the other."""
        while True:
            try:
                frames = await router.recv_multipart()
                if len(frames) != 3 or len(frames[2]) != _SEQ_BYTES:
                    log.warning("replay of %s: a request of %d frames is left unanswered", self._endpoint, len(frames))
                    continue
                await self._replay(router, frames[0], int.from_bytes(frames[2], "big"))
            except zmq.ZMQError as error:
                log.warning("replay of %s: %s", self._endpoint, error)

    async def _replay(self, router: zmq.asyncio.Socket, reader: bytes, start: int) -> None:
        """All batches kept from `start` on, those that come meanwhile too, then the end marker."""
        position = start
        while part := self._kept_from(position):
            for seq, payload in part:
                await router.send_multipart(
                    self._answered(reader, self._topic, seq.to_bytes(_SEQ_BYTES, "big"), payload)
                )
            position = part[-1][0] + 1
            await asyncio.sleep(0)
        await router.send_multipart(self._answered(reader, b"", _END, b""))

    def _kept_from(self, start: int) -> list[tuple[int, bytes]]:
        """The next few batches that are kept."""
        if not self._kept:
            return []
        first = max(0, start - self._kept[0][0])
        return [self._kept[i] for i in range(first, min(first + _ANSWERS_AT_A_TIME, len(self._kept)))]

    def _answered(self, reader: bytes, topic: bytes, seq: bytes, payload: bytes) -> list[bytes]:
        if self._settings.zmq_replay_layout == "old":
            return [reader, b"", seq, payload]
        return [reader, b"", topic, seq, payload]

    def _log_untold(self) -> None:
        """Say so whenever the pages left out have doubled."""
        if self._events.num_untold > 2 * self._untold_logged:
            self._untold_logged = self._events.num_untold
            log.warning("%s: %d pages so far could not be told to readers", self._endpoint, self._untold_logged)
