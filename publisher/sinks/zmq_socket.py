"""The sockets of the engines' event protocol: live batches, and replays of those that are kept."""

import asyncio

import zmq

from kv_events.engine_wire import is_ipv6, seq_frame
from publisher.sinks.base import SinkUnavailableError
from publisher.sinks.zmq_replay import KeptBatches, ReplaySocket

_LINGER_MS = 500
_MAX_UNREAD = 100_000
"""Batches that may wait for a slow reader. It misses later ones and can request a replay."""


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
