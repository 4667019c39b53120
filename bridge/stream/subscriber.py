"""The live stream of one address: a SUB socket, its connection, and the publishers that speak on it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from enum import Enum

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from bridge.counters import BridgeCounters
from bridge.settings import BridgeSettings, EngineSettings
from bridge.stream.engine_stream import Source
from bridge.stream.links import LINK_EVENTS, Links, descriptor_of
from bridge.stream.replay import MAX_MESSAGE_BYTES
from kv_events.endpoints import is_ipv6
from kv_events.engine_wire import FrameError, LiveMessage, Payload, parse_live
from kv_events.rate_limited_log import RateLimitedLog

log = logging.getLogger(__name__)

_MESSAGES_AT_A_TIME = 256
_BYTES_AT_A_TIME = 2**22
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
        limited_log: RateLimitedLog,
        source_of: Callable[[str], Source | None],
        sources: Callable[[], list[Source]],
        tidy_up: Callable[[], Awaitable[None]],
    ) -> None:
        """engine: one rank. source_of: the source of a topic. sources: those there are. tidy_up: called now and then,
        while no source is at work.
        """
        self.state = LinkState.CONNECTING
        self.heard_at = time.monotonic()
        """When the last message came, or the subscriber was made."""
        self._context = context
        self._engine = engine
        self._settings = settings
        self._counters = counters
        self._limited_log = limited_log
        self._source_of = source_of
        self._sources = sources
        self._tidy_up = tidy_up
        self._links = Links()
        self._monitor: zmq.Socket[bytes] | None = None
        self._num_links = 0  # ever made
        self._num_told = 0  # of these, known to the sources
        self._away_since: float | None = None

    @property
    def failure(self) -> str | None:
        """Why nothing can come; None: something can, or is still to be connected."""
        return f"{self._engine.endpoint}: the connection is lost" if self._away_since is not None else None

    async def run(self) -> None:
        """Read until cancelled. Raises zmq.ZMQError where the address cannot be used."""
        socket = self._open()
        monitor = socket.get_monitor_socket(LINK_EVENTS)
        self._monitor = zmq.Socket.shadow(monitor)
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
                    if self._engine.worker is not None and self._engine.replay_endpoint is None:
                        # what the old connection brought must not be taken for the new one's
                        await self._read(reader, at_most=_MOST_QUEUED)
                    await self._watch(socket)
                if socket in ready:
                    await self._read(reader)
                    if self._num_links > self._num_told:
                        await self._watch(socket)
                    await asyncio.sleep(0)
                else:
                    await self._be_idle(socket)
                await self._tidy_up()
        finally:
            self._monitor = None
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)

    def _open(self) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, is_ipv6(self._engine.endpoint))
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
        for source, connection, messages in self._received(reader, at_most):
            is_there = self._links.speaks(connection)
            if not is_there:  # lost, or so new that the monitor has still to be asked
                self._take_events()
                is_there = self._links.speaks(connection)
            if is_there:
                self._judge()
                if source.lost_at is not None:
                    await source.reconnected()
                source.connection = connection
            if self._away_since is None and source.lost_at is None:
                source.hear(True)
            await source.take_live(messages)

    def _received(self, reader: zmq.Socket[bytes], at_most: int) -> Iterator[tuple[Source, int, list[LiveMessage]]]:
        """Messages that wait, those of one source and connection that follow each other together; not too many bytes
        at a time.
        """
        speaker: tuple[Source, int] | None = None
        messages: list[LiveMessage] = []
        num_bytes = 0
        for _ in range(at_most):
            try:
                frames, connection = _receive(reader)
            except zmq.Again:
                break
            message = self._parsed(frames)
            source = None if message is None else self._source_of(message.topic)
            if message is None or source is None:
                self._counters.undecodable += 1
                continue
            now_speaks = source, connection
            if speaker is not None and (now_speaks != speaker or num_bytes > _BYTES_AT_A_TIME):
                yield *speaker, messages
                messages, num_bytes = [], 0
            speaker = now_speaks
            messages.append(message)
            num_bytes += len(message.payload)
        if speaker is not None:
            yield *speaker, messages

    def _parsed(self, frames: list[Payload]) -> LiveMessage | None:
        try:
            return parse_live(frames)
        except FrameError as error:
            self._limited_log.warning("a message is left out: %s", error)
            return None

    async def _watch(self, live: zmq.asyncio.Socket) -> None:
        """Follow the connection. One that comes back may lead to another incarnation of the engine."""
        self._take_events()
        self._judge()
        is_new, self._num_told = self._num_links > self._num_told, self._num_links
        if is_new and self._engine.worker is not None:
            for source in self._sources():
                await (source.connected(live) if self._num_links == 1 else source.reconnected())

    def _take_events(self) -> None:
        """What the monitor has to tell. Who names himself is lost with his connection, whatever others there are."""
        while self._monitor is not None and self._monitor.poll(0):
            message = parse_monitor_message(self._monitor.recv_multipart())
            event, descriptor = message["event"], message["value"]
            self._links.take(event, descriptor)
            self._num_links += event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if event == zmq.EVENT_DISCONNECTED and self._engine.worker is None:
                for source in self._sources():
                    if source.connection == descriptor and source.lost_at is None:
                        source.lost_at = time.monotonic()
                        source.hear(False)

    def _judge(self) -> None:
        """How the connection stands by what is known of it."""
        if self._links:
            self.state, self._away_since = LinkState.CONNECTED, None
        elif self._away_since is None and self._num_links:
            self.state, self._away_since = LinkState.AWAY, time.monotonic()
            log.warning("bridge: %s", self.failure)
            for source in self._sources():
                source.hear(False)

    async def _be_idle(self, live: zmq.asyncio.Socket) -> None:
        now = time.monotonic()
        if self._away_since is not None:
            if now - self._away_since >= self._settings.bridge_away_s:
                for source in self._sources():
                    await source.away()
        elif now - self.heard_at >= self._settings.bridge_idle_check_s:
            self.heard_at = now
            for source in self._sources():
                await source.check(live)

    def _wait_ms(self) -> int:
        waits = [self._settings.bridge_idle_check_s]
        if self._away_since is not None:
            waits.append(self._away_since + self._settings.bridge_away_s - time.monotonic())
        return max(1, int(1000 * min(wait for wait in waits if wait > 0 or len(waits) == 1) or 1))


def _receive(reader: zmq.Socket[bytes]) -> tuple[list[Payload], int]:
    """A message, of which only the last frame may be large and so is not copied; its connection. Raises zmq.Again."""
    frame = reader.recv(zmq.NOBLOCK, copy=False)
    connection = descriptor_of(frame)
    frames: list[Payload] = []
    while frame.more:
        frames.append(frame.bytes)
        frame = reader.recv(zmq.NOBLOCK, copy=False)
    frames.append(frame.buffer)
    return frames, connection
