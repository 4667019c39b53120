"""The live stream of one address: a SUB socket, its connections, and the engine streams that send on it."""

import asyncio
import contextlib
import logging
import math
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterable
from enum import Enum

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from bridge.context import BridgeCounters
from bridge.registry import StreamRegistry
from bridge.settings import EngineSettings
from bridge.stream.engine_stream import EngineStream
from bridge.stream.messages import MAX_MESSAGES, Backlog, Inbox, SenderMessages, receiving
from bridge.stream.replay import MAX_MESSAGE_BYTES
from kv_events.engine_wire import LocateError, is_ipv6
from kv_events.remedies import remedy
from kv_events.runtime.outages import RateLimitedLogger
from kv_events.runtime.tls import connection_reason
from kv_events.runtime.words import printable

logger = logging.getLogger(__name__)

_MAX_QUEUED = 10_000
"""Messages of a connection that wait in ZMQ. Further ones wait in the engine, as long as it keeps them."""
_MAX_QUEUED_BYTES = 64 * 2**20
"""Their bytes, as far as the messages before show how large they are."""
_RECONNECT_MS, _RECONNECT_MAX_MS = 100, 2000
_PATIENCE_S, _PROBE_S, _LOG_PERIOD_S = 2.0, 5.0, 600.0
_REPLAY_RETRY_S = 60.0
_TURN_S = 0.02
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 5000, 15_000


class ConnectionState(str, Enum):  # noqa: UP042  (serialised as its value)
    CONNECTING = "connecting"
    CONNECTED = "connected"
    UNREACHABLE = "unreachable"
    """Never connected, for two seconds and longer."""
    AWAY = "away"
    FAILED = "failed"


class Subscriber:
    """Owns the socket, which is open while `run` runs. Engine streams outlive it."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        engine: EngineSettings,
        registry: StreamRegistry,
        counters: BridgeCounters,
        limited_logger: RateLimitedLogger,
        stream_of_topic: Callable[[str], EngineStream | None],
        engine_streams: Callable[[], list[EngineStream]],
        tidy_up: Callable[[], Awaitable[None]],
    ) -> None:
        """engine: one rank. stream_of_topic: finds or makes a topic's stream; None to refuse it. engine_streams: those
        that exist. tidy_up: called regularly, between messages.
        """
        self.state = ConnectionState.CONNECTING
        self.last_message_at = time.monotonic()
        """Time of the last message, or of creation. By `time.monotonic()`."""
        self._context = context
        self._engine = engine
        # Begins log lines. Empty for an address whose workers are named by their topics.
        self._who = f"{printable(engine.worker)}: " if engine.worker else ""
        self._settings = registry.settings
        self._counters = counters
        self._limited_logger = limited_logger
        self._inboxes = registry.inboxes
        self._locate = registry.locate
        self._address: str | None = None  # that the endpoint led to
        self._locate_at = 0.0
        self._stream_of_topic = stream_of_topic
        self._engine_streams = engine_streams
        self._tidy_up = tidy_up
        self._connections = Connections()
        self._monitor: zmq.Socket[bytes] | None = None
        self._num_connected = 0  # connections ever made
        self._num_handled = 0  # of these, those that the engine streams know
        self._away_since: float | None = None
        self._checked_idle_at = -math.inf
        self._began_at = time.monotonic()
        self._why_unlocated: str | None = None
        self._explaining: asyncio.Task[None] | None = None
        self._why_unreachable: str | None = None
        self._retry_replays_at = 0.0
        self._max_queued = _MAX_QUEUED

    @property
    def failure(self) -> str | None:
        """Why no message can arrive; None while connected or still connecting."""
        if self._away_since is not None and self._why_unreachable is None:
            return f"{self._engine.endpoint}: the connection is lost"
        return self._why_unreachable

    @property
    def down_s(self) -> float:
        """Seconds without a connection, if there is none."""
        return time.monotonic() - (self._away_since or self._began_at)

    async def run(self) -> None:
        """Read until cancelled. Raises zmq.ZMQError if the address cannot be used."""
        socket = self._open()
        monitor = socket.get_monitor_socket(CONNECTION_EVENTS)
        self._monitor = zmq.Socket.shadow(monitor)
        reader: zmq.Socket[bytes] = zmq.Socket.shadow(socket)
        backlog = Backlog(self._inboxes, socket, self._counters)
        poller = zmq.asyncio.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        self._begin_to_explain()
        try:
            if self._engine.binds:
                socket.bind(self._engine.endpoint)
            else:
                await self._follow_name(socket)
            with receiving(lambda: self._receive_behind(reader, backlog)):
                for engine_stream in self._engine_streams():
                    await engine_stream.open()
            while True:
                ready = dict(await poller.poll(0 if backlog else self._wait_ms()))
                with receiving(lambda: self._receive_behind(reader, backlog)):
                    if monitor in ready:
                        if self._engine.worker is not None and self._engine.replay_endpoint is None:
                            # messages of the old connection must not count for the new one
                            await self._read(reader, backlog, _MAX_QUEUED + MAX_MESSAGES)
                        await self._watch(backlog)
                    if socket in ready or backlog:
                        await self._read(reader, backlog)
                        if self._num_connected > self._num_handled:
                            await self._watch(backlog)
                        await self._retry_replays(backlog)
                        await asyncio.sleep(0)
                    else:
                        await self._check_idle(backlog)
                    await self._tidy_up()
        finally:
            backlog.clear()
            if self._explaining is not None:
                self._explaining.cancel()
            self._monitor = None
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)

    def _open(self) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, self._engine.binds and is_ipv6(self._engine.endpoint))
        socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.SUBSCRIBE, self._engine.topic.encode())
        return socket

    async def _read(self, reader: zmq.Socket[bytes], backlog: Backlog, at_least: int = 1) -> None:
        """Read messages that wait: many at once, then until there are no more or `at_least` were read."""
        self.last_message_at = time.monotonic()
        with self._inboxes.one() as inbox:
            num_read, has_more = 0, True
            while (backlog or has_more) and num_read < at_least:
                if backlog:
                    sent = backlog.take()
                    num_read += sum(len(each.messages) for each in sent)
                    await self._take(sent)
                else:
                    has_more = self._receive(reader, inbox)
                    num_read += len(inbox) + inbox.num_bad
                    await self._take(inbox)

    def _receive(self, reader: zmq.Socket[bytes], inbox: Inbox) -> bool:
        """Receive messages that wait. Returns whether more may wait."""
        has_more = inbox.receive(reader, with_topics=self._engine.worker is None)
        self._bound_queue(reader, inbox)
        if inbox.num_bad:
            self._counters.undecodable += inbox.num_bad
            self._limited_logger.warning("a message is left out: %d frames of %s bytes", *inbox.bad_sizes)
        return has_more

    def _bound_queue(self, reader: zmq.Socket[bytes], inbox: Inbox) -> None:
        """Let fewer messages wait in ZMQ after large ones, because its own bound counts messages only.

        It is never raised again: libzmq would not wake a connection that waits for room by the old bound.
        """
        max_queued = max(1, _MAX_QUEUED_BYTES // max(inbox.message_bytes, 1))
        if max_queued < self._max_queued:
            self._max_queued = max_queued
            reader.setsockopt(zmq.RCVHWM, max_queued)

    def _receive_behind(self, reader: zmq.Socket[bytes], backlog: Backlog) -> None:
        """Receive what waits while earlier messages are still applied."""
        until, has_more, num_dropped = time.monotonic() + _TURN_S, True, self._counters.dropped_batches
        with self._inboxes.one() as inbox:
            while has_more and time.monotonic() < until:
                has_more = self._receive(reader, inbox)
                if len(inbox):
                    backlog.add(inbox)
        if self._counters.dropped_batches > num_dropped:
            self._limited_logger.warning("it sends faster than its messages can be applied: the oldest are dropped")

    async def _take(self, sent: Iterable[SenderMessages]) -> None:
        until = time.monotonic() + _TURN_S
        for topic, connection, messages in sent:
            if time.monotonic() >= until:
                await asyncio.sleep(0)
                until = time.monotonic() + _TURN_S
            engine_stream = self._stream_of_topic(topic)
            if engine_stream is None:
                self._counters.undecodable += len(messages)
                continue
            is_connected = self._connections.note_message(connection)
            if not is_connected:  # lost, or the monitor has not reported it yet
                self._take_events()
                is_connected = self._connections.note_message(connection)
            if is_connected:
                self._update_state()
                if engine_stream.lost_at is not None:
                    await engine_stream.reconnected()
                engine_stream.connection = connection
            if self._away_since is None and engine_stream.lost_at is None:
                engine_stream.set_receiving(True)
            await engine_stream.take_live(messages)

    async def _watch(self, live: Backlog) -> None:
        """Follow the connection. After a reconnect, the engine may be another incarnation."""
        self._take_events()
        self._update_state()
        is_new, self._num_handled = self._num_connected > self._num_handled, self._num_connected
        if is_new and self._engine.worker is not None:
            for engine_stream in self._engine_streams():
                await (engine_stream.connected(live) if self._num_connected == 1 else engine_stream.reconnected())

    def _take_events(self) -> None:
        """Apply the monitor's events. A self-named worker becomes stale when its own connection is lost."""
        while self._monitor is not None and self._monitor.poll(0):
            message = parse_monitor_message(self._monitor.recv_multipart())
            event, descriptor = message["event"], message["value"]
            self._connections.take(event, descriptor)
            self._num_connected += event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if event == zmq.EVENT_DISCONNECTED and self._engine.worker is None:
                for engine_stream in self._engine_streams():
                    if engine_stream.connection == descriptor and engine_stream.lost_at is None:
                        engine_stream.lost_at = time.monotonic()
                        engine_stream.set_receiving(False)

    def _begin_to_explain(self) -> None:
        if self._explaining is None or self._explaining.done():
            self._explaining = asyncio.create_task(self._explain(), name=f"bridge-reach:{self._engine.endpoint}")

    async def _explain(self) -> None:
        """Find out why there is no connection, until there is one. Logs it at once, and again every ten minutes."""
        logged: tuple[str | None, float] = None, -math.inf
        await asyncio.sleep(_PATIENCE_S)
        while not self._engine.binds and not self._connections:
            if self._why_unlocated is None and self._address is not None:
                reason = await why_unreachable(self._engine.endpoint, self._address)
            else:
                reason = self._why_unlocated or f"{self._engine.endpoint}: the name is still being looked up"
            if reason is None or self._connections:
                return
            self._why_unreachable = reason
            if self._away_since is None:
                self.state = ConnectionState.UNREACHABLE
            if reason != logged[0] or time.monotonic() - logged[1] > _LOG_PERIOD_S:
                logged = reason, time.monotonic()
                logger.warning("bridge: %s%s; trying again. %s", self._who, reason, remedy(reason))
            await asyncio.sleep(_PROBE_S)

    def _update_state(self) -> None:
        if self._connections:
            if self._why_unreachable is not None:
                logger.warning("bridge: %sconnected to %s", self._who, self._engine.endpoint)
            self.state, self._away_since, self._why_unreachable = ConnectionState.CONNECTED, None, None
        elif self._away_since is None and self._num_connected:
            self.state, self._away_since = ConnectionState.AWAY, time.monotonic()
            logger.warning("bridge: %s%s", self._who, self.failure)
            for engine_stream in self._engine_streams():
                engine_stream.set_receiving(False)
            self._begin_to_explain()

    async def _follow_name(self, live: zmq.asyncio.Socket) -> None:
        """Connect to where the endpoint leads now. An engine that comes back may have another address."""
        self._locate_at = time.monotonic() + _PROBE_S
        try:
            address = await self._locate(self._engine.endpoint)
        except LocateError as error:
            self._why_unreachable = self._why_unlocated = str(error)
            return
        self._why_unlocated = None
        if address != self._address:
            if self._address is not None:
                live.disconnect(self._address)
            live.setsockopt(zmq.IPV6, is_ipv6(address))
            live.connect(address)
            self._address = address

    async def _check_idle(self, live: Backlog) -> None:
        now = self._checked_idle_at = time.monotonic()
        if not (self._connections or self._engine.binds) and now >= self._locate_at:
            await self._follow_name(live.socket)
        if self._away_since is not None:
            if now - self._away_since >= self._settings.bridge_away_s:
                for engine_stream in self._engine_streams():
                    await engine_stream.expire()
        elif now - self.last_message_at >= self._settings.bridge_idle_check_s:
            self.last_message_at = now
            for engine_stream in self._engine_streams():
                await engine_stream.check(live)

    async def _retry_replays(self, live: Backlog) -> None:
        """Ask replay sockets that failed once more, now and then: an engine that is never idle is not checked."""
        if time.monotonic() >= self._retry_replays_at:
            self._retry_replays_at = time.monotonic() + _REPLAY_RETRY_S
            for engine_stream in self._engine_streams():
                if engine_stream.replay_failure is not None:
                    await engine_stream.check(live)

    def _wait_ms(self) -> int:
        wait_s = self._settings.bridge_idle_check_s
        if self._away_since is not None:
            expires_at = self._away_since + self._settings.bridge_away_s
            if self._checked_idle_at < expires_at:  # the outage was not yet too long when last checked
                wait_s = min(wait_s, expires_at - time.monotonic())
        return max(1, math.ceil(1000 * wait_s))


CONNECTION_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
"""The monitor events that `Connections.take` needs."""


class Connections:
    """Open connections that completed their handshake, by file descriptor. True if there are any.

    A monitor also reports connections that never complete one: port scanners, health checks, sockets of a wrong type.
    It gives the descriptor of a connection that begins or ends, but not of one that completes its handshake. That is
    assumed to be the newest open one until a message proves otherwise.
    """

    def __init__(self) -> None:
        self._begun: list[int] = []  # without a handshake; newest last
        self._made: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._made)

    def take(self, event: int, descriptor: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            if self._begun:
                self._made.add(self._begun.pop())
        elif event == zmq.EVENT_DISCONNECTED:
            self._made.discard(descriptor)
            if descriptor in self._begun:
                self._begun.remove(descriptor)
        else:
            self._begun.append(descriptor)

    def note_message(self, descriptor: int) -> bool:
        """Note a message's connection. False if the connection was lost since, or is not known yet."""
        if descriptor in self._begun:
            self._begun.remove(descriptor)
            self._made.add(descriptor)
        return descriptor in self._made


_TIMEOUT_S = 2.0


async def why_unreachable(endpoint: str, located: str | None = None) -> str | None:
    """Open a connection to a ZMQ address and close it. Returns why the engine's events cannot be read there.

    located: where the endpoint leads. None: its name is looked up.

    For an address that has no engine's handshake although something accepts connections there. None: nothing is known
    about addresses of this kind.
    """
    scheme, _, address = (located or endpoint).partition("://")
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            if scheme == "tcp":
                host, _, port = address.rpartition(":")
                family = socket.AF_INET6 if is_ipv6(located or endpoint) else socket.AF_INET  # as ZMQ does
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port), family=family)
            elif scheme == "ipc":
                _, writer = await asyncio.open_unix_connection(address)
            else:
                return None
    except TimeoutError:
        return f"cannot connect to {endpoint}: no answer within {_TIMEOUT_S:.0f} s"
    except (OSError, ValueError) as error:
        return f"cannot connect to {endpoint}: {_reason(error)}"
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return f"{endpoint} accepts connections, but has not answered as a ZMQ publisher"


def _reason(error: OSError | ValueError) -> str:
    if (known := connection_reason(error)) is not None:
        return known
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno).lower()
    return str(error)
