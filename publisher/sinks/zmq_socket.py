"""The sockets of the engines' event protocol: live batches, and replays of those that are kept."""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Literal

import zmq
import zmq.asyncio

from kv_events.engine_wire import END, FrameError, is_ipv6, parse_replay_request, seq_frame
from kv_events.runtime.outages import RateLimitedLogger
from kv_events.runtime.supervised import cancel, keep_running
from publisher.sinks.base import SinkUnavailableError

logger = logging.getLogger(__name__)

_LINGER_MS = 500
_MAX_UNREAD = 100_000
"""Batches that may wait for a slow reader. It misses later ones and can request a replay."""
_MAX_KEPT_BYTES = 256 * 2**20
"""Limit on the bytes kept, in addition to the number of batches."""
_MAX_REQUEST_BYTES = 1024
_MAX_READERS = 64
"""Maximum number of concurrent answers."""
_IN_FLIGHT_BYTES = 4 * 2**20
"""Queue of one reader, in batches of the largest size."""
_BATCHES_AT_A_TIME = 64
_FULL_PAUSE_MS = 5
_STUCK_S = 30.0


class KeptBatches:
    """The newest batches by number. Numbers start at 0 and continue when sockets are reopened."""

    def __init__(self, most: int, stand_in: bytes | None = None) -> None:
        """stand_in: sent in place of each batch that is no longer kept. None: answers begin with the oldest one."""
        self._most = most
        self._stand_in = stand_in
        self._batches: dict[int, bytes] = {}
        self._num_bytes = 0
        self._oldest = 0
        self._next = 0

    def keep(self, payload: bytes) -> int:
        """Keep a batch as long as there is room. Returns its number."""
        seq = self._next
        self._batches[seq] = payload
        self._num_bytes += len(payload)
        self._next += 1
        while len(self._batches) > self._most or self._num_bytes > _MAX_KEPT_BYTES:
            self._num_bytes -= len(self._batches.pop(self._oldest))
            self._oldest += 1
        return seq

    @property
    def newest(self) -> tuple[int, bytes]:
        """Number and content of the batch that was kept last."""
        return self._next - 1, self._batches[self._next - 1]

    def since(self, start: int, at_most: int) -> list[tuple[int, bytes]]:
        """Return number and content of the first batches that are kept from `start`."""
        first = max(start, self._oldest) if self._stand_in is None else start
        numbers = range(first, min(first + at_most, self._next))
        return [(seq, payload) for seq in numbers if (payload := self._batches.get(seq, self._stand_in)) is not None]


@dataclass(slots=True)
class _Answer:
    """An answer to one reader."""

    position: int
    """Number of the next batch."""
    last_progress_at: float
    next_start: int | None = None
    """Start of the reader's newest later request, which is served after this one."""


class ReplaySocket:
    """Owns the socket and the task that answers. Waits for slow readers within limits of memory and time, without
    delaying other readers.
    """

    def __init__(
        self, endpoint: str, kept: KeptBatches, topic: str, layout: Literal["old", "new"], batch_bytes: int
    ) -> None:
        """layout: of answers; the old one has no topic. batch_bytes: size of the largest batches."""
        self.endpoint = endpoint
        self._kept = kept
        self._topic = topic.encode()
        self._layout = layout
        self._max_queued = max(2, _IN_FLIGHT_BYTES // batch_bytes)
        self._limited_logger = RateLimitedLogger(logger, f"replay {endpoint}")
        self._answers: dict[bytes, _Answer] = {}  # by reader, each of which has one connection
        self._router: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Bind and start to answer in the running event loop. Raises zmq.ZMQError."""
        self._router = router = zmq.asyncio.Socket(context, zmq.ROUTER)
        router.setsockopt(zmq.IPV6, is_ipv6(self.endpoint))
        # set before `close`: ZMQ would wait forever for unread data of readers that disconnected earlier
        router.setsockopt(zmq.LINGER, _LINGER_MS)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a reader that has disconnected, or has no room, is an error
        router.setsockopt(zmq.SNDHWM, self._max_queued)
        router.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
        router.bind(self.endpoint)
        name = f"zmq-replay:{self.endpoint}"
        self._task = asyncio.create_task(keep_running(lambda: self._run(router), name, logger), name=name)

    async def stop(self) -> None:
        """Allow half a second to transmit what was sent, then close. A second call does nothing."""
        task, self._task = self._task, None
        await cancel(task)
        router, self._router = self._router, None
        if router is not None:
            router.close()
        self._answers.clear()

    async def _run(self, router: zmq.asyncio.Socket) -> None:
        socket: zmq.Socket[bytes] = zmq.Socket.shadow(router)
        wait_ms: float | None = None
        while True:
            await router.poll(wait_ms)
            self._take_requests(socket)
            has_progress = [self._continue(socket, reader) for reader in list(self._answers)]
            wait_ms = 0 if any(has_progress) else _FULL_PAUSE_MS if self._answers else None
            await asyncio.sleep(0)

    def _take_requests(self, socket: zmq.Socket[bytes]) -> None:
        for _ in range(_MAX_READERS):
            try:
                reader, *frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                start = parse_replay_request(frames)
            except FrameError as error:
                self._limited_logger.warning("a request is not answered: %s", error)
            else:
                self._begin(reader, start)

    def _begin(self, reader: bytes, start: int) -> None:
        running = self._answers.get(reader)
        if running is not None:
            running.next_start = start
        elif len(self._answers) < _MAX_READERS:
            self._answers[reader] = _Answer(start, time.monotonic())
        else:
            self._limited_logger.warning("a request is ignored: %d readers are being answered", _MAX_READERS)

    def _continue(self, socket: zmq.Socket[bytes], reader: bytes) -> bool:
        """Send a part of an answer. Returns False if the reader has no room for any of it."""
        answer = self._answers[reader]
        before = answer.position
        try:
            is_done = self._send_some(socket, reader, answer)
        except zmq.Again:
            is_done = False
            if answer.position == before:
                if time.monotonic() - answer.last_progress_at > _STUCK_S:
                    self._limited_logger.warning("an answer is dropped: its reader stalled for %.0f s", _STUCK_S)
                    del self._answers[reader]
                return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # the reader has disconnected
                self._limited_logger.warning("an answer is dropped: %s", error)
            del self._answers[reader]
            return True
        answer.last_progress_at = time.monotonic()
        if is_done:
            del self._answers[reader]
            if answer.next_start is not None:
                self._begin(reader, answer.next_start)
        return True

    def _send_some(self, socket: zmq.Socket[bytes], reader: bytes, answer: _Answer) -> bool:
        """Send the next part of an answer. Returns whether it was the end. Raises zmq.Again if there is no room."""
        batches = self._kept.since(answer.position, _BATCHES_AT_A_TIME)
        for seq, payload in batches:
            self._send(socket, reader, self._topic, seq_frame(seq), payload)
            answer.position = seq + 1
        if not batches:
            self._send(socket, reader, b"", END, b"")
        return not batches

    def _send(self, socket: zmq.Socket[bytes], reader: bytes, topic: bytes, seq: bytes, payload: bytes) -> None:
        head = [reader, b""] if self._layout == "old" else [reader, b"", topic]
        socket.send_multipart([*head, seq, payload], zmq.NOBLOCK)


class EventSocket:
    """Sends batches as an engine does."""

    def __init__(
        self, endpoint: str, topic: str, kept: KeptBatches, replay: ReplaySocket | None, *, binds: bool
    ) -> None:
        """kept: gives each batch its number. replay: a socket for the same batches.

        binds: whether readers connect to the address. If not, the reader has bound it.
        """
        self.endpoint = endpoint
        self._topic = topic.encode()
        self._binds = binds
        self._kept = kept
        self._replay = replay
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._live: zmq.Socket[bytes] | None = None

    async def start(self) -> None:
        """Open both sockets. Raises SinkUnavailableError, also if an address is in use."""
        self._context = zmq.Context()
        try:
            self._live = self._context.socket(zmq.PUB)
            self._live.setsockopt(zmq.LINGER, _LINGER_MS)  # now: readers may leave before close
            self._live.setsockopt(zmq.SNDHWM, _MAX_UNREAD)
            self._live.setsockopt(zmq.IPV6, is_ipv6(self.endpoint))
            if self._binds:
                self._live.bind(self.endpoint)
            else:
                self._live.connect(self.endpoint)
            if self._replay is not None:
                self._replay.start(self._context)
        except zmq.ZMQError as error:
            await self.stop()
            replay = "none" if self._replay is None else self._replay.endpoint
            raise SinkUnavailableError(f"{self.endpoint}, replay {replay}: {error}") from error

    def check_open(self) -> None:
        """Raises SinkUnavailableError before `start` and after `stop`."""
        if self._live is None:
            raise SinkUnavailableError(f"{self.endpoint} is not open")

    def send(self, payload: bytes) -> None:
        """Keep a batch for replay, and pass it to ZMQ without waiting. The socket must be open."""
        self._send(self._kept.keep(payload), payload)

    def send_again(self) -> None:
        """Send the newest batch again, under its number."""
        self._send(*self._kept.newest)

    def _send(self, seq: int, payload: bytes) -> None:
        assert self._live is not None
        self._live.send_multipart([self._topic, seq_frame(seq), payload])

    async def stop(self) -> None:
        """Allow half a second to transmit what was sent, then close."""
        if self._replay is not None:
            await self._replay.stop()
        if self._live is not None:
            self._live.close()
        context, self._context, self._live = self._context, None, None
        if context is not None:
            await asyncio.to_thread(context.term)
