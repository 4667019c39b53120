"""The replay socket of an engine: batches that it still keeps."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import zmq
import zmq.asyncio

from kv_events.errors import KvsightError
from publisher.bridge.decoding import MAX_PAYLOAD_BYTES
from publisher.bridge.frames import FrameError, ReplayMessage, parse_replay, replay_request

MAX_MESSAGE_BYTES = 4 * MAX_PAYLOAD_BYTES
"""Beyond it, ZMQ drops the connection. Larger than the largest payload, so that one too large is counted, not fatal."""

_MOST_QUEUED = 100_000


class ReplayError(KvsightError):
    """An answer did not come to its end in time, or makes no sense."""


class ReplayClient:
    """Asks one engine. Each request has a socket of its own, so that no old answer can mix with a new one."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, timeout_s: float) -> None:
        self._context = context
        self._endpoint = endpoint
        self._timeout_ms = int(timeout_s * 1000)

    async def batches(self, start: int) -> AsyncGenerator[ReplayMessage, None]:
        """Kept batches from `start` on, in order, up to the newest; an answer may skip some.

        Raises ReplayError when nothing comes for the time-out.
        """
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, _MOST_QUEUED)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            socket.connect(self._endpoint)
            await socket.send_multipart(replay_request(start))
            while True:
                if not await socket.poll(self._timeout_ms):
                    raise ReplayError(f"{self._endpoint}: nothing for {self._timeout_ms} ms")
                message = parse_replay(await socket.recv_multipart())
                if message.is_end:
                    return
                yield message
        except (zmq.ZMQError, FrameError) as error:
            raise ReplayError(f"{self._endpoint}: {error}") from error
        finally:
            socket.close()
