"""The live stream of one address: a SUB socket, its connection, and the publishers that speak on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from enum import Enum

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from publisher.bridge.counters import BridgeCounters
from publisher.bridge.frames import FrameError, LiveMessage, parse_live
from publisher.bridge.replay import MAX_MESSAGE_BYTES
from publisher.bridge.settings import BridgeSettings, EngineSettings
from publisher.bridge.source import Source

_MESSAGES_AT_A_TIME = 256
_BYTES_AT_A_TIME = 2**20
_MOST_QUEUED = 10_000
"""Messages that wait while others are replayed; what goes beyond is a gap, to be replayed in turn."""
_RECONNECT_MS, _RECONNECT_MAX_MS = 100, 2000
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 5000, 15_000


class LinkState(str, Enum):  # noqa: UP042  (serialised as its value)
    """How the connection stands."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    AWAY = "away"
    FAILED = "failed"


class Subscriber:
    """Owns the socket; `run` is its life. Sources outlive it."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        engine: EngineSettings,
        settings: BridgeSettings,
        counters: BridgeCounters,
        source_of: Callable[[str], Source | None],
        sources: Callable[[], list[Source]],
    ) -> None:
        """engine: one rank. source_of: the source of a topic. sources: those there are."""
        self.state = LinkState.CONNECTING
        self.heard_at = time.monotonic()
        """When the last message came, or the subscriber was made."""
        self._context = context
        self._engine = engine
        self._settings = settings
        self._counters = counters
        self._source_of = source_of
        self._sources = sources
        self._connections = 0
        self._was_connected = False
        self._away_since: float | None = None

    async def run(self) -> None:
        """Read until cancelled. Raises zmq.ZMQError where the address cannot be used."""
        socket = self._open()
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        reader: zmq.Socket[bytes] = zmq.Socket.shadow(socket)
        poller = zmq.asyncio.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        try:
            if self._engine.binds:
                socket.bind(self._engine.endpoint)
            else:
                socket.connect(self._engine.endpoint)
            for source in self._sources():
                await source.open()
            while True:
                ready = dict(await poller.poll(self._wait_ms()))
                if monitor in ready:
                    if self._engine.replay_endpoint is None:
                        # what the old connection brought must not be taken for the new one's
                        await self._read(reader, at_most=_MOST_QUEUED)
                    await self._watch(zmq.Socket.shadow(monitor))
                if socket in ready:
                    await self._read(reader)
                    await asyncio.sleep(0)
                else:
                    await self._be_idle()
        finally:
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)

    def _open(self) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, _MOST_QUEUED)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.SUBSCRIBE, self._engine.topic.encode())
        return socket

    async def _read(self, reader: zmq.Socket[bytes], at_most: int = _MESSAGES_AT_A_TIME) -> None:
        """What is there, but not for too long: others want their turn, too."""
        self.heard_at = time.monotonic()
        for source, messages in self._received(reader, at_most):
            await source.take_live(messages)

    def _received(self, reader: zmq.Socket[bytes], at_most: int) -> Iterator[tuple[Source, list[LiveMessage]]]:
        """Messages that wait, those of one source that follow each other together; not too many bytes at a time."""
        speaker: Source | None = None
        messages: list[LiveMessage] = []
        num_bytes = 0
        for _ in range(at_most):
            try:
                frames: list[bytes] = reader.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            message = self._parsed(frames)
            source = None if message is None else self._source_of(message.topic)
            if message is None or source is None:
                self._counters.undecodable += 1
                continue
            if speaker is not None and (source is not speaker or num_bytes > _BYTES_AT_A_TIME):
                yield speaker, messages
                messages, num_bytes = [], 0
            speaker = source
            messages.append(message)
            num_bytes += len(message.payload)
        if speaker is not None:
            yield speaker, messages

    def _parsed(self, frames: list[bytes]) -> LiveMessage | None:
        try:
            return parse_live(frames)
        except FrameError:
            return None

    async def _watch(self, monitor: zmq.Socket[bytes]) -> None:
        """Follow the connection. One that comes back may lead to another incarnation of the engine."""
        is_back = False
        while monitor.poll(0):
            event = parse_monitor_message(monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                is_back = is_back or self._was_connected
                self._connections += 1
                self._was_connected = True
            elif event == zmq.EVENT_DISCONNECTED:
                self._connections = max(0, self._connections - 1)
        if self._connections:
            self.state, self._away_since = LinkState.CONNECTED, None
        elif self._away_since is None and self._was_connected:
            self.state, self._away_since = LinkState.AWAY, time.monotonic()
        if is_back and self._engine.worker is not None:
            for source in self._sources():
                await source.reconnected()

    async def _be_idle(self) -> None:
        now = time.monotonic()
        if self._away_since is not None:
            if now - self._away_since >= self._settings.bridge_away_s:
                for source in self._sources():
                    await source.away()
        elif now - self.heard_at >= self._settings.bridge_idle_check_s:
            self.heard_at = now
            for source in self._sources():
                await source.check()

    def _wait_ms(self) -> int:
        waits = [self._settings.bridge_idle_check_s]
        if self._away_since is not None:
            waits.append(self._away_since + self._settings.bridge_away_s - time.monotonic())
        return max(1, int(1000 * min(wait for wait in waits if wait > 0 or len(waits) == 1) or 1))
