"""Client of an engine's replay socket, which sends again the batches that the engine still keeps."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

import zmq
import zmq.asyncio

from bridge.decoding.decoder import MAX_PAYLOAD_BYTES
from kv_events.endpoints import Locate, LocateError, as_given, is_ipv6
from kv_events.engine_wire import FrameError, ReplayMessage, parse_replay, replay_request
from kv_events.errors import KvsightError

MAX_MESSAGE_BYTES = 4 * MAX_PAYLOAD_BYTES
"""ZMQ drops the connection at a larger one. Above the payload limit, so that a payload too large is counted, not
fatal."""

_MAX_QUEUED = 100_000
_CONNECT_S = 1.0


class ReplayError(KvsightError):
    """An answer was not complete in time, or is invalid."""


class ReplayUnreachableError(ReplayError):
    """There is no connection, so no request was sent."""


class ReplayInterruptedError(KvsightError):
    """A live message arrived while the replay was pending."""


class ReplayClient:
    """Requests replays from one engine. Each request has its own socket, so that answers never mix."""

    def __init__(
        self, context: zmq.asyncio.Context, endpoint: str, timeout_s: float, locate: Locate = as_given
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._locate = locate

    async def batches(
        self, start: int, deadline: float, live: zmq.asyncio.Socket | None = None
    ) -> AsyncGenerator[ReplayMessage, None]:
        """Yield the kept batches from `start` to the newest, numbers ascending. An answer may skip some.

        deadline: by `time.monotonic()`. live: a socket whose messages end the wait. Raises ReplayUnreachableError
        without a connection, ReplayError when nothing arrives within the timeout or the answer is longer than the
        deadline, and ReplayInterruptedError when there is a connection, and `live` has a message and the replay none.
        """
        try:
            address = await self._locate(self._endpoint)
        except LocateError as error:
            raise ReplayUnreachableError(str(error)) from None
        socket = self._context.socket(zmq.DEALER)
        # a readable socket may be empty again once the engine has died, so reads must not block; waits have a limit
        non_blocking: zmq.Socket[bytes] = zmq.Socket.shadow(socket)
        try:
            self._set_options(socket, address)
            await self._connect(socket, address, deadline)
            non_blocking.send_multipart(replay_request(start), zmq.NOBLOCK)
            last = -1
            while True:
                if not await self._is_readable(socket, self._timeout_s, deadline, live):
                    raise ReplayError(f"{self._endpoint}: no message for {self._timeout_s:.1f} s")
                message = parse_replay(non_blocking.recv_multipart(zmq.NOBLOCK))
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

    def _set_options(self, socket: zmq.asyncio.Socket, address: str) -> None:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, is_ipv6(address))
        socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)

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
        self, socket: zmq.asyncio.Socket, wait_s: float, deadline: float, live: zmq.asyncio.Socket | None
    ) -> bool:
        """Wait until the socket is readable. False if it is not in time."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise ReplayError(f"{self._endpoint}: the answer does not end")
        poller = zmq.asyncio.Poller()
        poller.register(socket, zmq.POLLIN)
        if live is not None:
            poller.register(live, zmq.POLLIN)
        ready = dict(await poller.poll(int(1000 * min(wait_s, left_s)) + 1))
        if socket not in ready and ready:
            raise ReplayInterruptedError(self._endpoint)
        return socket in ready
