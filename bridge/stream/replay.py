"""Client of an engine's replay socket, which sends again the batches that the engine still keeps."""

import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress

import zmq
import zmq.asyncio

from bridge.decoding.decoder import MAX_PAYLOAD_BYTES
from bridge.stream.messages import Backlog, receiving
from kv_events import engine_wire
from kv_events.errors import KvsightError

MAX_MESSAGE_BYTES = 4 * MAX_PAYLOAD_BYTES
"""ZMQ drops the connection at a larger one. Above the payload limit, so that a payload too large is counted, not
fatal."""

_MAX_QUEUED = 100_000
_MAX_WAITING_BYTES = 64 * 2**20
_CONNECT_S = 1.0
_LOOK_S = 0.1


class ReplayError(KvsightError):
    """An answer was not complete in time, or is invalid."""


class ReplayUnreachableError(ReplayError):
    """There is no connection, so no request was sent."""


class ReplayCutError(KvsightError):
    """The answer arrived so fast that the rest was dropped. It can be asked for again."""


class ReplayInterruptedError(KvsightError):
    """A live message arrived while the replay was pending."""


class ReplayClient:
    """Requests replays from one engine. Each request has its own socket, so that answers never mix."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        timeout_s: float,
        locate: engine_wire.Locate = engine_wire.as_given,
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._locate = locate

    async def batches(
        self, start: int, deadline: float, live: Backlog | None = None
    ) -> AsyncGenerator[tuple[int, engine_wire.Payload], None]:
        """Yield the kept batches from `start` to the newest, numbers ascending. An answer may skip some.

        deadline: by `time.monotonic()`. live: a stream whose messages end the wait. Raises ReplayUnreachableError
        without a connection, ReplayError when nothing arrives within the timeout or the answer is longer than the
        deadline, ReplayInterruptedError when there is a connection, and `live` has a message and the replay none, and
        ReplayCutError when the caller was so slow that the rest of the answer was dropped.
        """
        try:
            address = await self._locate(self._endpoint)
        except engine_wire.LocateError as error:
            raise ReplayUnreachableError(str(error)) from None
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, engine_wire.is_ipv6(address))
            socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            await self._connect(socket, address, deadline)
            answer, last = _Answer(socket, start), -1
            while True:
                if not answer.frames:
                    if answer.is_cut:
                        raise ReplayCutError(self._endpoint)
                    if not await self._is_readable(socket, self._timeout_s, deadline, live):
                        raise ReplayError(f"{self._endpoint}: no message for {self._timeout_s:.1f} s")
                    answer.receive()
                    continue
                self._check_deadline(deadline)
                message = engine_wire.parse_replay(answer.next())
                if message is None:
                    return
                seq, _ = message
                if seq <= last:
                    raise ReplayError(f"{self._endpoint}: batch {seq} after batch {last}")
                last = seq
                with receiving(answer.receive):
                    yield message
        except (zmq.ZMQError, engine_wire.FrameError) as error:
            raise ReplayError(f"{self._endpoint}: {error}") from error
        finally:
            socket.close()

    async def _connect(self, socket: zmq.asyncio.Socket, address: str, deadline: float) -> None:
        """Wait for the connection by the socket's monitor, even if live messages arrive: whether there is one is shown.

        The option ZMQ_IMMEDIATE would be simpler, but with it libzmq aborts the process when the engine dies between
        the frames of a message.
        """
        wait_s = min(self._timeout_s, _CONNECT_S)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            socket.connect(address)
            if not await self._is_readable(monitor, wait_s, deadline, None):
                raise ReplayUnreachableError(f"{self._endpoint}: no connection for {wait_s:.1f} s")
        finally:
            socket.disable_monitor()
            monitor.close(linger=0)

    async def _is_readable(
        self, socket: zmq.asyncio.Socket, wait_s: float, deadline: float, live: Backlog | None
    ) -> bool:
        """Wait until the socket is readable. False if it is not in time."""
        self._check_deadline(deadline)
        until = min(time.monotonic() + wait_s, deadline)
        poller = zmq.asyncio.Poller()
        poller.register(socket, zmq.POLLIN)
        if live is not None:
            poller.register(live.socket, zmq.POLLIN)
        while True:
            left_s = max(until - time.monotonic(), 0.0)
            ready = dict(await poller.poll(int(1000 * (left_s if live is None else min(left_s, _LOOK_S))) + 1))
            if socket in ready or (not ready and not live and left_s == 0):
                return socket in ready
            if ready or live:
                raise ReplayInterruptedError(self._endpoint)

    def _check_deadline(self, deadline: float) -> None:
        if time.monotonic() >= deadline:
            raise ReplayError(f"{self._endpoint}: the answer does not end")


class _Answer:
    """Messages of an answer that wait for the caller, bounded in bytes."""

    def __init__(self, socket: zmq.asyncio.Socket, start: int) -> None:
        """Ask for the batches from `start`."""
        self.frames: deque[list[bytes]] = deque()
        self.is_cut = False
        self._socket = socket
        # a readable socket may be empty again once the engine has died, so reads must not block; waits have a limit
        self._reader: zmq.Socket[bytes] = zmq.Socket.shadow(socket)
        self._num_bytes = 0
        self._reader.send_multipart(engine_wire.replay_request(start), zmq.NOBLOCK)

    def receive(self) -> None:
        with suppress(zmq.Again):
            while not self.is_cut:
                self.frames.append(self._reader.recv_multipart(zmq.NOBLOCK))
                self._num_bytes += sum(map(len, self.frames[-1]))
                if self._num_bytes > _MAX_WAITING_BYTES:
                    self._socket.close()
                    self.is_cut = True

    def next(self) -> list[bytes]:
        frames = self.frames.popleft()
        self._num_bytes -= sum(map(len, frames))
        return frames
