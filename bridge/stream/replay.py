"""The replay socket of an engine: batches that it still keeps."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

import zmq
import zmq.asyncio

from bridge.decoding.decoder import MAX_PAYLOAD_BYTES
from kv_events.endpoints import is_ipv6
from kv_events.engine_wire import FrameError, ReplayMessage, parse_replay, replay_request
from kv_events.errors import KvsightError

MAX_MESSAGE_BYTES = 4 * MAX_PAYLOAD_BYTES
"""Beyond it, ZMQ drops the connection. Larger than the largest payload, so that one too large is counted, not fatal."""

_MOST_QUEUED = 100_000
_CONNECT_S = 1.0


class ReplayError(KvsightError):
    """An answer did not come to its end in time, or makes no sense."""


class ReplayUnreachableError(ReplayError):
    """There is no connection: nobody was asked."""


class ReplayInterruptedError(KvsightError):
    """The engine spoke of itself while it was being asked."""


class ReplayClient:
    """Asks one engine. Each request has a socket of its own, so that no old answer can mix with a new one."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, timeout_s: float) -> None:
        self._context = context
        self._endpoint = endpoint
        self._timeout_s = timeout_s

    async def batches(
        self, start: int, deadline: float, live: zmq.asyncio.Socket | None = None
    ) -> AsyncGenerator[ReplayMessage, None]:
        """Kept batches from `start` on, their numbers rising, up to the newest; an answer may skip some.

        deadline: of `time.monotonic()`. Raises ReplayUnreachableError; ReplayError when nothing comes for the time-out,
        or the answer goes on beyond the deadline; ReplayInterruptedError when `live` has a message while none is here.
        """
        socket = self._context.socket(zmq.DEALER)
        # what a wait has found ready may be gone again when the engine dies: only waits wait, they end
        at_once: zmq.Socket[bytes] = zmq.Socket.shadow(socket)
        try:
            self._set_options(socket)
            await self._connect(socket, deadline, live)
            at_once.send_multipart(replay_request(start), zmq.NOBLOCK)
            last = -1
            while True:
                if not await self._comes(socket, self._timeout_s, deadline, live):
                    raise ReplayError(f"{self._endpoint}: nothing for {self._timeout_s:.1f} s")
                message = parse_replay(at_once.recv_multipart(zmq.NOBLOCK))
                if message.is_end:
                    return
                if message.seq <= last:
                    raise ReplayError(f"{self._endpoint}: batch {message.seq} after batch {last}")
                last = message.seq
                yield message
        except (zmq.ZMQError, FrameError) as error:
            raise ReplayError(f"{self._endpoint}: {error}") from error
        finally:
            socket.close()

    def _set_options(self, socket: zmq.asyncio.Socket) -> None:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, is_ipv6(self._endpoint))
        socket.setsockopt(zmq.RCVHWM, _MOST_QUEUED)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)

    async def _connect(self, socket: zmq.asyncio.Socket, deadline: float, live: zmq.asyncio.Socket | None) -> None:
        """Return when somebody is there. The socket's monitor tells: were it made to be ready only while connected
        (ZMQ_IMMEDIATE), libzmq would end the process when the engine dies while a message is read, frame by frame.
        """
        wait_s = min(self._timeout_s, _CONNECT_S)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            socket.connect(self._endpoint)
            if not await self._comes(monitor, wait_s, deadline, live):
                raise ReplayUnreachableError(f"{self._endpoint}: no connection for {wait_s:.1f} s")
        finally:
            socket.disable_monitor()
            monitor.close(linger=0)

    async def _comes(
        self, socket: zmq.asyncio.Socket, wait_s: float, deadline: float, live: zmq.asyncio.Socket | None
    ) -> bool:
        """Whether there is something to read within the time."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise ReplayError(f"{self._endpoint}: the answer has no end")
        poller = zmq.asyncio.Poller()
        poller.register(socket, zmq.POLLIN)
        if live is not None:
            poller.register(live, zmq.POLLIN)
        ready = dict(await poller.poll(int(1000 * min(wait_s, left_s)) + 1))
        if socket not in ready and ready:
            raise ReplayInterruptedError(self._endpoint)
        return socket in ready
